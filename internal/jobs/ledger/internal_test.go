package ledger

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
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

// results lists the reply codes that are no errors, for each script. A new code must be added here
// or to the table refusals.
var results = map[string][]string{
	"admit":           {"FULL", "LIMITED", "PAUSED", "UNSET", "EMPTY"},
	"advance":         {"UNSETTLED"},
	"append":          {"OK", "DUP"},
	"base":            {"ERR"},
	"cancel":          {"OK"},
	"cancel_job":      {"OK"},
	"count":           {"OK", "STALE"},
	"direct":          {"OK"},
	"enlist":          {"OK"},
	"expire":          {"OK", "OPEN"},
	"erase_job":       {"OK"},
	"erase_result":    {"OK", "MOVED"},
	"release_id":      {"OK", "OTHER"},
	"pause":           {"OK"},
	"plan":            {"OK", "STALE"},
	"quota":           {"FENCED"},
	"reduce":          {"OK", "BAD", "GONE", "VERSION"},
	"reopen":          {"OK"},
	"reduce_failures": {"OK"},
	"repair":          {"OK", "GONE", "VERSION"},
	"requeue":         {"DONE", "MORE"},
	"seal":            {"OK", "PENDING"},
	"set_endpoint":    {"OK", "CHANGED"},
	"setting":         {"OK"},
	"settle_callback": {"OK", "STALE"},
	"sweep":           {"DONE", "MORE"},
	"why":             {"OK"},
}

// TestEachReplyCodeIsARefusalOrAResult: each reply code that a script returns as a literal is
// either an error of the table refusals or a result, and no other code is listed. The scripts in
// the folders activity, auth, guard and room are left out.
func TestEachReplyCodeIsARefusalOrAResult(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../lua/*/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	found := map[[2]string]bool{}
	for _, file := range files {
		if of := filepath.Base(filepath.Dir(file)); slices.Contains([]string{"activity", "auth", "guard", "room"}, of) {
			continue // of the packages activity, apikey, guard and waitingroom
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		name := strings.TrimSuffix(filepath.Base(file), ".lua")
		for _, match := range regexp.MustCompile(`return \{ '([A-Z]+)'`).FindAllStringSubmatch(string(text), -1) {
			code := match[1]
			found[[2]string{name, code}] = true
			_, ofScript := refusals[[2]string{name, code}]
			_, ofAll := refusals[[2]string{"", code}]
			isResult := slices.Contains(results[name], code)
			require.True(t, ofScript || ofAll || isResult, "%s answers %s, which is neither a refusal nor a result", name, code)
			require.False(t, ofScript && isResult, "%s of %s is both a refusal and a result", code, name)
		}
	}
	for name, codes := range results {
		for _, code := range codes {
			require.True(t, found[[2]string{name, code}], "%s does not answer %s", name, code)
		}
	}
	for key := range refusals {
		require.True(t, key[0] == "" || found[key], "%s does not answer %s", key[0], key[1])
	}
}

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

// TestPaceDecays: the speed of a tenant whose jobs have stopped ending falls, and soon is 0, whatever
// the marks are.
func TestPaceDecays(t *testing.T) {
	t.Parallel()
	at := func(ms int64) time.Time { return time.UnixMilli(1_000_000 + ms) }
	for marks, first := range map[string]float64{
		"1000000 0":           2500, // 5,000 jobs in 2 s
		"900000 0 1000000 10": 2495,
		"996000 0 1000000 10": 5000.0 / 6,
	} {
		require.InDelta(t, first, pace(marks, 5000, at(2000)), 1e-6, marks)
		before := first
		for _, ms := range []int64{3000, 6000, 11_000} {
			now := pace(marks, 5000, at(ms))
			require.Less(t, now, before, marks)
			before = now
		}
		for _, ms := range []int64{12_001, 45_000, 384_000} {
			require.Zero(t, pace(marks, 5000, at(ms)), marks)
		}
	}
}
