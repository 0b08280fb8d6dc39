package roles

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
)

// rightsInterval is how often a process checks the rights of its Redis user while it runs.
const rightsInterval = 30 * time.Second

// rights checks that the Redis user of a process has all rights that its role needs. If one were
// missing, Redis would stop a script half way.
type rights struct {
	conn *redisx.Conn
	user acl.User
	log  *slog.Logger

	mu      sync.Mutex
	missing error // what the last check that Redis answered has found; nil: nothing
}

// newRights returns the check of the rights that the role of p needs; the caller sets the
// connection. A console needs the rights of ingest. A process whose role has no Redis user of its
// own, such as dev, needs the rights of all roles.
func newRights(p *app.Process) (*rights, error) {
	name := p.Role
	if name == "console" {
		name = "ingest"
	}
	if !slices.Contains(acl.Roles(), name) {
		name = acl.All
	}
	user, err := acl.Of(name, p.Config.Redis.KeyPrefix)
	return &rights{user: user, log: p.Tel.Log}, err
}

func (r *rights) check(ctx context.Context) error { return acl.Check(ctx, r.conn, r.user) }

// step checks the rights once and stores the result. It logs when rights have got lost, and when
// all are there again. If the check fails for another reason, such as no answer from Redis, the
// last result stays.
func (r *rights) step(ctx context.Context) {
	err := r.check(ctx)
	var missing *acl.Missing
	if err != nil && !errors.As(err, &missing) {
		r.log.Debug("checking the rights of the redis user failed", "error", err)
		return
	}
	r.mu.Lock()
	before := r.missing
	r.missing = err
	r.mu.Unlock()
	switch {
	case err != nil && before == nil:
		r.log.Error("the redis user has lost rights", "error", err)
	case err == nil && before != nil:
		r.log.Info("the redis user has all rights again")
	}
}

// ready is the process's check of readiness: it returns the missing rights that the last step has
// found, without asking Redis.
func (r *rights) ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.missing
}

// start checks the rights every rightsInterval, in a goroutine, until stop is called. The caller
// must call stop.
func (r *rights) start() (stop func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var checking sync.WaitGroup
	checking.Go(func() {
		for redisx.Sleep(ctx, rightsInterval) == nil {
			r.step(ctx)
		}
	})
	return func(context.Context) error {
		cancel()
		checking.Wait()
		return nil
	}
}
