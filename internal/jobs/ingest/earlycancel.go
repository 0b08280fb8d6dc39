package ingest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const (
	earlyCancelInterval = time.Second // time between two runs
	earlyCancelBatch    = 50          // entries of one read
	earlyCancelMaxBytes = 4 << 20     // bytes of one run; the run may exceed this by one batch
)

// earlyCancel reads ahead in an ingest stream and applies cancellations, while the messages before
// them wait because the backlog is full. A cancellation makes the backlog smaller, so it must not
// wait behind those messages. It looks for them only if the backlog has refused a message of this
// process within the last groupWait. The consumer applies the cancellation again when it reads it,
// which changes nothing. If Redis is away, the next run tries the cancellation again; any other
// error is left to the consumer.
type earlyCancel struct{ lastRead string } // id of the last entry that was read

func (a *earlyCancel) runOnce(in *source) func(context.Context) error {
	return func(ctx context.Context) error {
		if time.Since(time.Unix(0, in.lastRefusal.Load())) > groupWait {
			return nil // no message waits for the backlog: the consumer reads the cancellation soon
		}
		for bytes := 0; bytes < earlyCancelMaxBytes; {
			from := "-"
			if a.lastRead != "" {
				from = "(" + a.lastRead
			}
			entries, err := in.Conn.Cmd.XRangeN(ctx, in.key(), from, "+", earlyCancelBatch).Result()
			if err != nil {
				return fmt.Errorf("read the stream %s for cancellations: %w", in.key(), err)
			}
			for _, e := range entries {
				for _, v := range e.Values {
					if text, ok := v.(string); ok {
						bytes += len(text)
					}
				}
				if e.Values[messages.FieldType] == messages.TypeGroupCancel {
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

func (in *source) cancelEarly(ctx context.Context, entry string, values map[string]any) error {
	env, err := messages.ParseEntry(entry, values)
	if err != nil {
		return nil //nolint:nilerr // the entry is rejected when the consumer reads it
	}
	c, err := in.decoder.DecodeCancel(env.Data)
	if err != nil {
		return nil //nolint:nilerr // the consumer rejects the entry, see above
	}
	_, err = in.store.Cancel(in.withPrincipal(ctx), c.Group)
	if errors.Is(err, api.ErrUnavailable) {
		return err // the next run reads the entry again
	}
	return nil
}
