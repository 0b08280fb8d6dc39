package push

import (
	"context"
	"errors"
	"sync"
	"time"
)

// tokens holds the token with which an account authenticates, and replaces it when it is too old.
// One caller makes the new token; callers that need it meanwhile wait for it.
type tokens struct {
	// create returns a new token and the time from which on it must not be used.
	create func(ctx context.Context) (token string, until time.Time, err error)
	now    func() time.Time
	// pause is the shortest time between two tokens that are made because the service has refused
	// a valid one. It keeps an account that is refused for another reason from asking for a token
	// with each push.
	pause time.Duration

	mu       sync.Mutex
	token    string
	until    time.Time
	replaced time.Time // when a refused token was replaced
	creation *creation // nil while no caller makes a token
}

// creation is the making of one token, for which several callers may wait.
type creation struct {
	done  chan struct{}
	token string
	err   error
}

// get returns a valid token. refused is the token that the service has just refused, or "". get may
// return that token again: then it is too early for another one.
func (t *tokens) get(ctx context.Context, refused string) (string, error) {
	for {
		t.mu.Lock()
		now := t.now()
		valid := t.token != "" && now.Before(t.until)
		if valid && (t.token != refused || now.Sub(t.replaced) < t.pause) {
			defer t.mu.Unlock()
			return t.token, nil
		}
		if t.creation == nil {
			if valid {
				t.replaced = now
			}
			c := &creation{done: make(chan struct{})}
			t.creation = c
			t.mu.Unlock()
			return t.run(ctx, c)
		}
		c := t.creation
		t.mu.Unlock()
		select {
		case <-c.done:
		case <-ctx.Done():
			return "", ctx.Err()
		}
		if !errors.Is(c.err, context.Canceled) && !errors.Is(c.err, context.DeadlineExceeded) {
			return c.token, c.err
		}
		// The caller that made the token gave up, because its job has ended. Try again.
	}
}

// run makes a token for all callers that wait for c.
func (t *tokens) run(ctx context.Context, c *creation) (string, error) {
	c.err = errors.New("the token was not made")
	var until time.Time
	defer func() {
		t.mu.Lock()
		if c.err == nil {
			t.token, t.until = c.token, until
		}
		t.creation = nil
		t.mu.Unlock()
		close(c.done)
	}()
	c.token, until, c.err = t.create(ctx)
	return c.token, c.err
}
