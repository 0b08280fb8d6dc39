// Package ledger owns the layout of jobs, groups, tenants and limits in Redis. Each transition is
// one Lua script in package lua and one typed function here. A script runs as one step: it reads,
// decides by Redis's clock, and writes.
//
// After an error a caller does not know whether the script ran, so it may repeat any call with the
// same arguments. The doc comment of each function says under "Twice" what the second call does.
// Errors that are not listed are those of Redis and of the network.
package ledger

import (
	"context"
	"fmt"
	"path"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// script loads a transition. In front of it stand the part base and the named parts. Name a part
// behind the parts that it needs.
func script(file string, parts ...string) *call.Script {
	files := []string{"parts/base"}
	for _, part := range parts {
		files = append(files, "parts/"+part)
	}
	return call.NewScript(path.Base(file), lua.Source(append(files, file)...))
}

// Permit is a number of permits that were spent for a tenant.
type Permit struct {
	Tenant string
	N      int64
}

// Denial is a tenant that was refused a permit. The reason is "per_group" if the tenant has spent
// its own limit or share, and "global" if all tenants together have spent the limit.
type Denial struct{ Tenant, Reason string }

// run executes a script on a partition and returns its reply, which is always an array.
func run(ctx context.Context, c redis.Cmdable, s *call.Script, p keyspace.Partition, args ...any) (reply, error) {
	r, err := s.Run(ctx, c, p.Keys(), args)
	if err != nil {
		return nil, fmt.Errorf("partition %d: %w", p.Index(), err)
	}
	list, ok := r.([]any)
	if !ok {
		return nil, fmt.Errorf("partition %d: script %s: unexpected reply %T", p.Index(), s.Name(), r)
	}
	return list, nil
}

// reply is a script's reply. Its methods return zero for a value that is not there.
type reply []any

func (r reply) str(i int) string {
	if i >= len(r) {
		return ""
	}
	switch v := r[i].(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return ""
}

func (r reply) num(i int) int64 {
	if i >= len(r) {
		return 0
	}
	switch v := r[i].(type) {
	case int64:
		return v
	case string:
		return integer(v)
	}
	return 0
}

func (r reply) list(i int) reply {
	if i >= len(r) {
		return nil
	}
	l, _ := r[i].([]any)
	return l
}

func (r reply) nums() []int64 {
	out := make([]int64, len(r))
	for i := range r {
		out[i] = r.num(i)
	}
	return out
}

func (r reply) permits() []Permit {
	out := make([]Permit, 0, len(r)/2)
	for i := 0; i+1 < len(r); i += 2 {
		out = append(out, Permit{Tenant: r.str(i), N: r.num(i + 1)})
	}
	return out
}

func (r reply) denials() []Denial {
	out := make([]Denial, 0, len(r)/2)
	for i := 0; i+1 < len(r); i += 2 {
		out = append(out, Denial{Tenant: r.str(i), Reason: r.str(i + 1)})
	}
	return out
}
