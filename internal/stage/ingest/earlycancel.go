package ingest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

const (
	earlyCancelInterval = time.Second
	earlyCancelBatch    = 50      // of one read
	earlyCancelMaxBytes = 4 << 20 // of one round, give or take a read
)

// earlyCancel looks for cancellations in the part of the stream that is not read yet, while what was read
// waits for room: a cancellation makes room, so it must not wait behind that. It is carried out
// again when its turn comes, which changes nothing; one that fails is left to that.
type earlyCancel struct{ lastRead string } // entry that was looked at

func (a *earlyCancel) runOnce(in *Ingest) func(context.Context) error {
	return func(ctx context.Context) error {
		if time.Since(time.Unix(0, in.lastRefusal.Load())) > groupWait {
			return nil // nothing waits: a message that does is tried again sooner
		}
		for bytes := 0; bytes < earlyCancelMaxBytes; {
			from := "-"
			if a.lastRead != "" {
				from = "(" + a.lastRead
			}
			entries, err := in.conn.Cmd.XRangeN(ctx, in.space.Ingest(), from, "+", earlyCancelBatch).Result()
			if err != nil {
				return fmt.Errorf("look ahead in the ingest stream: %w", err)
			}
			for _, e := range entries {
				for _, v := range e.Values {
					if text, ok := v.(string); ok {
						bytes += len(text)
					}
				}
				if e.Values[wm.FieldType] == messages.TypeGroupCancel {
					if err := in.cancelEarly(ctx, e.ID, e.Values); err != nil {
						return err
					}
				}
				a.lastRead = e.ID
			}
			if len(entries) < earlyCancelBatch {
				return nil
			}
		}
		return nil
	}
}

func (in *Ingest) cancelEarly(ctx context.Context, entry string, values map[string]any) error {
	env, err := messages.ParseEntry(entry, values)
	if err != nil {
		return nil //nolint:nilerr // it is rejected when its turn comes
	}
	c, err := in.decoder.DecodeCancel(env.Data)
	if err != nil {
		return nil //nolint:nilerr // the same
	}
	_, err = in.store.Cancel(ctx, c.Group)
	if errors.Is(err, api.ErrUnavailable) {
		return err // looked at again
	}
	return nil
}
