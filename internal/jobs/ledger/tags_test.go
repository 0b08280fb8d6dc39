package ledger_test

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// tagged returns a sealed group of one job with these tags.
func tagged(group string, tags ...string) ledger.AppendArgs {
	return submission(group, 1, "tags", strings.Join(tags, "\n"))
}

// withTag lists the groups of tenant acme with a tag, the newest first.
func (w *world) withTag(tag string) (ids []string) {
	w.Helper()
	r := ledger.GroupRange{Tenant: "acme", Tag: tag, Before: ledger.Newest()}
	groups, err := ledger.ListGroups(w.Context(), w.c, w.p, r, 100)
	require.NoError(w, err)
	for _, g := range groups {
		require.Equal(w, g.At, w.c.ZScore(w.Context(), w.p.GroupsOf("acme"), g.ID).Val())
		ids = append(ids, g.ID)
	}
	return ids
}

// TestTags: a group with tags is on the lists of its tags, once; so is it in views and facts. With the
// last group of a tag the list goes, with the last tag of a tenant the set.
func TestTags(t *testing.T) {
	onStores(t, func(w *world) {
		w.submit(tagged("g1", "a=1", "b=x}y:{=z"))
		w.submit(tagged("g2", "a=1"), submission("plain", 1))
		w.unchanged(func() { w.submit(tagged("g1", "a=1", "b=x}y:{=z")) })
		require.ElementsMatch(w, []string{"g1", "g2"}, w.withTag("a=1"))
		require.Equal(w, []string{"g1"}, w.withTag("b=x}y:{=z"))
		require.Empty(w, w.withTag("a=2"))

		tags := api.Tags{"a": "1", "b": "x}y:{=z"}
		rarest, err := ledger.RarestTag(w.Context(), w.c, w.p, "acme", tags)
		require.NoError(w, err)
		require.Equal(w, "b=x}y:{=z", rarest)
		groups, err := ledger.ReadGroups(w.Context(), w.c, w.p, []string{"g1", "plain"})
		require.NoError(w, err)
		require.Equal(w, tags, groups[0].Tags)
		require.Nil(w, groups[1].Tags)
		facts, err := ledger.ReadGroupFacts(w.Context(), w.c, w.p, []string{"g1", "g2", "plain"})
		require.NoError(w, err)
		require.Equal(w, []api.Tags{tags, {"a": "1"}, nil}, []api.Tags{facts[0].Tags, facts[1].Tags, facts[2].Tags})
		entries, err := ledger.ReadOutbox(w.Context(), w.c, w.p, 1)
		require.NoError(w, err)
		require.Equal(w, tags, entries[0].Moves[0].After.Tags)

		gone := func(group string) {
			w.cancel(group)
			w.sweep(group)
			w.expire(group)
		}
		gone("g1")
		require.Equal(w, []string{"g2"}, w.withTag("a=1"))
		require.Equal(w, []string{"a=1"}, w.c.SMembers(w.Context(), w.p.Tags("acme")).Val())
		w.unchanged(func() { w.expire("g1") })
		gone("g2")
		for _, key := range w.keys() {
			require.NotContains(w, key, ":tag", "of a tenant without tags")
		}
	})
}

// TestTagsOfATenantAreBounded: a tenant's groups have at most 1,000 different tags. A group with one more is
// refused, also behind another one of the call that takes the last place; one with known tags is not, nor is
// a group of another tenant.
func TestTagsOfATenantAreBounded(t *testing.T) {
	onStores(t, func(w *world) {
		all := make([]any, 999)
		for i := range all {
			all[i] = fmt.Sprint("n=", i)
		}
		w.c.SAdd(w.Context(), w.p.Tags("acme"), all...)
		r := w.submit(tagged("last", "n=1", "n=new"), tagged("more", "a=1", "b=1"), tagged("known", "n=7", "n=new"))
		require.NoError(w, r[0].Err)
		require.ErrorIs(w, r[1].Err, api.ErrConflict)
		require.ErrorContains(w, r[1].Err, "group more: tags: the groups of a tenant may have at most 1000 different tags, and 1000 are there")
		require.NoError(w, r[2].Err)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Group("more"), w.p.Tagged("acme", "a=1")).Val())
		w.unchanged(func() { require.NoError(w, w.submit(tagged("last", "n=1", "n=new"))[0].Err) })
		other := tagged("other", "a=1")
		other.Create.Tenant = "globex"
		require.NoError(w, w.submit(other)[0].Err)
	})
}

// TestTagsOfAWrongType: a key of the index that another program has made refuses the group, and nothing
// of it is written.
func TestTagsOfAWrongType(t *testing.T) {
	onStores(t, func(w *world) {
		for _, key := range []string{w.p.Tags("acme"), w.p.Tagged("acme", "a=1")} {
			w.c.Set(w.Context(), key, "x", 0)
			w.unchanged(func() { require.ErrorContains(w, w.submit(tagged("g", "a=1"))[0].Err, "WRONGTYPE") })
			w.c.Del(w.Context(), key)
		}
	})
}

// TestGroupsWithoutTagsCostNothing: from its submission to its deletion, no command of a group without
// tags, in scripts or outside, names a key of tags, and no such key or field exists. With a tag there are
// some, which shows that the test would see them.
func TestGroupsWithoutTagsCostNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	w := newWorld(t, client(t, server.URL()), "t:")
	conn, err := net.Dial("tcp", server.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, 1<<20)
	require.True(t, lines.Scan()) // +OK
	ofTags := func(step func()) (n int) {
		step()
		require.NoError(t, w.c.Echo(t.Context(), "end").Err())
		for lines.Scan() && !strings.Contains(lines.Text(), `"end"`) {
			if strings.Contains(lines.Text(), ":tags:") || strings.Contains(lines.Text(), ":tagged:") {
				n++
			}
		}
		return n
	}
	live := func(a ledger.AppendArgs, stored bool) int {
		return ofTags(func() {
			w.submit(a)
			for _, key := range w.keys() {
				if w.c.Type(t.Context(), key).Val() != "stream" && strings.Contains(key+w.content(key), "tag") {
					require.True(t, stored, key)
				}
			}
			w.cancel(a.Group)
			w.sweep(a.Group)
			w.expire(a.Group)
		})
	}
	live(submission("first", 1), false)
	require.Zero(t, live(submission("plain", 1), false))
	require.Positive(t, live(tagged("marked", "a=1"), true))
}
