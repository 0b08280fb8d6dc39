package audit

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestElementThatAScanRepeatsIsNotADuplicate: the sorted set non-ready is read twice. Only the job
// that is in it twice is reported as duplicated, and not the other 19.
func TestElementThatAScanRepeatsIsNotADuplicate(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := audittest.New(t, url, prefix, 1)
	w.Create("g", "acme", "T")
	w.Append("g", audittest.Jobs(20, audittest.Later))
	p := w.Space.Partition(0)
	blobs := w.C.ZRange(w.Context(), p.NonReadyOf("acme"), 0, 1).Val()
	w.AddNonReady(p, "acme", blobs[1]+" ")

	ps := newPass(scope{Reader: read.Reader{Cmd: w.C}, space: w.Space, p: p, opts: Options{Reducers: w.Plans, stateBytes: maxStateBytes}})
	w.OK(ps.ReadByScore(w.Context(), p.Groups(), func(ids []string) error { return ps.checkGroups(w.Context(), ids) }))
	w.OK(ps.shared.read(w.Context(), read.NonReadyOf("acme")[0]))
	w.OK(ps.shared.read(w.Context(), read.NonReadyOf("acme")[0]))
	w.OK(ps.shared.checkTracked(w.Context(), ps.shared.judgedKinds()))
	n, _ := ledger.QueuedOrdinal(blobs[1][len("g|T|0|0|0|0|0|0|0|1700000000000|S|"):])
	found := ps.found.withSummaries()
	require.Len(t, found, 1)
	require.Equal(t, "it is non-ready at attempt 0, and more than once in non-ready", found[identity{LawLocation, "g", n, "duplicated1N!"}].Detail)
}

func TestFindingsAreBounded(t *testing.T) {
	t.Parallel()
	fs := newFindings()
	for g := range 200 {
		for i := range int64(2 * maxPerGroupAndLaw) {
			fs.add(newFinding(LawLocation, fmt.Sprint(g), "", "x", "detail").aboutJob(i))
		}
	}
	fs.add(newFinding(LawLocation, "0", "", "x", "the same again").aboutJob(0))
	all := fs.withSummaries()
	require.Equal(t, "detail", all[identity{LawLocation, "0", 99, "x"}].Detail)
	require.Equal(t, "and 100 more like these", all[identity{LawLocation, "0", noOrdinal, "more"}].Detail)
	require.Equal(t, "and 20000 findings about more groups", all[identity{LawLocation, "", noOrdinal, "omitted"}].Detail)
	require.Len(t, all, maxFindings+100+1)
}
