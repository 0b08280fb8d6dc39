package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const second = 1_000_000

// waited returns the visit of a user with this number, who entered and got a token (admitted) at
// times in seconds; 0: never. The stream is open until the token, or until second 100.
func waited(number int64, entered, admitted float64) visit {
	v := visit{
		user: fmt.Sprintf("u%d", number), number: number, sent: int64(entered*second) - 1000, entered: int64(entered * second),
		streams: []span{{from: int64(entered * second), to: 100 * second}},
	}
	if admitted > 0 {
		v.admitted = int64(admitted * second)
		v.fence, v.expires = v.admitted-10_000, v.admitted+60*second
		v.streams[0].to = v.admitted
	}
	return v
}

func TestOverCapacity(t *testing.T) {
	t.Parallel()
	a, b, c := waited(1, 1, 10), waited(2, 1, 20), waited(3, 1, 30)
	require.Zero(t, overCapacity([]visit{a, b, c}, 3))
	require.Equal(t, 1, overCapacity([]visit{a, b, c}, 2), "the third token is one too many")
	a.freed = 30 * second
	require.Zero(t, overCapacity([]visit{a, b, c}, 2), "the first user gave the slot back")
	a.freed, a.expires = 0, 25*second
	require.Zero(t, overCapacity([]visit{a, b, c}, 2), "the first token has expired, with leeway")
	a.expires++
	require.Equal(t, 1, overCapacity([]visit{a, b, c}, 2), "a verifier accepts the first token in the leeway")
	require.Zero(t, overCapacity([]visit{waited(1, 1, 0)}, 0), "a user without a token")
}

func TestInversionsWithoutNumbers(t *testing.T) {
	t.Parallel()
	a, b := waited(1, 1, 10), waited(2, 2, 9)
	a.number = 0
	require.Equal(t, 1, inversionsOf([]visit{a, b}), "the first user had entered before the second one asked")
	b.sent = a.entered - 1
	require.Zero(t, inversionsOf([]visit{a, b}), "both asked at the same time: the order is unknown")
}

func TestLostUsers(t *testing.T) {
	t.Parallel()
	admitted, waits, ended := waited(1, 1, 2), waited(2, 1, 0), waited(3, 1, 0)
	waits.open, ended.ended = true, "gone"
	all := []visit{admitted, waits, ended, {user: "u5", sent: 1}}
	require.Equal(t, []string{"u3", "u5"}, lostUsers(all, false))
	require.Equal(t, []string{"u2", "u3", "u5"}, lostUsers(all, true))
}

func TestWrongPositions(t *testing.T) {
	t.Parallel()
	a, b, away := waited(5, 1, 0), waited(9, 1, 0), waited(7, 1, 0)
	a.open, a.position, b.open, b.position = true, 1, true, 3
	numbers := map[string]int64{"u5": 5, "u7": 7, "u9": 9}
	require.Empty(t, wrongPositions([]visit{a, b, away}, numbers), "users who are away count")
	b.position = 2
	require.Equal(t, []string{"u9"}, wrongPositions([]visit{a, b, away}, numbers))
}

func TestCheckReturns(t *testing.T) {
	t.Parallel()
	broken := func(number int64) visit {
		v := waited(number, 1, 0)
		v.streams = []span{{from: second, to: 10 * second}, {from: 12 * second, to: 12 * second}, {from: 12 * second, to: 100 * second, shown: 13 * second, before: 7, first: 6}}
		return v
	}
	own, gone, rose, promoted, early := broken(2), broken(3), broken(4), broken(5), broken(6)
	own.streams[0].own = true
	gone.streams = gone.streams[:2]
	rose.streams[2].first = 8
	promoted.admitted = 14 * second
	early.admitted = 5 * second
	before := map[string]int64{"u1": 1, "u2": 2, "u3": 3, "u4": 4, "u5": 5, "u7": 7}
	after := map[string]int64{"u1": 1, "u2": 2, "u4": 4, "u7": 70}
	all := []visit{broken(1), own, gone, rose, promoted, early, broken(7), waited(8, 1, 0)}
	require.Equal(t, returns{
		users: 5, seconds: []float64{3, 3, 3, 3}, notKept: []string{"u4", "u7"}, notBack: []string{"u3"},
	}, checkReturns(all, 9*second, 11*second, before, after))
	require.Equal(t, returns{}, checkReturns(all, 50*second, 60*second, before, after))
}

