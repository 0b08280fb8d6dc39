package audit

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// A job is not a duplicate because a scan yields its element twice.
func TestElementThatAScanRepeatsIsNotADuplicate(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	w.create("g", "acme", "T")
	w.append("g", jobs(20, later))
	p := w.space.Partition(0)
	blobs := w.c.ZRange(w.Context(), p.NonReadyOf("acme"), 0, 1).Val()
	w.addNonReady(p, "acme", blobs[1]+" ")

	a := &auditor{Reader: read.Reader{Cmd: w.c}, space: w.space, p: p, opts: Options{Reducers: w.plans, stateBytes: maxStateBytes}}
	ps := a.newPass()
	w.ok(ps.ReadByScore(w.Context(), p.Groups(), func(ids []string) error { return ps.checkGroups(w.Context(), ids) }))
	w.ok(ps.readNonReady(w.Context(), "acme", p.NonReadyOf("acme")))
	w.ok(ps.readNonReady(w.Context(), "acme", p.NonReadyOf("acme")))
	w.ok(ps.checkTracked(w.Context(), ps.judgedSharedKinds()))
	n, _ := ledger.QueuedOrdinal(blobs[1][len("g|T|0|0|0|0|0|0|0|1700000000000|S|"):])
	require.Equal(t, map[finding]string{{LawLocation, "g", n, "duplicated1N!"}: "it is non-ready at attempt 0, and more than once in non-ready"}, ps.found.withSummaries())
}

func TestFindingsAreBounded(t *testing.T) {
	t.Parallel()
	var fs findings
	for g := range 200 {
		for i := range int64(2 * maxPerGroupAndLaw) {
			fs.add(finding{LawLocation, fmt.Sprint(g), i, "x"}, "detail")
		}
	}
	fs.add(finding{LawLocation, "0", 0, "x"}, "the same again")
	all := fs.withSummaries()
	require.Equal(t, "detail", all[finding{LawLocation, "0", 99, "x"}])
	require.Equal(t, "and 100 more like these", all[finding{LawLocation, "0", noOrdinal, "more"}])
	require.Equal(t, "and 20000 findings about more groups", all[finding{LawLocation, "", noOrdinal, "omitted"}])
	require.Len(t, all, maxFindings+100+1)
}
