package accountsfile_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

func TestWatchSaysWhatItFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		var changed bool
		var mistake error
		calls, now, ended := 0, make(chan os.Signal), make(chan struct{})
		go func() {
			defer close(ended)
			accountsfile.Watch(ctx, slog.New(slog.NewTextHandler(&text, nil)), "T", now, func() (bool, error) {
				calls++
				return changed, mistake
			})
		}()
		lines := func() string {
			synctest.Wait()
			defer text.Reset()
			return text.String()
		}
		time.Sleep(time.Minute)
		require.Empty(t, lines())
		require.Equal(t, 6, calls)

		mistake = errors.New("bad.yaml: no")
		now <- syscall.SIGHUP
		found := lines()
		require.Equal(t, 7, calls)
		require.Contains(t, found, "level=ERROR")
		require.Contains(t, found, "the old accounts stay in use")
		require.Contains(t, found, "bad.yaml: no")

		mistake, changed = nil, true
		now <- syscall.SIGHUP
		require.Contains(t, lines(), `msg="accounts changed" type=T`)
		cancel()
		<-ended
	})
}
