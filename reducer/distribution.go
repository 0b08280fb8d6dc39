package reducer

import (
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"slices"
	"strconv"
)

// distributionFold is the partial state of the op distribution. It has the exact count, minimum,
// maximum, sum and sum of squares. For percentiles it counts positive and negative numbers in
// buckets, and zeros.
type distributionFold struct {
	Count    int64   `json:"count"`
	Min      *number `json:"min"`
	Max      *number `json:"max"`
	Sum      total   `json:"sum"`
	Squares  total   `json:"squares"`
	Zeros    int64   `json:"zeros"`
	Positive buckets `json:"positive"`
	Negative buckets `json:"negative"`
}

func (f *distributionFold) add(_ int64, v *value) bool {
	n, ok := v.number()
	if !ok {
		return false
	}
	f.Count++
	f.widen(n)
	f.Sum.add(n)
	f.Squares.addSquare(n)
	switch x := n.float(); {
	case x >= smallestValue:
		f.Positive.add(bucketOf(x), 1)
	case x <= -smallestValue:
		f.Negative.add(bucketOf(-x), 1)
	default:
		f.Zeros++
	}
	return true
}

func (f *distributionFold) widen(n *number) {
	if f.Min == nil || n.cmp(*f.Min) < 0 {
		f.Min = new(*n)
	}
	if f.Max == nil || n.cmp(*f.Max) > 0 {
		f.Max = new(*n)
	}
}

func (f *distributionFold) merge(other fold) {
	o := other.(*distributionFold)
	if o.Count == 0 {
		return
	}
	f.Count += o.Count
	f.widen(o.Min)
	f.widen(o.Max)
	f.Sum.merge(&o.Sum)
	f.Squares.merge(&o.Squares)
	f.Zeros += o.Zeros
	f.Positive.merge(&o.Positive)
	f.Negative.merge(&o.Negative)
}

type distribution struct {
	Count  int64           `json:"count"`
	Min    *number         `json:"min"`
	Max    *number         `json:"max"`
	Mean   json.RawMessage `json:"mean"`
	StdDev json.RawMessage `json:"stddev"`
	P50    json.RawMessage `json:"p50"`
	P90    json.RawMessage `json:"p90"`
	P95    json.RawMessage `json:"p95"`
	P99    json.RawMessage `json:"p99"`

	Histogram [][3]json.RawMessage `json:"histogram"`
}

func (f *distributionFold) value() json.RawMessage {
	if f.Count == 0 {
		return null()
	}
	p := f.percentiles(50, 90, 95, 99)
	b, err := json.Marshal(distribution{
		Count: f.Count, Min: f.Min, Max: f.Max, Mean: mean(f.Sum.number(), f.Count), StdDev: floatJSON(f.deviation()),
		P50: floatJSON(p[0]), P90: floatJSON(p[1]), P95: floatJSON(p[2]), P99: floatJSON(p[3]),
		Histogram: f.histogram(),
	})
	if err != nil {
		return null()
	}
	return b
}

const histogramBars = 24

// histogram returns up to histogramBars ranges as [from, to, count], from the least to the greatest
// number. Each joins as many neighboring buckets as the others, so that the counts are exact and the
// ranges of numbers above 0 grow by the same factor. Bounds between ranges have five digits.
func (f *distributionFold) histogram() (bars [][3]json.RawMessage) {
	least, most := f.Min.float(), f.Max.float()
	positive, negative := f.Positive.counts, f.Negative.counts
	total := len(negative) + len(positive)
	if f.Zeros > 0 {
		total++
	}
	each := (total + histogramBars - 1) / histogramBars
	from, seen, count := least, 0, int64(0)
	pass := func(top float64, n int64) {
		seen, count = seen+1, count+n
		if seen%each != 0 && seen != total {
			return
		}
		to := most
		if seen != total {
			to, _ = strconv.ParseFloat(strconv.FormatFloat(top, 'g', 5, 64), 64)
			to = min(max(to, from), most)
		}
		bars = append(bars, [3]json.RawMessage{floatJSON(from), floatJSON(to), strconv.AppendInt(nil, count, 10)})
		from, count = to, 0
	}
	for i, n := range slices.Backward(negative) {
		pass(-bucketTop(f.Negative.lowest+i-1), n)
	}
	if f.Zeros > 0 {
		pass(0, f.Zeros)
	}
	for i, n := range positive {
		pass(bucketTop(f.Positive.lowest+i), n)
	}
	return bars
}

// deviation returns the standard deviation of the population:
//
//	√(n·Σx² - (Σx)²) / n
//
// The sums are exact, so the subtraction loses no digits.
func (f *distributionFold) deviation() float64 {
	n := new(big.Rat).SetInt64(f.Count)
	sum := f.Sum.number().rat()
	spread := f.Squares.number().rat()
	spread.Sub(spread.Mul(spread, n), sum.Mul(sum, sum))
	if spread.Sign() <= 0 { // negative only if the stored state is corrupt
		return 0
	}
	root := new(big.Float).SetPrec(128).SetRat(spread)
	root.Sqrt(root)
	deviation, _ := root.Quo(root, new(big.Float).SetInt64(f.Count)).Float64()
	return deviation
}

