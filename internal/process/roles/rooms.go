package roles

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/room/dispatch"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/seats"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// roomAdmin returns the implementation of the API's calls on the waiting room. The caller must call
// stop when no call is served any more. Without a file of token keys, calls on entry tokens are
// refused, and all others work.
func roomAdmin(ctx context.Context, p *app.Process, b Base) (admin *roomadmin.Admin, stop func(), err error) {
	c, m := p.Config.Broker, telemetry.NewRoomMetrics(p.Tel.Meter)
	cfg := roomadmin.Config{
		Rooms: waitingroom.New(b.Conn, b.Space, func(script string, took time.Duration, _ error) {
			m.Script(script, took)
		}),
		Space:     b.Space,
		Rules:     RoomRules(c),
		PublicURL: c.PublicURL,
		Log:       p.Tel.Log,
		Ended:     m.Count,
	}
	if _, err := netip.ParseAddrPort(c.Addr); err == nil && c.PublicURL == "" {
		cfg.PublicURL = "http://" + c.Addr // as brokers with the same variables have it
	}
	if cfg.Publisher, err = dispatch.NewPublisher(b.Conn, b.Space); err != nil {
		return nil, nil, err
	}
	if c.SeatsURL != "" {
		if cfg.Seats, err = seats.New(c.SeatsURL, c.SeatsTimeout); err != nil {
			return nil, nil, fmt.Errorf("%w: BULKACTION_BROKER_SEATS_URL: %w", app.ErrConfig, err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	if c.TokenKeysFile != "" {
		if cfg.Tokens, err = entrytoken.Read(c.TokenKeysFile, p.Tel.Log); err != nil {
			cancel()
			return nil, nil, tokenKeysError(c.TokenKeysFile, err)
		}
		watching.Go(func() { cfg.Tokens.Watch(ctx) })
	}
	return roomadmin.New(cfg), func() {
		cancel()
		watching.Wait()
		if cfg.Seats != nil {
			cfg.Seats.Close()
		}
	}, nil
}
