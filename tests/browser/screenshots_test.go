//go:build browser

package browser

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
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

// show creates the groups, tenants and guards that the screenshots in the documents show. It waits
// until more than 4000 of the 6000 jobs of promo-7 have ended and the history has three points.
func (c *console) show() {
	c.t.Helper()
	ctx := c.t.Context()
	c.submit(client.Submission{
		ID: "promo-7", Tenant: "acme", Name: "Autumn sale, second mailing", Seal: true, JobTimeout: time.Hour,
		Aggregate: []client.Aggregate{
			{As: "cost", Op: "sum", Field: "data.cost"}, {As: "duration", Op: "distribution", Field: "duration_ms"},
			{As: "country", Op: "count_by", Field: "data.country"},
		},
		Jobs: jobs(6000, func(i int) string {
			switch {
			case i%97 == 7:
				return `{"fail": "permanent"}`
			case i == 2500 || i == 2501:
				return sleeps(i)
			}
			return fmt.Sprintf(`{"sleep_ms": %d, "result": {"cost": 1.25, "country": %q}}`, i%23, []string{"DE", "KR", "KR", "US", "US", "US"}[i%6])
		}),
	})
	for i, tenant := range []string{"globex", "initech", "hooli", "umbrella", "acme"} {
		id := fmt.Sprintf("newsletter-%d", i+1)
		c.submit(client.Submission{ID: id, Tenant: tenant, Seal: true, Jobs: jobs(300*(i+1), func(i int) string {
			if i%31 == 5 {
				return `{"fail": "permanent"}`
			}
			return `{}`
		})})
		c.wait(id)
	}
	c.submit(client.Submission{ID: "invoices", Tenant: "hooli", Seal: true, Priority: "high", Jobs: jobs(2000, func(int) string { return `{"sleep_ms": 20}` })})
	_, err := c.api.Pause(ctx, "invoices")
	require.NoError(c.t, err)
	c.guards()
	require.Eventually(c.t, func() bool {
		g, err := c.api.Group(ctx, "promo-7")
		h, historyErr := c.api.History(ctx, 15)
		return err == nil && historyErr == nil && g.Counts.Ended() > 4000 && len(h.Points) > 2
	}, 2*patience, 50*time.Millisecond)
}

// TestConsoleScreenshots takes the screenshots of docs/console. Without the flag -screenshots it
// writes no documents, and only checks that screenshots can be taken and are not blank.
func TestConsoleScreenshots(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	c.show()
	dir := pictures(t, "console")
	b := c.reader()
	for _, p := range []struct {
		path, name, scheme string
		width              int64
	}{
		{"/", "overview", "light", 1280},
		{"/", "overview-dark", "dark", 1280},
		{"/groups", "groups", "light", 1280},
		{"/groups/promo-7", "group", "light", 1280},
		{"/groups/promo-7", "group-phone", "light", 360},
		{"/groups/promo-7/failures", "failures", "light", 768},
		{"/groups/promo-7/jobs/7", "job", "light", 1024},
		{"/groups/promo-7/jobs?state=failed", "jobs", "dark", 1024},
		{"/submit", "submit", "light", 1024},
		{"/tenants/acme", "tenant", "light", 1024},
		{"/guards/mail", "guard", "dark", 768},
	} {
		b.do(chromedp.EmulateViewport(p.width, 800))
		command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: p.scheme}},
		})
		c.open(b, p.path)
		b.until("!document.querySelector('[data-live]') || stream !== null")
		picture, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		require.NoError(t, err)
		decoded, err := png.Decode(bytes.NewReader(picture))
		require.NoError(t, err)
		require.Equal(t, int(p.width), decoded.Bounds().Dx())
		require.Greater(t, colors(decoded), 20, "%s is blank", p.name)
		require.NoError(t, os.WriteFile(filepath.Join(dir, p.name+".png"), picture, 0o644))
	}
	g, err := c.api.Group(t.Context(), "promo-7")
	require.NoError(t, err)
	require.Equal(t, api.StatusRunning, g.Status)
}

func colors(picture image.Image) int {
	found := map[any]bool{}
	for y := range picture.Bounds().Dy() {
		for x := range picture.Bounds().Dx() {
			found[picture.At(x, y)] = true
		}
	}
	return len(found)
}
