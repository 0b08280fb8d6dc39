//go:build browser

package browser

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// TestScreenshots takes the screenshots of docs/waiting-room. Without the flag -screenshots it
// writes no documents, and only checks that screenshots can be taken.
func TestScreenshots(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	r.crowd(60)
	ben := r.visitor()
	ben.visit(r.waitURL())
	ben.seesPlace(61, 61)
	r.crowd(59)
	_, err := r.api.Recalibrate(t.Context(), event, api.Recalibration{Capacity: new(int64(4))})
	require.NoError(t, err)
	ben.seesPlace(58, 117)
	dir := pictures(t, "waiting-room")
	eval[string](ann, "document.getElementById('until').textContent = '20:30:00 UTC'") // the same picture each time
	ann.picture(filepath.Join(dir, "shop.png"), 400)
	ann.click("#leave") // the pace is known when a slot has been given back
	ben.seesPlace(57, 116)
	ben.until("/^about/.test(document.getElementById('eta').textContent)")
	ben.picture(filepath.Join(dir, "wait.png"), 560)
	ben.visit(r.waitURL() + "?lang=ko")
	ben.until("/^약/.test(document.getElementById('eta').textContent)")
	ben.picture(filepath.Join(dir, "wait-ko.png"), 560)
}

// pictures returns the folder to which screenshots are written: with the flag -screenshots, the
// given folder below the flag's value; without it, a temporary folder.
func pictures(t *testing.T, folder string) string {
	if *screenshots == "" {
		return t.TempDir()
	}
	return filepath.Join(*screenshots, folder)
}

// picture writes a screenshot of the tab to a PNG file, 720 px wide and height px high. It requires
// that the file is smaller than 40 KiB.
func (b *tab) picture(path string, height int64) {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(720, height))
	image, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	require.NoError(b.t, err)
	size, err := png.DecodeConfig(bytes.NewReader(image))
	require.NoError(b.t, err)
	require.Equal(b.t, 720, size.Width)
	require.Less(b.t, len(image), 40<<10)
	require.NoError(b.t, os.WriteFile(path, image, 0o644))
}
