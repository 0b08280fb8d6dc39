package gateway

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// backend implements httpapi.Backend, by which the HTTP API and the console read and change data.
// It uses the store of groups and the guards.
type backend struct {
	*groups.Store
	guards *guard.Client
}

func (b backend) Guards(ctx context.Context, q guard.Query) (api.GuardList, error) {
	l, err := b.guards.List(ctx, q)
	return l, guardError(err)
}

func (b backend) Guard(ctx context.Context, name string) (api.Guard, error) {
	v, err := b.guards.Inspect(ctx, name)
	return v, guardError(err)
}

func (b backend) ControlGuard(ctx context.Context, name, member string, do guard.Action) error {
	return guardError(b.guards.Control(ctx, name, member, do))
}

// guardError wraps an error of package guard in the error of package api that decides the HTTP
// status.
func guardError(err error) error {
	switch {
	case errors.Is(err, guard.ErrUnknownGuard), errors.Is(err, guard.ErrUnknownMember):
		return &api.NotFoundError{Text: err.Error()}
	case errors.Is(err, guard.ErrNoBreaker):
		return fmt.Errorf("%w: %w", err, api.ErrConflict)
	case errors.Is(err, guard.ErrInvalid):
		return fmt.Errorf("%w: %w", err, api.ErrInvalid)
	case errors.Is(err, guard.ErrUnavailable):
		return fmt.Errorf("%w: %w", err, api.ErrUnavailable)
	}
	return err
}

func (b backend) Submit(ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions) (api.Accepted, error) {
	key, unique := clientKey(ctx, g, o)
	ctx, request := backpressure.WithRequest(ctx, key, unique)
	defer request.End()
	return b.Store.Submit(ctx, g, groups.Origin{
		IdempotencyKey: o.IdempotencyKey,
		GeneratedID:    o.GeneratedID,
		TraceParent:    o.TraceParent,
		At:             time.Now(),
	})
}

// clientKey returns the key under which the admission controller recognizes a submission when the
// client sends it again. It is the client's idempotency key or group id. If the client gave
// neither, it is made of a few fields that a repetition has in common with the first request; then
// unique is false, because submissions of other clients of the tenant may have the same key.
// Clients of different tenants never have the same key.
func clientKey(
	ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions,
) (key string, unique bool) {
	who, _ := auth.From(ctx)
	switch {
	case o.IdempotencyKey != "":
		return who.Tenant + " key " + o.IdempotencyKey, true
	case !o.GeneratedID:
		return who.Tenant + " group " + g.ID, true
	}
	return strings.Join([]string{who.Tenant, "new", g.Tenant, g.Type, g.Name, strconv.Itoa(len(g.Jobs))}, " "), false
}

func (b backend) Append(ctx context.Context, group string, jobs []messages.Job, o httpapi.AppendOptions) error {
	base, number, _ := strings.Cut(o.RequestID, ".")
	part, _ := strconv.ParseInt(number, 10, 64)
	ctx, request := backpressure.WithPiece(ctx, "append "+group, base, part)
	defer request.End()
	return b.Store.Append(ctx, group, jobs, o.RequestID, groups.Origin{TraceParent: o.TraceParent, At: time.Now()})
}

func (b backend) Jobs(ctx context.Context, group string, q httpapi.JobQuery) (api.JobList, error) {
	return b.Store.Jobs(ctx, group, groups.JobQuery(q))
}

func (b backend) DeadLetters(ctx context.Context, q httpapi.DeadLetterQuery) (api.DeadLetterList, error) {
	return b.Store.DeadLetters(ctx, groups.DeadLetterQuery(q))
}

func (b backend) Groups(ctx context.Context, q httpapi.ListQuery) (api.GroupList, error) {
	return b.Store.Groups(ctx, groups.ListQuery(q))
}

func (b backend) Failures(
	ctx context.Context, group string, q httpapi.FailureQuery, yield func(api.Failure) error,
) (next string, err error) {
	return b.Store.Failures(ctx, group, groups.FailureQuery(q), yield)
}
