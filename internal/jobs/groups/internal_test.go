package groups

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func TestSplitCalls(t *testing.T) {
	t.Parallel()
	of := func(group string, jobs int) *pendingAppend {
		return &pendingAppend{group: group, jobs: make([]messages.Job, jobs)}
	}
	big := func(group string) *pendingAppend {
		a := of(group, 1)
		a.jobs[0].Payload = make([]byte, ledger.MaxAppendBytes*2/3)
		return a
	}
	a1, b1, a2, b2, a3, b3, b4 := of("a", 1), of("b", ledger.MaxAppend), of("a", ledger.MaxAppend-1), of("b", 1), of("a", 1), big("b"), big("b")
	got := splitCalls([]*pendingAppend{a1, b1, a2, b2, a3, b3, b4})
	require.Equal(t, [][]*pendingAppend{{a1, a2}, {b1}, {b2, b3}, {a3}, {b4}}, got)
}

// TestJobViewHasTheTrace: the view of a failed job has the trace id of its error. It has none if
// there is no error, or if the error's trace is empty or malformed.
func TestJobViewHasTheTrace(t *testing.T) {
	for trace, want := range map[string]string{
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01": "0af7651916cd43dd8448eb211c80319c", "": "", "odd": "",
	} {
		j := jobView("g", 7, ledger.JobStatus{State: "F!", Errors: []ledger.JobError{{Code: "E", Trace: trace}}})
		require.Equal(t, want, j.TraceID)
	}
	require.Empty(t, jobView("g", 7, ledger.JobStatus{State: "F!"}).TraceID)
}

// TestAddStatsAddsEachNumber: addStats adds each int64 field of TypeStats: the numbers of a type
// are summed over the partitions.
func TestAddStatsAddsEachNumber(t *testing.T) {
	var one, sum api.TypeStats
	for _, f := range reflect.ValueOf(&one).Elem().Fields() {
		if f.Kind() == reflect.Int64 {
			f.SetInt(3)
		}
	}
	addStats(&sum, one)
	addStats(&sum, one)
	for field, f := range reflect.ValueOf(sum).Fields() {
		if f.Kind() == reflect.Int64 {
			require.EqualValues(t, 6, f.Int(), field.Name)
		}
	}
}

// FuzzParseCursor: a valid cursor, parsed and formatted again, names the same group.
func FuzzParseCursor(f *testing.F) {
	for _, seed := range []string{"", "1700000000000.group-1", "1.a.b", "-1.a", "9223372036854775807.a", "x", ".", "1.", "+5.a", "f1700000000000.g"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, cursor string) {
		list := ledger.AllGroups
		if strings.HasPrefix(cursor, "f") {
			list = ledger.FailedGroups
		}
		at, err := parseCursor(list, cursor)
		if err != nil || cursor == "" || math.Abs(at.At) > 1<<53 { // beyond, it is no ms that a score held exactly
			return
		}
		text := formatCursor(ledger.GroupRange{List: list, Before: at})
		again, err := parseCursor(list, text)
		require.NoError(t, err, "%q", text)
		require.Equal(t, at, again)
		require.False(t, at.OlderThan(again))
	})
}

func TestFingerprint(t *testing.T) {
	for text, want := range map[string]string{
		"550 5.1.1 no such user anna@mail.example.com":             "<n> <n>.<n>.<n> no such user <address>",
		"dial tcp 10.0.0.17:5432: connection refused":              "dial tcp <host>:<n>: connection refused",
		"dial tcp [2001:db8::1]:443: i/o timeout":                  "dial tcp <host>:<n>: i/o timeout",
		"lookup smtp-3.example.org: no such host":                  "lookup <host>: no such host",
		"request 9f8b1a2c-0d3e-4f5a-8b7c-1234567890ab was refused": "request <uuid> was refused",
		"unexpected EOF. Try again":                                "unexpected EOF. Try again",
		"Zeichen ü nach 12 Zeichen":                                "Zeichen ü nach <n> Zeichen",
		"":                                                         "",
	} {
		require.Equal(t, want, fingerprint(text))
		require.Equal(t, want, fingerprint(fingerprint(text)), "it stays")
	}
}

func TestSummaryIsBounded(t *testing.T) {
	c, counts := newFailureCounts(), map[string]int64{}
	for i := range 150 {
		code := fmt.Sprint("C", i)
		counts[code] = 30
		for j := range 30 {
			c.add(&ledger.JobError{Ordinal: int64(j), Code: code, Error: strings.Repeat("ü", 300) + strings.Repeat("x", j)})
			c.add(&ledger.JobError{Ordinal: int64(j), Code: code, Error: "y" + strings.Repeat("z", j)})
		}
	}
	sum := c.summary(counts)
	require.EqualValues(t, 150*30, sum.Total)
	require.Len(t, sum.Codes, 100)
	for _, code := range sum.Codes {
		require.Len(t, code.Fingerprints, 20)
		require.Equal(t, strings.Repeat("ü", 250)+"…", code.Fingerprints[0].Text, "the most frequent: long errors begin alike")
	}
}

// TestWithoutData: withoutData hides the data of a result line, and all of a damaged line.
func TestWithoutData(t *testing.T) {
	for line, want := range map[string]string{
		`{"ordinal":1,"data":{"secret":2}}`: `{"data":null,"ordinal":1}`,
		`{"ordinal":1}`:                     `{"data":null,"ordinal":1}`,
		`null`:                              `{"data":null}`,
		`["secret"]`:                        `{"data":null}`,
		`{"data":"secret`:                   `{"data":null}`,
		``:                                  `{"data":null}`,
	} {
		require.Equal(t, want, string(withoutData([]byte(line))), line)
	}
}

func TestTimesAreShown(t *testing.T) {
	early, late := time.Unix(1, 1_500_000), time.Unix(2, 0)
	require.Equal(t, late, latestOf(early, late, time.Time{}))
	require.Equal(t, late, latestOf(late, early))
	require.Nil(t, timeIfAfter(early, early))
	require.Equal(t, time.Unix(1, 1_000_000).UTC(), *timeIfAfter(early, time.Time{}))
	require.InDelta(t, 2.3, round(2.26, 10), 1e-12)
}
