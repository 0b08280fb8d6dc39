package broker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/dispatch"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// shared is what the parts of a broker share.
type shared struct {
	stage.Process
	cfg          Config
	instance     string // names this broker in conns, statuses and streams
	rooms        *waitingroom.Rooms
	keys         *entrytoken.Keys
	metrics      metrics
	publisher    *dispatch.Publisher
	views        []*position.Views // by partition
	conns        connections
	endedStreams disconnects
	lookups      lookups
	enterBatches enterBatches
	draining     atomic.Bool
	suspended    atomic.Bool  // positions wait until all users have entered again
	positionAge  atomic.Int64 // of the oldest positions that the last round has shown, in ms
	lastConn     atomic.Int64
	loading      singleflight.Group // snapshots, and questions to the seat service
}

// viewsOf returns the views of the partition of an event.
func (b *shared) viewsOf(event string) *position.Views {
	return b.views[b.Space.OfEvent(event).Index()]
}

// apiError turns an error of package waitingroom into the error that the API shows.
func (b *shared) apiError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, waitingroom.ErrUnknown):
		return roomapi.ErrUnknownEvent
	case call.IsUnavailable(err) || call.IsOOM(err):
		return fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	return err
}

// sign returns the signed entry token for a user's claim. The same claim gives the same token while
// the token keys and the event's token_ttl stay the same.
func (b *shared) sign(ctx context.Context, event, user string, c waitingroom.Claim) (api.EntryToken, error) {
	s, err := b.snapshot(ctx, event)
	if err != nil {
		return api.EntryToken{}, err
	}
	return b.signFor(s, event, user, c)
}

func (b *shared) signFor(s waitingroom.Snapshot, event, user string, c waitingroom.Claim) (api.EntryToken, error) {
	// issued is the token's time of issue (iat): its expiry less token_ttl. This is the time of the
	// claim or renewal, by Redis's clock; it is earlier if max_session has shortened the renewal or
	// token_ttl was raised since. If it is in the future, which some verifiers refuse, because
	// token_ttl was lowered since or this process's clock is slow, issued is the time of the
	// promotion instead.
	issued := c.Expires.Add(-s.Settings.TokenTTL)
	if promoted, err := strconv.ParseInt(c.Fence, 10, 64); err == nil && issued.After(time.Now()) {
		issued = time.UnixMicro(promoted) // fences are at least the time of their promotion
	}
	token, err := b.keys.Sign(entrytoken.Claims{
		Issuer: b.cfg.PublicURL, Audience: b.cfg.Audience, User: user, Event: event, Fence: c.Fence,
		IssuedAt: issued, ExpiresAt: c.Expires,
	})
	return api.EntryToken{Token: token, ExpiresAt: c.Expires.Truncate(time.Second)}, err
}

// snapshot returns the settings and sizes of an event, which may be a second old, and older while
// Redis does not answer.
func (b *shared) snapshot(ctx context.Context, event string) (waitingroom.Snapshot, error) {
	followed := b.viewsOf(event).Open(event)
	defer followed.Close()
	if s, ok := followed.Snapshot(); ok && s.Event != "" { // it may have been declared since
		return s, nil
	}
	return b.fresh(ctx, event)
}

// fresh reads the settings and sizes of an event from Redis. Callers at the same time share one
// read.
func (b *shared) fresh(ctx context.Context, event string) (waitingroom.Snapshot, error) {
	found := b.loading.DoChan("snapshot "+event, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		s, err := b.rooms.Snapshot(ctx, b.Space.OfEvent(event), event)
		if err == nil && len(s.Events) == 0 {
			err = waitingroom.ErrUnknown
		}
		if err != nil {
			return waitingroom.Snapshot{}, b.apiError(err)
		}
		return s.Events[0], nil
	})
	select {
	case r := <-found:
		s, _ := r.Val.(waitingroom.Snapshot)
		return s, r.Err
	case <-ctx.Done():
		return waitingroom.Snapshot{}, fmt.Errorf("%w: %w", api.ErrUnavailable, ctx.Err())
	}
}

// mode returns the mode of an event. With a seat service, an unknown event counts as open, because
// the service may know it.
func (b *shared) mode(ctx context.Context, event string) (string, error) {
	s, err := b.snapshot(ctx, event)
	if errors.Is(err, roomapi.ErrUnknownEvent) && b.cfg.Seats != nil {
		return api.ModeOpen, nil
	}
	return s.Settings.Mode, err
}

// owns says whether a conn was made by this broker.
func (b *shared) owns(conn string) bool { return keyspace.InstanceOf(conn) == b.instance }

// alive returns the instances of the brokers that are alive. This broker is one of them.
func (b *shared) alive(ctx context.Context) (map[string]bool, error) {
	brokers, err := presence.Brokers(ctx, b.Conn, b.Space)
	if err != nil {
		return nil, err
	}
	alive := map[string]bool{b.instance: true}
	for _, s := range brokers {
		alive[s.ID] = true
	}
	return alive, nil
}
