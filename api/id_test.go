package api_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// TestValidID compares ValidID with a regular expression, without . and ..: each byte alone and at
// the start, in the middle and at the end of an id, the lengths 0 to 130, and seven other ids.
func TestValidID(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
	var ids []string
	for c := range 256 {
		b := string([]byte{byte(c)})
		ids = append(ids, b, b+"a", "a"+b+"a", "a"+b)
	}
	for n := range api.MaxIDLength + 3 {
		ids = append(ids, strings.Repeat("a", n))
	}
	for _, id := range append(ids, ".", "..", "...", ".a", "SEND_EMAIL", "ä", "{0}") {
		require.Equal(t, pattern.MatchString(id) && id != "." && id != "..", api.ValidID(id), "%q", id)
	}
}

func TestGroupOfEvent(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", api.MaxIDLength)
	for id, group := range map[string]string{
		"g.1.completed": "g", "a.b.12.failed": "a.b", "g.1.failed.2.failed": "g.1.failed", long + ".1.cancelled": long,
		"": "", "g": "", "g.1": "", "g.1.": "", "g.0.failed": "", "g.x.failed": "", ".1.failed": "", "..1.failed": "", "...1.failed": "",
		"a/b.1.failed": "", "g.1.FAILED": "", "x" + long + ".1.failed": "", "g.1.failed\n": "", "g\n.1.failed": "",
	} {
		require.Equal(t, group, api.GroupOfEvent(id), id)
	}
}
