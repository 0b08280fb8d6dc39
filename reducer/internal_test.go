package reducer

import (
	"bytes"
	"encoding/json"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

func TestAccumulatorWithoutAState(t *testing.T) {
	for op, b := range builtins {
		a, err := b.factory(Spec{As: "x", Op: op, Field: "data.a"})
		require.NoError(t, err)
		other, err := b.factory(Spec{As: "x", Op: op, Field: "data.a"})
		require.NoError(t, err)
		require.NoError(t, a.Add(Result{Data: json.RawMessage(`{"a":3}`)}))
		require.NoError(t, a.Add(Result{Data: json.RawMessage(`{"b":3}`)}))
		require.Equal(t, int64(1), a.(Skipper).Skipped())
		encoded, err := json.Marshal(a)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(encoded, other))
		want, err := a.Value()
		require.NoError(t, err)
		got, err := other.Value()
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
		require.Equal(t, int64(1), other.(Skipper).Skipped())

		foreign, err := b.factory(Spec{As: "x", Op: op, Field: "data.b"})
		require.NoError(t, err)
		require.ErrorContains(t, a.Merge(foreign), "different spec")
	}
	count, err := builtins["count"].factory(Spec{As: "x", Op: "count"})
	require.NoError(t, err)
	require.NoError(t, count.Add(Result{}))
	value, err := count.Value()
	require.NoError(t, err)
	require.Equal(t, "1", string(value))
}

var decimal = rapid.StringMatching(`-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?`)

func TestNumberAgreesWithRationals(t *testing.T) {
	rapidtest.Check(t, 0, func(t *rapid.T) {
		texts := [2]string{decimal.Draw(t, "a"), decimal.Draw(t, "b")}
		var numbers [2]number
		var rats [2]*big.Rat
		for i, text := range texts {
			var ok bool
			rats[i], ok = new(big.Rat).SetString(text)
			require.True(t, ok)
			require.NoError(t, numbers[i].UnmarshalJSON([]byte(text)))
			require.Zero(t, rats[i].Cmp(numbers[i].rat()))
			f, err := strconv.ParseFloat(text, 64)
			if err == nil {
				require.Equal(t, f+0, numbers[i].float()+0)
			}
			written := numbers[i].append(nil)
			require.True(t, json.Valid(written))
			back, ok := new(big.Rat).SetString(string(written))
			require.True(t, ok)
			require.Zero(t, rats[i].Cmp(back))
		}
		require.Equal(t, rats[0].Cmp(rats[1]), sign(numbers[0].cmp(numbers[1])))
		require.Equal(t, rats[0].Cmp(rats[1]) == 0, bytes.Equal(numbers[0].append(nil), numbers[1].append(nil)))
	})
}

func sign(n int) int { return max(-1, min(1, n)) }

func TestNumberAppend(t *testing.T) {
	for text, want := range map[string]string{
		`0`: `0`, `-0.00e5`: `0`, `120`: `120`, `1.50`: `1.5`, `-0.000012`: `-0.000012`, `0.0000001`: `1e-7`,
		`1e21`: `1000000000000000000000`, `1e22`: `1e22`, `1.5e30`: `1.5e30`, `123e-2`: `1.23`,
		`-12345678901234567890.10`: `-12345678901234567890.1`,
	} {
		var n number
		require.NoError(t, n.UnmarshalJSON([]byte(text)))
		require.Equal(t, want, string(n.append(nil)))
	}
}

