package ledger

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// FuzzParseJobError: parseJobError refuses a text, or returns a value whose JSON it reads as the
// same value.
func FuzzParseJobError(f *testing.F) {
	f.Add(`{"ordinal":1,"code":"X","error":"no","attempts":2,"at":3,"until":4,"reason":"E"}`)
	f.Add(`{"ordinal":"1"}`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, text string) {
		e, err := parseJobError(text)
		if err != nil {
			require.ErrorContains(t, err, "read error record")
			return
		}
		b, err := json.Marshal(e)
		require.NoError(t, err)
		again, err := parseJobError(string(b))
		require.NoError(t, err)
		require.Equal(t, e, again)
	})
}

// FuzzDeadLetter: a dead letter that another program wrote can always be written as JSON.
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
