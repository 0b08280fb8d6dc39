package accountsfile

import (
	"context"
	"log/slog"
	"os"
	"time"
)

// interval is the time between two looks at the files.
const interval = 10 * time.Second

// Watch calls reload every ten seconds, and at each signal from the channel now, until ctx ends.
// reload reads the files again and returns whether the accounts in use have changed. Its error,
// which Watch logs, means that the old accounts stay in use. what is the job type of the accounts,
// for the log.
func Watch(ctx context.Context, log *slog.Logger, what string, now <-chan os.Signal, reload func() (bool, error)) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-now:
		}
		switch changed, err := reload(); {
		case err != nil:
			log.Error("accounts could not be read again, the old accounts stay in use", "type", what, "error", err)
		case changed:
			log.Info("accounts changed", "type", what)
		}
	}
}
