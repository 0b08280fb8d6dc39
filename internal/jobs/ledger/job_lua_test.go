package ledger_test

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

// readJob is a script that parses a blob with the scripts' codec and composes it again.
const readJob = `
local blob = ARGV[1]
local j = parse(blob)
if not j then return {} end
local payload, key = payload_and_key(string.sub(blob, j.payload_at))
return { j.group, j.typ, tostring(j.attempt), j.retries, j.throttles, tostring(j.losses), tostring(j.wf), tostring(j.wr), tostring(j.wc),
  string.format('%.0f', j.since), j.reason, tostring(j.ordinal), string.format('%.0f', j.accepted), j.trace, payload, key, compose(j, blob) }`

// leadingZero matches a leading zero of a number, which is lost when a blob is composed again.
var leadingZero = regexp.MustCompile(`\|0[0-9]`)

// FuzzJobInScripts: scripts parse a blob that Go accepts as Go does, and compose the same blob. But
// they refuse ordinals of more than 9 digits and reasons that are no letter. Blobs with leading
// zeros or with numbers above 1e14 are not compared.
func FuzzJobInScripts(f *testing.F) {
	for _, seed := range []string{
		"g|T|1|0|0|0|0|0|0|1||0|1||1", "g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}", "",
		"g|T|12|1|2|3|40|50|60|1700000000000|P|7|1700000000000|trace|{\"a\":\"|\"}\x1fa|b\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||\x1fkey\x1f",
		"g|T|1|0|0|0|0|0|0|1||0|1||\x1f\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||a\x1fb\x1fc\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||a\x1f\x1f\x1f", "g|T|1|0|0|0|0|0|0|1||0|1|",
		"g|T|1|0|0|0|0|0|0|1|EE|0|1||", "g|T|-1|0|0|0|0|0|0|1||0|1||", "g|T|1|0|0|0|0|0|0|1||9999999999|1||", "g|T|1|0|0|0|0|0|0|1|?|0|1||",
	} {
		f.Add(seed)
	}
	url, _ := redistest.Shared(f)
	c, source := client(f, url), lua.Source("parts/base", "parts/blob")+readJob
	f.Fuzz(func(t *testing.T, blob string) {
		got, err := c.Eval(t.Context(), source, []string{"base", "base-"}, blob).StringSlice()
		require.NoError(t, err)
		j, err := ledger.ParseJob(blob)
		if err != nil {
			return // scripts accept numbers of any length
		}
		ordinal, _, _ := strings.Cut(j.Queued, "|")
		letter := j.Reason == 0 || 'a' <= j.Reason|0x20 && j.Reason|0x20 <= 'z'
		require.Equal(t, letter && len(ordinal) <= 9, len(got) > 0, "%q", blob)
		if len(got) == 0 {
			return
		}
		n := func(i int) int { n, err := strconv.Atoi(got[i]); require.NoError(t, err); return n }
		want := []any{j.Group, j.Type, j.Attempt, j.Retries, j.Throttles, j.Losses, j.Waits, int(j.SinceMS), int(j.Ordinal), j.Accepted, j.Trace, j.Payload, j.Key()}
		if max(j.Attempt, j.Losses, int(j.SinceMS), int(j.Accepted.UnixMilli())) > 1e14 || len(j.Waits) > 40 {
			return // Lua's numbers are not exact above 2^53
		}
		if leadingZero.MatchString("|" + blob) {
			return
		}
		require.Equal(t, want, []any{
			got[0], got[1], n(2), n(3), n(4), n(5), strings.Join(got[6:9], "|"), n(9), n(11), time.UnixMilli(int64(n(12))), got[13], got[14], got[15],
		})
		var reason ledger.Reason
		if got[10] != "" {
			reason = ledger.Reason(got[10][0])
		}
		require.Equal(t, j.Reason, reason)
		again, err := ledger.ParseJob(got[16])
		require.NoError(t, err)
		require.Equal(t, j.Payload, again.Payload)
		require.Equal(t, j.Key(), again.Key())
		require.Equal(t, blob, got[16])
	})
}
