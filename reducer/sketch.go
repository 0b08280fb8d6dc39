package reducer

import (
	"errors"
	"math"
	"slices"
)

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