// TestQuantilesAreWithinOnePercent compares eight estimated percentiles and the standard deviation
// of 20,000 values with the exact ones, for eight distributions.
func TestQuantilesAreWithinOnePercent(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	shapes := map[string]func() float64{
		"uniform":      random.Float64,
		"exponential":  func() float64 { return 1000 * random.ExpFloat64() },
		"around zero":  random.NormFloat64,
		"long tail":    func() float64 { return math.Exp(4 * random.NormFloat64()) },
		"negative":     func() float64 { return -random.ExpFloat64() },
		"few values":   func() float64 { return float64(random.IntN(3) - 1) },
		"tiny":         func() float64 { return 1e-300 * random.Float64() },
		"close to top": func() float64 { return 1e299 * (1 + random.Float64()) },
	}
	ps := []int64{0, 1, 25, 50, 90, 95, 99, 100}
	for name, draw := range shapes {
		t.Run(name, func(t *testing.T) {
			var f distributionFold
			all := make([]float64, 20_000)
			var sum float64
			for i := range all {
				all[i] = draw()
				sum += all[i] / float64(len(all))
				require.True(t, f.add(0, &value{raw: strconv.AppendFloat(nil, all[i], 'g', -1, 64)}))
			}
			slices.Sort(all)
			for i, got := range f.percentiles(ps...) {
				want := all[max(0, int(ps[i])*len(all)/100-1)]
				require.InDelta(t, want, got, math.Abs(want)*(accuracy+1e-9), "p%d", ps[i])
			}
			var squares float64
			scale := max(math.Abs(all[0]), math.Abs(all[len(all)-1])) // so that the squares don't overflow
			for _, x := range all {
				d := (x - sum) / scale
				squares += d * d
			}
			want := scale * math.Sqrt(squares/float64(len(all)))
			require.InEpsilon(t, want, f.deviation(), 1e-9)
			requireHistogram(t, &f, all)
		})
	}
}

// requireHistogram compares the histogram with the sorted values: the ranges go from the least to the
// greatest without a gap, and hold as many values as they say.
func requireHistogram(t *testing.T, f *distributionFold, all []float64) {
	t.Helper()
	bars := f.histogram()
	require.LessOrEqual(t, len(bars), histogramBars)
	parsed := func(text json.RawMessage) float64 {
		x, err := strconv.ParseFloat(string(text), 64)
		require.NoError(t, err)
		return x
	}
	at, seen := all[0], 0.0
	for _, b := range bars {
		require.InDelta(t, at, parsed(b[0]), 0)
		at, seen = parsed(b[1]), seen+parsed(b[2])
		below, _ := slices.BinarySearchFunc(all, at, func(x, at float64) int {
			if x <= at+math.Abs(at)*1e-4 {
				return -1
			}
			return 1
		})
		require.InDelta(t, below, seen, 20) // bounds are rounded
	}
	require.InDelta(t, all[len(all)-1], at, 0)
	require.InDelta(t, len(all), seen, 0)
}

func TestSketchIsBounded(t *testing.T) {
	var f distributionFold
	for e := -290; e < 290; e++ {
		require.True(t, f.add(0, &value{raw: []byte("3e" + strconv.Itoa(e))}))
		require.True(t, f.add(0, &value{raw: []byte("-3e" + strconv.Itoa(-e))}))
	}
	require.Len(t, f.Positive.counts, maxBuckets)
	require.Len(t, f.Negative.counts, maxBuckets)
	require.NoError(t, f.check())
	require.InEpsilon(t, 3e289, f.percentiles(100)[0], accuracy)
	encoded, err := json.Marshal(&f)
	require.NoError(t, err)
	require.Less(t, len(encoded), 8<<10)
}

// plainLookup finds a field with encoding/json. Tests compare it with the package's scanner, which
// must find the same on valid JSON.
func plainLookup(data any, path []string) (any, bool) {
	for _, name := range path {
		switch v := data.(type) {
		case map[string]any:
			next, ok := v[name]
			if !ok {
				return nil, false
			}
			data = next
		case []any:
			i := arrayIndex(name)
			if i < 0 || i >= len(v) {
				return nil, false
			}
			data = v[i]
		default:
			return nil, false
		}
	}
	return data, true
}

