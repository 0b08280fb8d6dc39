package messages_test

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
)

func TestDurationReads(t *testing.T) {
	tests := map[string]time.Duration{
		`"1m30s"`:             90 * time.Second,
		`"-5ms"`:              -5 * time.Millisecond,
		`"0"`:                 0,
		`"1\u006d"`:           time.Minute,
		`90`:                  90 * time.Second,
		`1.5`:                 1500 * time.Millisecond,
		`0.001`:               time.Millisecond,
		`1e-9`:                1,
		`-2`:                  -2 * time.Second,
		`-9223372036.854775`:  -9223372036854774784,
		`"2562047h47m16.85s"`: 9223372036850000000,
		`null`:                7, // unchanged
	}
	for in, want := range tests {
		d := messages.Duration(7)
		require.NoError(t, json.Unmarshal([]byte(in), &d), in)
		require.Equal(t, want, time.Duration(d), in)
	}
}

func TestDurationRefuses(t *testing.T) {
	const want = `must be a duration such as "1m30s" or a number of seconds, of at most 292 years`
	for _, in := range []string{`""`, `"90"`, `"soon"`, `"9999999h"`, `1e10`, `-1e10`, `1e999`, `true`, `[]`, `{}`} {
		d := messages.Duration(7)
		require.EqualError(t, json.Unmarshal([]byte(in), &d), want, in)
		require.Equal(t, messages.Duration(7), d, in)
	}
	for _, in := range []string{``, `NaN`, `Inf`, `"`} { // encoding/json does not pass these on
		require.EqualError(t, new(messages.Duration).UnmarshalJSON([]byte(in)), want, in)
	}
}

func TestDurationWrites(t *testing.T) {
	for d, want := range map[messages.Duration]string{
		0:                                   `"0s"`,
		messages.Duration(90 * time.Second): `"1m30s"`,
		messages.Duration(time.Microsecond): `"1µs"`,
		math.MinInt64:                       `"-2562047h47m16.854775808s"`,
	} {
		b, err := json.Marshal(d)
		require.NoError(t, err)
		require.Equal(t, want, string(b))
		var again messages.Duration
		require.NoError(t, json.Unmarshal(b, &again))
		require.Equal(t, d, again)
	}
}
