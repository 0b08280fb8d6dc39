package roomadmin

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/entrytoken"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// VerifyToken says whether the bearer of a token may be inside now. A token without a good
// signature is an invalid field. A good one that has expired, or whose user has left, completed or
// was removed, is not valid.
func (a *Admin) VerifyToken(ctx context.Context, token string) (s api.EntryTokenState, err error) {
	c, err := a.open(token)
	if err != nil {
		return s, err
	}
	var claim waitingroom.Claim
	err = retry(ctx, func(ctx context.Context) (err error) {
		claim, err = a.cfg.Rooms.Verify(ctx, c.Event, c.User, c.Fence)
		return err
	})
	if err != nil {
		return s, apiError("verify a token of", c.Event, err)
	}
	if claim.Code != waitingroom.InProgress {
		return s, nil
	}
	expires := c.ExpiresAt
	if claim.Expires.Unix() > c.ExpiresAt.Unix() {
		// The token was renewed. It is valid by itself until its own expiry, which the record in
		// Redis does not show any more.
		now, err := a.redisTime(ctx, c.Event)
		if err != nil || !now.Before(expires) {
			return s, err
		}
	}
	return api.EntryTokenState{
		Valid: true, Event: c.Event, User: c.User, Fence: c.Fence, ExpiresAt: &expires,
	}, nil
}

// RenewToken returns a token with a later expiry. A token that is gone, or whose session has
// reached max_session, is an api.ErrConflict.
func (a *Admin) RenewToken(ctx context.Context, token string) (t api.EntryToken, err error) {
	c, err := a.open(token)
	if err != nil {
		return t, err
	}
	var claim waitingroom.Claim
	err = retry(ctx, func(ctx context.Context) (err error) {
		claim, err = a.cfg.Rooms.Renew(ctx, c.Event, c.User, c.Fence)
		return err
	})
	switch {
	case err != nil:
		return t, apiError("renew a token of", c.Event, err)
	case claim.Code == waitingroom.Over:
		return t, fmt.Errorf("renew the entry token: %w: max_session of event %s is reached", api.ErrConflict, c.Event)
	case claim.Code != waitingroom.Renewed:
		return t, fmt.Errorf("renew the entry token: %w: it has expired, or the user has left event %s",
			api.ErrConflict, c.Event)
	}
	c.ExpiresAt = claim.Expires
	if t.Token, err = a.cfg.Tokens.Sign(c); err != nil {
		return t, err
	}
	t.ExpiresAt = claim.Expires.Truncate(time.Second).UTC() // as in the token
	return t, nil
}

// CompleteToken ends the session of a token, and gives its slot back. With sold, a seat of the
// stock is sold. It returns false if the token is gone already.
//
// It is not repeated when the reply of Redis is lost: the answer to a repetition would be false,
// and a caller that sells nothing on false would be wrong. The caller gets the error instead.
func (a *Admin) CompleteToken(ctx context.Context, token string, sold bool) (bool, error) {
	c, err := a.open(token)
	if err != nil {
		return false, err
	}
	done, err := a.cfg.Rooms.Complete(ctx, c.Event, c.User, c.Fence, sold)
	if err != nil {
		return false, apiError("complete a token of", c.Event, err)
	}
	if done {
		a.cfg.Ended(telemetry.RoomCompleted, c.Event, 1)
	}
	return done, nil
}

// open returns the claims of a token with a good signature.
func (a *Admin) open(token string) (entrytoken.Claims, error) {
	if a.cfg.Tokens == nil {
		return entrytoken.Claims{}, fmt.Errorf("check entry tokens: %w: BULKACTION_BROKER_TOKEN_KEYS_FILE is not set "+
			"for this process", api.ErrNotConfigured)
	}
	c, err := a.cfg.Tokens.Verify(token)
	if err != nil || !api.ValidID(c.Event) || !api.ValidID(c.User) {
		return entrytoken.Claims{}, invalid([]api.FieldError{{
			Field: "token", Problem: "is not an entry token of this installation",
		}})
	}
	return c, nil
}

func (a *Admin) redisTime(ctx context.Context, event string) (now time.Time, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		s, err := a.cfg.Rooms.Snapshot(ctx, a.cfg.Space.OfEvent(event))
		now = s.At
		return err
	})
	if err != nil {
		return now, apiError("read the time of", event, err)
	}
	return now, nil
}
