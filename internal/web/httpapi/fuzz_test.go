package httpapi

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzParsePosition checks that parsePosition returns no negative number for any text, and that it
// reads a position again that String has written.
func FuzzParsePosition(f *testing.F) {
	for _, seed := range []string{"", "1.2", "1.2.3", "1.2.0", "-1.2", "99999999999.1", "1.2.3.4", "a.b", "+1.2", "01.2"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, id string) {
		p := parsePosition(id)
		require.False(t, p.round < 0 || p.rank < 0, "%+v", p)
		require.Equal(t, p, parsePosition(p.String()))
	})
}

// FuzzDecodeSettings checks that a decoded rps and weight are within their limits, and that decoded
// settings do not change when they are encoded and decoded again.
func FuzzDecodeSettings(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"rps":50,"weight":2,"base_priority":-3}`, `{"rps":null}`, `{"rps":1e-300}`, `{"rps":1e999}`, `{"weight":"2"}`, `{"rsp":1}`, `[]`, ``, `{"rps":NaN}`, `{"base_priority":1.5}`, `{"rps":1,"rps":-1}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		set, err := decodeSettings(body)
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		require.False(t, set.RPS.Value != nil && (*set.RPS.Value <= 0 || *set.RPS.Value > maxTenantRPS), "%s", body)
		require.False(t, set.Weight.Value != nil && (*set.Weight.Value < minTenantWeight || *set.Weight.Value > maxTenantWeight), "%s", body)
		b, err := json.Marshal(set)
		require.NoError(t, err)
		again, err := decodeSettings(b)
		require.NoError(t, err, "%s", b)
		require.Equal(t, set, again)
	})
}