func TestFindAgreesWithEncodingJSON(t *testing.T) {
	names := rapid.SampledFrom([]string{"a", "b", "0", "1", `"`, `\`, "é", "<", "01"})
	var document func(depth int) *rapid.Generator[any]
	document = func(depth int) *rapid.Generator[any] {
		leaf := rapid.OneOf(rapid.Just[any](true), rapid.Just[any](1.5), rapid.Just[any](nil), rapid.String().AsAny())
		if depth == 0 {
			return leaf
		}
		inner := document(depth - 1)
		return rapid.OneOf(leaf, rapid.MapOfN(names, inner, 0, 4).AsAny(), rapid.SliceOfN(inner, 0, 3).AsAny())
	}
	documents := document(4)
	paths := rapid.SliceOfN(rapid.SliceOfN(names, 0, 4), 1, 5)
	rapidtest.Check(t, 0, func(t *rapid.T) {
		text, err := json.MarshalIndent(documents.Draw(t, "document"), " ", "\t")
		require.NoError(t, err)
		var plain any
		require.NoError(t, json.Unmarshal(text, &plain))
		x := newExtractor()
		want := paths.Draw(t, "paths")
		slots := make([]int, len(want))
		for i, path := range want {
			slots[i] = x.slot(append([]string{"data"}, path...))
		}
		found := make([]value, x.slots)
		x.find(Result{Data: text}, found, nil)
		for i, path := range want {
			expected, ok := plainLookup(plain, path)
			got := found[slots[i]].raw
			require.Equal(t, ok, got != nil, "%q in %s", path, text)
			if ok {
				var v any
				require.NoError(t, json.Unmarshal(got, &v))
				require.Equal(t, expected, v)
			}
		}
	})
}

func TestParsePath(t *testing.T) {
	path, err := parsePath(`data.a\.b\\c.0`)
	require.NoError(t, err)
	require.Equal(t, []string{"data", `a.b\c`, "0"}, path)
	require.Equal(t, -1, arrayIndex("01"))
	require.Equal(t, -1, arrayIndex("-1"))
	require.Equal(t, -1, arrayIndex("99999999999"))
	require.Equal(t, 10, arrayIndex("10"))
}

func FuzzFind(f *testing.F) {
	f.Add(`data.a.0.b`, []byte(`{"a":[{"b":1}]}`))
	f.Add(`data.a\.b`, []byte(`{"a.b":"\u00e9`))
	f.Add(`data`, []byte(`{"a":`))
	f.Add(`data.1`, []byte(`[[[[,]{"":`))
	f.Add(`data.a`, []byte(strings.Repeat(`{"a":`, 100)))
	f.Fuzz(func(t *testing.T, field string, data []byte) {
		path, err := parsePath(field)
		if err != nil {
			return
		}
		x := newExtractor()
		slot := x.slot(path)
		x.slot([]string{"data", "a", "0"})
		x.slot([]string{"data", "a"})
		values := make([]value, x.slots)
		original := bytes.Clone(data)
		x.find(Result{Data: data}, values, nil)
		require.Equal(t, original, data)
		if raw := values[slot].raw; raw != nil && json.Valid(data) {
			require.True(t, json.Valid(raw), "%q", raw)
		}
		for op, b := range builtins {
			acc, err := b.factory(Spec{As: "x", Op: op, Field: field})
			require.NoError(t, err)
			require.NoError(t, acc.Add(Result{Data: data}))
			v, err := acc.Value()
			require.NoError(t, err)
			require.True(t, json.Valid(v), "%s: %s", op, v)
		}
	})
}

// FuzzDecode gives garbage to the decoder of each op and of State. The decoder must refuse it or
// return a usable state.
func FuzzDecode(f *testing.F) {
	ops := NewRegistry().Ops()
	plans := make([]*Plan, len(ops))
	for i, op := range ops {
		var err error
		plans[i], err = NewRegistry().Compile([]Spec{{As: "x", Op: op, Field: "data.a"}})
		require.NoError(f, err)
		s := plans[i].New()
		for j, data := range []string{`{"a":1.5}`, `{"a":"x"}`, `{"a":-1e299}`, `{"a":0}`, `{"a":[1]}`} {
			require.NoError(f, s.Add(Result{Ordinal: int64(j), Data: json.RawMessage(data)}))
			part, err := s.accs[0].MarshalJSON()
			require.NoError(f, err)
			f.Add(uint8(i), true, part)
		}
		encoded, err := s.Encode()
		require.NoError(f, err)
		f.Add(uint8(i), false, encoded)
	}
	f.Fuzz(func(t *testing.T, op uint8, isPart bool, encoded []byte) {
		plan := plans[int(op)%len(plans)]
		if isPart {
			encoded = slices.Concat([]byte(`{"count":1,"aggregates":{"x":`), encoded, []byte(`}}`))
		}
		s, err := plan.Decode(encoded)
		if err != nil {
			return
		}
		again, err := plan.Decode(encoded)
		require.NoError(t, err)
		require.NoError(t, s.Add(Result{Ordinal: 3, Data: json.RawMessage(`{"a":1}`)}))
		require.NoError(t, s.Merge(again))
		values, err := s.Values()
		require.NoError(t, err)
		require.True(t, json.Valid(values["x"]), "%s", values["x"])
		stored, err := s.Encode()
		require.NoError(t, err)
		_, err = plan.Decode(stored)
		require.NoError(t, err, "%s", stored)
	})
}