// wellFormed requires that an SVG picture is well-formed XML, and returns the number of its
// elements of each kind.
func wellFormed(t *testing.T, svg string) map[string]int {
	t.Helper()
	count, d := map[string]int{}, xml.NewDecoder(strings.NewReader(svg))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return count
		}
		require.NoError(t, err)
		if e, ok := token.(xml.StartElement); ok {
			count[e.Name.Local]++
		}
	}
}

func TestChartsAreWellFormedAndDrawEveryValue(t *testing.T) {
	c := chart{title: `a < "b" & c`, names: []string{"s", "t"}, lines: [][]float64{{1, 2, 3}, {0, 0, 0}}, limit: 4}
	require.Equal(t, 2, wellFormed(t, c.svg())["path"])
	require.Contains(t, c.svg(), "a &lt; &#34;b&#34; &amp; c")
	wellFormed(t, chart{names: []string{"s"}, lines: [][]float64{{0}}}.svg())
	require.Empty(t, chartsOf(nil), "a part that did not run has no picture")
}

func TestRoundStep(t *testing.T) {
	for x, want := range map[float64]float64{0.7: 1, 1: 1, 1.3: 2, 3: 5, 6: 10, 0.03: 0.05, 0: 1} {
		require.InDelta(t, want, roundStep(x), 1e-12, "%v", x)
	}
	require.Equal(t, "0.25", formatNumber(0.25))
	require.Equal(t, "100", formatNumber(100))
}

func TestTablesMarkGoalsThatWereNotReached(t *testing.T) {
	var congestion, limits any
	require.NoError(t, json.Unmarshal([]byte(`{"makespan_ratio":1.02,"throttles_per_job":0.2}`), &congestion))
	require.NoError(t, json.Unmarshal([]byte(`{"runs":[{"limiter":"sliding","limit_used_ratio":0.96},{"limiter":"sliding","limit_used_ratio":0.94,"windows_over_limit":1},
		{"limiter":"fixed","limit_used_ratio":1,"windows_over_limit":0}],"elastic":[{"partitions":4,"return_windows":2}]}`), &limits))
	row := func(figure, goal, rest string) string {
		return "| `" + figure + "` | what | " + goal + " | " + rest + " |\n"
	}
	got := fillTables("a\n"+
		row("congestion.makespan_ratio", "≤ 1.03 × ideal", "? | ?")+
		row("congestion.throttles_per_job", "≤ 0.1", "0 | yes")+
		row("congestion.missing", "≤ 0.1", "old | kept")+
		row("fairness.small_ratio", "≤ 2", "old | kept")+
		row("limits.runs.windows_over_limit", "= 0", "? | ?")+
		row("limits.runs.limiter=sliding.limit_used_ratio", "≥ 0.95", "? | ?")+
		row("limits.runs.limiter=fixed.limit_used_ratio", "≥ 0.95", "? | ?")+
		row("limits.elastic.partitions=4.return_windows", "< 1,000 windows", "? | ?")+
		"| `x` | other table |\nz\n", map[string]any{"congestion": congestion, "limits": limits})
	require.Equal(t, "a\n"+
		row("congestion.makespan_ratio", "≤ 1.03 × ideal", "1.02 | yes")+
		row("congestion.throttles_per_job", "≤ 0.1", "0.2 | **no**")+
		row("congestion.missing", "≤ 0.1", "old | kept")+
		row("fairness.small_ratio", "≤ 2", "old | kept")+
		row("limits.runs.windows_over_limit", "= 0", "1 | **no**")+
		row("limits.runs.limiter=sliding.limit_used_ratio", "≥ 0.95", "0.94 | **no**")+
		row("limits.runs.limiter=fixed.limit_used_ratio", "≥ 0.95", "1 | yes")+
		row("limits.elastic.partitions=4.return_windows", "< 1,000 windows", "2 | yes")+
		"| `x` | other table |\nz\n", got)
}
