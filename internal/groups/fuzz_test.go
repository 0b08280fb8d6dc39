package groups

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// A cursor that is accepted leads to one place, and names it.
func FuzzParseCursor(f *testing.F) {
	for _, seed := range []string{"", "1700000000000.group-1", "1.a.b", "-1.a", "9223372036854775807.a", "x", ".", "1.", "+5.a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, cursor string) {
		at, err := parseCursor(cursor)
		if err != nil || cursor == "" || math.Abs(at.created) > 1<<53 { // beyond, it is no ms that a score held exactly
			return
		}
		again, err := parseCursor(at.String())
		require.NoError(t, err, "%q", at.String())
		require.Equal(t, at, again)
		require.False(t, at.after(again))
	})
}

// What scripts take for a parked job is read as the same one here.
func FuzzReadParked(f *testing.F) {
	for _, seed := range []string{"g|T|1|0|0|0|0|0|0|1|E|7|1|trace|{}", "g|T|1|0|0|0|0|0|0|1||0|1||a|b", "", "|||||||||||||", "g|T|1|0|0|0|0|0|0|1||-1|1||", "\x00|\xff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, blob string) {
		j, ok := readParked(blob)
		d, err := ledger.ParseJob(blob)
		if err != nil {
			return
		}
		require.True(t, ok, "%q", blob)
		require.Equal(t, []any{d.Group, d.Type, d.Ordinal}, []any{j.group, j.typ, j.ordinal})
	})
}

func FuzzParseError(f *testing.F) {
	f.Add(`{"ordinal":1,"code":"X","error":"no","attempts":2,"at":3,"until":4,"reason":"E"}`)
	f.Add(`{"ordinal":"1"}`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, text string) {
		e, err := parseError(text)
		if err != nil {
			require.ErrorContains(t, err, "read error record")
			return
		}
		b, err := json.Marshal(e)
		require.NoError(t, err)
		again, err := parseError(string(b))
		require.NoError(t, err)
		require.Equal(t, e, again)
	})
}

// A dead letter that others wrote is shown as far as it can be, and never breaks the list.
func FuzzDeadLetter(f *testing.F) {
	f.Add("1-1", "g.1", "1", "2", "1700000000000", `{"a":1}`)
	f.Add("1-1", "", "-1", "x", "99999999999999999999", "{")
	f.Add("9223372036854775807-1", "", "", "", "", "")
	f.Add("", "\x00", "1e3", "9223372036854775807", "-9223372036854775808", "\xff")
	f.Fuzz(func(t *testing.T, id, job, ordinal, attempts, at, payload string) {
		if strings.HasPrefix(id, "-") {
			return // Redis gives no such id
		}
		d := deadLetter(redis.XMessage{ID: id, Values: map[string]any{"job": job, "ordinal": ordinal, "attempts": attempts, "at": at, "payload": payload, "error": 7}})
		b, err := json.Marshal(d)
		require.NoError(t, err, "%+v", d)
		require.True(t, json.Valid(b))
	})
}
