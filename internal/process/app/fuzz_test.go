package app

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzLoad: any value of any variable is either accepted, or refused with an error that names the
// variable and shows no long password; it never causes a panic.
func FuzzLoad(f *testing.F) {
	all := Variables()
	for i, v := range all {
		f.Add(uint8(i), v.Default)
	}
	for _, value := range []string{"", "-1", "1e400", "NaN", "5m", "9223372036854775808", "a,b", "6,3,1", "redis://:secret@h", "::1", "\x00", "0x10", " 1 "} {
		f.Add(uint8(len(value)), value)
	}
	f.Fuzz(func(t *testing.T, which uint8, value string) {
		v := all[int(which)%len(all)]
		_, unknown, err := Load([]string{v.Name + "=" + value})
		require.Empty(t, unknown)
		if err != nil {
			require.Contains(t, err.Error(), v.Name)
			if strings.Contains(strings.ToUpper(v.Name), "PASSWORD") && len(value) > 20 {
				require.NotContains(t, err.Error(), value)
			}
		}
	})
}
