//go:build browser

package browser

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/chromedp/chromedp"

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
