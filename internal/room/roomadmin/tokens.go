package roomadmin

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// VerifyToken returns whether the bearer of a token may be inside now. A token with a wrong
// signature is an error, a bad field. A token with a good signature is not valid if it has expired,
// or if its user left, completed or was removed.
func (a *Admin) VerifyToken(ctx context.Context, token string) (s api.EntryTokenState, err error) {
	c, err := a.open(token)
	if err != nil {
		return s, err
	}
	var claim waitingroom.Claim
	var now time.Time
	err = retry(ctx, func(ctx context.Context) (err error) {
		claim, now, err = a.cfg.Rooms.Verify(ctx, c.Event, c.User, c.Fence)
		return err
	})
	if err != nil {
		return s, apiError("verify a token of", c.Event, err)
	}
	if claim.Code != waitingroom.InProgress {
		return s, nil
	}
	expires := c.ExpiresAt
	if claim.Expires.Unix() > expires.Unix() && !now.Before(expires) {
		// The token was renewed: the record in Redis has the expiry of the newer token. This older
		// one is valid until its own expiry.
		return s, nil
	}
	return api.EntryTokenState{
		Valid: true, Event: c.Event, User: c.User, Fence: c.Fence, ExpiresAt: &expires,
	}, nil
}

// RenewToken returns a new token of the same user with a later expiry, but none after max_session:
// near its end the expiry stays the same. It returns an api.ErrConflict if no token of this entry
// is valid any more, or if the session has reached max_session. So an older token that has expired
// can be renewed while a newer one is valid.
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

// CompleteToken ends the entry of the token's user and gives the slot back. With sold, it also
// takes a seat from the stock, if there is one. It returns false if the entry had ended before. A
// token whose latest renewal expired less than the event's leeway ago still counts.
//
// It does not repeat the call if Redis's reply is lost: the repeated call would return false, and a
// caller that sells nothing on false would do the wrong thing. The caller gets the error instead.
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
		return entrytoken.Claims{}, invalid(api.FieldError{Field: "token", Problem: "is not an entry token of this installation"})
	}
	return c, nil
}
