package reducer

import (
	"encoding/json"
	"errors"
	"math/big"
	"strconv"
)

var errCount = errors.New("its count is out of range or doesn't agree with the rest")

type countFold struct {
	Count int64 `json:"count"`
}

func (f *countFold) add(int64, *value) bool {
	f.Count++
	return true
}

func (f *countFold) merge(other fold) { f.Count += other.(*countFold).Count }

func (f *countFold) value() json.RawMessage { return strconv.AppendInt(nil, f.Count, 10) }

func (f *countFold) check() error {
	if !validCount(f.Count) {
		return errCount
	}
	return nil
}

type sumFold struct {
	Sum total `json:"sum"`
}

func (f *sumFold) add(_ int64, v *value) bool {
	n, ok := v.number()
	if ok {
		f.Sum.add(n)
	}
	return ok
}

func (f *sumFold) merge(other fold)       { f.Sum.merge(&other.(*sumFold).Sum) }
func (f *sumFold) value() json.RawMessage { return f.Sum.number().append(nil) }
func (f *sumFold) check() error           { return nil }

// extremeFold is min or max.
type extremeFold struct {
	Best *number `json:"best"` // nil: none yet
	sign int     // 1 for max, -1 for min
}

func (f *extremeFold) add(_ int64, v *value) bool {
	n, ok := v.number()
	if ok {
		f.consider(n)
	}
	return ok
}

func (f *extremeFold) consider(n *number) {
	switch {
	case f.Best == nil:
		f.Best = new(*n)
	case n.cmp(*f.Best)*f.sign > 0:
		*f.Best = *n
	}
}

func (f *extremeFold) merge(other fold) {
	if o := other.(*extremeFold); o.Best != nil {
		f.consider(o.Best)
	}
}

func (f *extremeFold) value() json.RawMessage {
	if f.Best == nil {
		return null()
	}
	return f.Best.append(nil)
}

func (f *extremeFold) check() error { return nil }

type meanFold struct {
	Count int64 `json:"count"`
	Sum   total `json:"sum"`
}

func (f *meanFold) add(_ int64, v *value) bool {
	n, ok := v.number()
	if ok {
		f.Count++
		f.Sum.add(n)
	}
	return ok
}

func (f *meanFold) merge(other fold) {
	o := other.(*meanFold)
	f.Count += o.Count
	f.Sum.merge(&o.Sum)
}

func (f *meanFold) value() json.RawMessage { return mean(f.Sum.number(), f.Count) }

func mean(sum number, count int64) json.RawMessage {
	if count == 0 {
		return null()
	}
	mean := sum.rat()
	mean.Quo(mean, new(big.Rat).SetInt64(count))
	if mean.IsInt() {
		return number{wide: mean.Num()}.append(nil)
	}
	nearest, _ := mean.Float64()
	return floatJSON(nearest)
}

func (f *meanFold) check() error {
	if !validCount(f.Count) {
		return errCount
	}
	return nil
}
