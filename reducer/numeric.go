package reducer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"math/big"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"
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

// total is an exact sum of decimals: small·10^exp + wide·10^wideExp. The first part is for speed
// (BenchmarkAdd/sum measures it), and overflows into the second.
type total struct {
	small   int64
	exp     int
	wide    big.Int
	wideExp int
	term    big.Int // scratch
	factor  big.Int // scratch
}

func (t *total) add(n *number) {
	if n.wide != nil {
		t.addWide(t.term.Set(n.wide), n.exp)
		return
	}
	t.addSmall(n.m, n.exp)
}

func (t *total) addSquare(n *number) {
	if n.wide != nil {
		t.addWide(t.term.Mul(n.wide, n.wide), 2*n.exp)
		return
	}
	m := max(n.m, -n.m)
	if high, low := bits.Mul64(uint64(m), uint64(m)); high == 0 && low < 1<<63 {
		t.addSmall(int64(low), 2*n.exp)
		return
	}
	t.factor.SetInt64(m)
	t.addWide(t.term.Mul(&t.factor, &t.factor), 2*n.exp)
}

func (t *total) addSmall(m int64, exp int) {
	if m == 0 {
		return
	}
	if t.small == 0 {
		t.small, t.exp = m, exp
		return
	}
	a, b, ok := align(number{m: t.small, exp: t.exp}, number{m: m, exp: exp})
	if sum := a + b; ok && (sum > a) == (b > 0) {
		t.small, t.exp = sum, min(t.exp, exp)
		return
	}
	t.addWide(t.term.SetInt64(t.small), t.exp)
	t.small, t.exp = m, exp
}

// addWide adds term·10^exp. It may change term.
func (t *total) addWide(term *big.Int, exp int) {
	switch {
	case term.Sign() == 0:
		return
	case t.wide.Sign() == 0:
		t.wideExp = exp
	case exp < t.wideExp:
		t.wide.Mul(&t.wide, pow10(t.wideExp-exp))
		t.wideExp = exp
	case exp > t.wideExp:
		term.Mul(term, pow10(exp-t.wideExp))
	}
	t.wide.Add(&t.wide, term)
}

func (t *total) merge(o *total) {
	t.addSmall(o.small, o.exp)
	t.addWide(t.term.Set(&o.wide), o.wideExp)
}

// number returns the sum.
func (t *total) number() number {
	if t.wide.Sign() == 0 {
		return number{m: t.small, exp: t.exp}
	}
	var sum total
	sum.addWide(sum.term.Set(&t.wide), t.wideExp)
	sum.addWide(sum.term.SetInt64(t.small), t.exp)
	return number{wide: &sum.wide, exp: sum.wideExp}
}

func (t *total) MarshalJSON() ([]byte, error) { return t.number().append(nil), nil }

func (t *total) UnmarshalJSON(text []byte) error {
	var n number
	if err := n.UnmarshalJSON(text); err != nil {
		return err
	}
	*t = total{}
	t.add(&n)
	return nil
}

// Bounds of the op count_by.
const (
	MaxKeys     = 1000        // keys in the aggregate, besides OtherKey
	MaxKeyBytes = 128         // bytes of a key
	OtherKey    = "__other__" // the key that counts the values of all other keys
)

// countByFold is the partial state of the op count_by. It keeps the counts of the first MaxKeys of
// all keys that it has seen, in the order of keyOrder. Merging is exact: a key that is among the
// first of all is among the first of each partial state, so no partial state ever drops its count.
// It may hold nearly twice as many keys: prune removes them then, and before the state is read.
type countByFold struct {
	Counts map[string]*int64 `json:"counts"`
	Other  int64             `json:"other"`
}

// keyOrder orders short keys before long ones, since short values are more often categories than
// free text.
func keyOrder(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

func (f *countByFold) add(_ int64, v *value) bool {
	var scratch [64]byte
	key, ok := keyOf(v, scratch[:0])
	if !ok {
		return false
	}
	if n := f.Counts[string(key)]; n != nil { // the common case: no copy of the key
		*n++
		return true
	}
	f.addKey(string(key), 1)
	return true
}

func (f *countByFold) addKey(key string, count int64) {
	if key == OtherKey {
		f.Other += count
		return
	}
	if n := f.Counts[key]; n != nil {
		*n += count
		return
	}
	f.Counts[key] = new(count)
	if len(f.Counts) >= 2*MaxKeys {
		f.prune()
	}
}

func (f *countByFold) prune() {
	if len(f.Counts) <= MaxKeys {
		return
	}
	keys := slices.SortedFunc(maps.Keys(f.Counts), keyOrder)
	for _, key := range keys[MaxKeys:] {
		f.Other += *f.Counts[key]
		delete(f.Counts, key)
	}
}

func (f *countByFold) merge(other fold) {
	o := other.(*countByFold)
	f.Other += o.Other
	for key, n := range o.Counts {
		f.addKey(key, *n)
	}
}

func (f *countByFold) MarshalJSON() ([]byte, error) {
	f.prune()
	type plain countByFold
	return json.Marshal((*plain)(f))
}

func (f *countByFold) value() json.RawMessage {
	f.prune()
	shown := make(map[string]int64, len(f.Counts)+1)
	for key, n := range f.Counts {
		shown[key] = *n
	}
	if f.Other > 0 {
		shown[OtherKey] = f.Other
	}
	b, err := json.Marshal(shown)
	if err != nil {
		return null()
	}
	return b
}

func (f *countByFold) check() error {
	if !validCount(f.Other) || f.Counts == nil || len(f.Counts) > MaxKeys {
		return errCount
	}
	for key, n := range f.Counts {
		if n == nil || *n <= 0 || !validCount(*n) || len(key) > MaxKeyBytes || key == OtherKey {
			return errCount
		}
	}
	return nil
}

// keyOf returns the key under which count_by counts a string, number or boolean; false for any
// other value. The key may be stored in scratch.
func keyOf(v *value, scratch []byte) ([]byte, bool) {
	switch v.raw[0] {
	case '"':
		text, ok := v.text()
		return bounded(text), ok
	case 't', 'f':
		return v.raw, string(v.raw) == "true" || string(v.raw) == "false"
	}
	n, ok := v.number()
	if !ok {
		return nil, false
	}
	return bounded(n.append(scratch)), true
}

// bounded shortens a long key to MaxKeyBytes without splitting a character, and ends it in "…".
func bounded(key []byte) []byte {
	const mark = "…"
	if len(key) <= MaxKeyBytes {
		return key
	}
	end := MaxKeyBytes - len(mark)
	for end > 0 && !utf8.RuneStart(key[end]) {
		end--
	}
	return append(bytes.Clone(key[:end]), mark...)
}
