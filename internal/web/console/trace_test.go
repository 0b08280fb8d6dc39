package console

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// traced is a fake backend whose jobs have the trace id `id`; "" means that they were not sampled.
type traced struct {
	*fakeBackend
	id string
}

func (b traced) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	j, err := b.fakeBackend.Job(ctx, group, ordinal)
	j.TraceID = b.id
	return j, err
}

// TestTraceLinks: pages of groups and jobs link to a trace if every value that TraceURL needs is
// known.
func TestTraceLinks(t *testing.T) {
	t.Parallel()
	const id = "0af7651916cd43dd8448eb211c80319c"
	for to, want := range map[string][3]string{ // the links of a group, of a job that was sampled and of another one
		"": {},
		"https://traces.example/trace/{trace_id}":                           {"", "https://traces.example/trace/" + id, ""},
		"http://jaeger:16686/search?tags=%7B%22a%22%3A%22{group}%22%7D&n=1": {"http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1", "http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1", "http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1"},
		"https://traces.example/{group}/{ordinal}#{group}":                  {"", "https://traces.example/failed-1/7#failed-1", "https://traces.example/failed-1/7#failed-1"},
		"https://traces.example/{group}.{ordinal}/{trace_id}":               {"", "https://traces.example/failed-1.7/" + id, ""},
	} {
		links := func(traceID, path string) (found string) {
			w := newTestConsole(t)
			w.console.TraceURL = to
			w.with(func(o *httpapi.Options) { o.Backend = traced{w.backend, traceID} })
			for _, a := range w.page(path).all("a") {
				if attribute(a, "rel") == "noreferrer" {
					require.Empty(t, found, "one link")
					found = attribute(a, "href")
				}
			}
			return found
		}
		require.Equal(t, want, [3]string{
			links(id, "/ui/groups/failed-1"), links(id, "/ui/groups/failed-1/jobs/7"), links("", "/ui/groups/failed-1/jobs/7"),
		}, to)
	}
	require.Equal(t, "https://traces.example/?q=a%26b%7Bordinal%7D7", traceLink("https://traces.example/?q={group}{ordinal}", "a&b{ordinal}", "7", ""))
}
