package noop

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func FuzzParse(f *testing.F) {
	for _, seed := range []string{`{}`, `{"sleep_ms":5,"fail":"retry","fail_times":2,"result":{"a":1}}`, `{"fail":"x"}`, `{"sleep_ms":-1}`, `{"sleep_ms":1e300}`, `{"fail_times":-1}`, `7`, ``, `{"sleep_ms":null}`,
		`{"pad":"xyz"}`, `{"pad":"","fail":"retry"}`, `{"pad":"\"}`, `{"pad":"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := parse(raw)
		if len(raw) > 0 && asksNothing(raw) {
			require.NoError(t, err)
			require.Equal(t, payload{}, p)
		}
		if err != nil {
			return
		}
		d := time.Duration(float64(p.SleepMS) * float64(time.Millisecond))
		require.True(t, d >= 0 && d <= maxSleep, "%s", d)
		require.False(t, p.FailTimes != nil && *p.FailTimes < 0)
	})
}
