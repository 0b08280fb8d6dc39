package ledger

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

var notSnapshots = []string{
	``, `[]`, `{}`, `["id"]`, `["id","g"`, `["id","g",]`, `["id","g"]]`, `["id",1]`, `["id","g\"]`, `["id","\x"]`, `["id""g"]`, `["id","g" "x"]`,
}

// FuzzReadSnapshot: if readSnapshot accepts a JSON text, it reads the same fields from it as
// encoding/json. It accepts each list of names and values that json.Marshal has written. It may
// refuse other JSON, such as a list with white space.
func FuzzReadSnapshot(f *testing.F) {
	for _, text := range append(notSnapshots, `["id","g","name",""]`, `["aggregate","[{\"op\":\"sum\"}]","a\/b","\\","ü\u0001","\ud83d\ude00 \ud83d"]`) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := map[string]string{}
		err := readSnapshot(text, func(field, value string) { got[field] = value })
		if err != nil {
			require.ErrorIs(t, err, errSnapshot)
			if all := []string{}; json.Unmarshal([]byte(text), &all) == nil && len(all) > 0 && len(all)%2 == 0 {
				written, _ := json.Marshal(all)
				require.NotEqual(t, string(written), text, "a text that json.Marshal has written must be read")
			}
			return
		}
		var all []string
		// readSnapshot also accepts some texts that are not JSON.
		if !utf8.ValidString(text) || json.Unmarshal([]byte(text), &all) != nil {
			return
		}
		want := map[string]string{}
		for i := 0; i+1 < len(all); i += 2 {
			want[all[i]] = all[i+1]
		}
		require.Equal(t, want, got)
	})
}

func TestReadSnapshotRefusesOtherTexts(t *testing.T) {
	t.Parallel()
	for _, text := range notSnapshots {
		err := readSnapshot(text, func(string, string) {})
		require.ErrorIs(t, err, errSnapshot, text)
	}
}