// percentiles returns, for each p in ps, an estimate from the buckets of the p-th percentile: the
// value of rank ⌈p·n/100⌉, counted from 1. ps must be ascending.
func (f *distributionFold) percentiles(ps ...int64) []float64 {
	least, most := f.Min.float(), f.Max.float()
	found := make([]float64, 0, len(ps))
	var passed int64
	pass := func(x float64, count int64) {
		passed += count
		for len(found) < len(ps) && passed > 0 && (ps[len(found)]*f.Count+99)/100 <= passed {
			found = append(found, min(max(x, least), most))
		}
	}
	for i, n := range slices.Backward(f.Negative.counts) {
		pass(-bucketValue(f.Negative.lowest+i), n)
	}
	pass(0, f.Zeros)
	for i, n := range f.Positive.counts {
		pass(bucketValue(f.Positive.lowest+i), n)
	}
	return found
}

func (f *distributionFold) check() error {
	if !validCount(f.Count) || !validCount(f.Zeros) || f.Count-f.Zeros-f.Positive.total()-f.Negative.total() != 0 {
		return errCount
	}
	if (f.Count == 0) != (f.Min == nil) || (f.Count == 0) != (f.Max == nil) {
		return errCount
	}
	return nil
}

func (b *buckets) MarshalJSON() ([]byte, error) {
	out := []byte{'['}
	for i, n := range b.counts {
		if n == 0 {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = strconv.AppendInt(out, int64(b.lowest+i), 10)
		out = strconv.AppendInt(append(out, ','), n, 10)
	}
	return append(out, ']'), nil
}

func (b *buckets) UnmarshalJSON(encoded []byte) error {
	var pairs []int64
	if err := unmarshalStrict(encoded, &pairs); err != nil {
		return err
	}
	*b = buckets{}
	if len(pairs) == 0 {
		return nil
	}
	if len(pairs)%2 != 0 || !slices.IsSorted(indices(pairs)) {
		return errBuckets
	}
	lowest, top := pairs[0], pairs[len(pairs)-2]
	if lowest < -maxBucket || top > maxBucket || top-lowest >= maxBuckets {
		return errBuckets
	}
	b.lowest, b.counts = int(lowest), make([]int64, top-lowest+1)
	var total int64
	for i := 0; i < len(pairs); i += 2 {
		index, count := pairs[i], pairs[i+1]
		total += count
		if count <= 0 || !validCount(count) || !validCount(total) {
			return errBuckets
		}
		b.counts[index-lowest] += count
	}
	return nil
}

func indices(pairs []int64) []int64 {
	out := make([]int64, 0, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, pairs[i])
	}
	return out
}

// buckets implement DDSketch: C. Masson, J. E. Rim, H. K. Lee, "DDSketch: A fast and
// fully-mergeable quantile sketch with relative-error guarantees", PVLDB 12(12), 2019. Bucket i
// counts the values in (γ^(i-1), γ^i] and estimates each of them as 2γ^i/(γ+1), with a relative
// error of at most accuracy. It is written by hand so that the order of values and merges makes no
// difference to the result; BenchmarkAdd/distribution measures it.
const (
	accuracy = 0.01
	gamma    = (1 + accuracy) / (1 - accuracy)
	// maxBuckets buckets span a factor of 6·10^17. Values further below the greatest one are
	// counted in the lowest bucket (the paper's collapsing). The span depends only on the greatest
	// value, so the order of values and merges makes no difference.
	maxBuckets = 2048
	// smallestValue is the magnitude below which numbers count as zero: float64 has no full
	// precision there.
	smallestValue = 0x1p-1022
	maxBucket     = 36_000 // bounds the bucket index of every finite float64
)

var (
	errBuckets = errors.New("its buckets are malformed")
	logGamma   = math.Log(gamma)
)

// buckets counts numbers by bucket index. Its JSON is [index, count, …], by ascending index.
type buckets struct {
	lowest int
	counts []int64 // counts[i] is of the bucket lowest+i
}

func bucketOf(x float64) int { return int(math.Ceil(math.Log(x) / logGamma)) }

func bucketValue(i int) float64 { return 2 * math.Exp(float64(i)*logGamma) / (gamma + 1) }

func bucketTop(i int) float64 { return math.Exp(float64(i) * logGamma) }

func (b *buckets) add(i int, count int64) {
	if len(b.counts) == 0 {
		b.lowest = i
	}
	if top := b.lowest + len(b.counts) - 1; i > top {
		b.reach(i)
	}
	if i < b.lowest {
		i = max(i, b.lowest+len(b.counts)-maxBuckets)
		b.counts = slices.Insert(b.counts, 0, make([]int64, b.lowest-i)...)
		b.lowest = i
	}
	b.counts[i-b.lowest] += count
}

// reach makes top the greatest bucket index. It adds the buckets that are then below the span of
// maxBuckets to the new lowest one.
func (b *buckets) reach(top int) {
	floor := top - maxBuckets + 1
	if excess := floor - b.lowest; excess > 0 && len(b.counts) > 0 {
		cut := min(excess, len(b.counts))
		var folded int64
		for _, n := range b.counts[:cut] {
			folded += n
		}
		b.counts = append(b.counts[:0], b.counts[cut:]...)
		if len(b.counts) == 0 {
			b.counts = append(b.counts, 0)
		}
		b.counts[0] += folded
		b.lowest = floor
	}
	for len(b.counts) < top-b.lowest+1 {
		b.counts = append(b.counts, 0)
	}
}

func (b *buckets) merge(o *buckets) {
	for i := len(o.counts) - 1; i >= 0; i-- { // the greatest first, so that the span moves only once
		if n := o.counts[i]; n > 0 {
			b.add(o.lowest+i, n)
		}
	}
}

func (b *buckets) total() (n int64) {
	for _, c := range b.counts {
		n += c
	}
	return n
}
