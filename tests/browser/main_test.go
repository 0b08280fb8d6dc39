//go:build browser

package browser

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// EnvChromium is the name of the environment variable with the path of the browser that the tests
// use.
const EnvChromium = "BULKACTION_CHROMIUM"

var (
	screenshots = flag.String("screenshots", "", "folder to whose folders the tests of screenshots write their pictures")
	axeFile     = flag.String("axe", "../../.bin/axe-core-4.14.1.js", "axe.min.js of axe-core, which .ci/axe fetches")
)

// chromium is the context of the browser process that all tests share. Each visitor has a profile
// of its own in it.
var chromium context.Context

func TestMain(m *testing.M) {
	flag.Parse()
	stop, err := startChromium()
	if err != nil {
		fmt.Fprintf(os.Stderr, "start chromium: %v\nInstall it with `make browser`, or set %s to its path.\n", err, EnvChromium)
		os.Exit(1)
	}
	code := proctest.Run(m, "./cmd/bulkaction", "./examples/protected-shop")
	stop()
	os.Exit(code)
}

func startChromium() (stop func(), err error) {
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(cmp.Or(os.Getenv(EnvChromium), "chromium")),
		chromedp.DisableGPU, chromedp.WindowSize(1000, 700), chromedp.Flag("lang", "en-US"),
	)
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // Chromium refuses to run its sandbox as root
	}
	allocator, free := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, end := chromedp.NewContext(allocator)
	if err := chromedp.Do(ctx); err != nil {
		free()
		return nil, err
	}
	chromium = ctx
	return func() { end(); free() }, nil
}

// TestMistakesAreFound: a tab records the problems of a bad page, such as an error in the browser's
// console or a position that rises, and the script faults finds six faults of it.
func TestMistakesAreFound(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	serve := func(path, contentType, body string) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.Header().Set("Content-Security-Policy", "default-src 'self'; connect-src *; style-src 'unsafe-inline'")
			_, _ = io.WriteString(w, body)
		})
	}
	serve("/{$}", "text/html", `<!doctype html><script src="/page.js"></script><script>inline()</script>
		<p style="color: #999; background: #fff">pale</p><a>nameless</a><a href="/"></a>`)
	serve("/page.js", "text/javascript", `
		console.error("a bad thing");
		fetch("http://localhost:" + location.port + "/elsewhere", { mode: "no-cors" });
		new EventSource("/stream").addEventListener("position", (e) => {
			if (e.data.includes("9")) throw new Error("thrown");
		});`)
	serve("/elsewhere", "text/plain", "")
	serve("/stream", "text/event-stream", "retry: 100000\nevent: position\ndata: {\"position\":3,\"total\":9}\n\n"+
		"event: position\ndata: {\"position\":4,\"total\":9}\n\nevent: position\ndata: {\"position\":5,\"total\":4}\n\n")
	site := httptest.NewServer(mux)
	t.Cleanup(site.Close)

	r := &room{t: t, broker: site.URL, shop: site.URL}
	b := r.visitor()
	b.visit(site.URL)
	for _, problem := range []string{
		"console: error", "a bad thing", "exception: ", "Error: thrown", "log: security", "ContentSecurityPolicyIssue",
		"request to another host: http://localhost:", "position rose from 3 to 4", `position: {"position":5,"total":4}`,
		"/favicon.ico",
	} {
		b.await(problem, func() bool { return strings.Contains(strings.Join(b.found(), "\n"), problem) })
	}
	all := strings.Join(eval[[]string](b, faults), "\n")
	for _, fault := range []string{"1.4.3: contrast 2.85: pale", "4.1.2: no name", "2.1.1: a link to nowhere", "2.4.2", "3.1.1", "1.4.4"} {
		require.Contains(t, all, fault)
	}
	b.expect("") // all of this is wanted here
}
