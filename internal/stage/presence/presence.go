// Package presence tells which processes are alive, and how many jobs the workers can take. Each
// process publishes its status in a heartbeat; a worker process adds its capacity. The package
// hides how heartbeats are stored in Redis, and when a process counts as gone.
package presence

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// Interval is the time between two heartbeats of a process; a broker's are a second apart. A
// process without a heartbeat for TTL counts as gone.
const (
	Interval = 500 * time.Millisecond
	TTL      = 5 * time.Second
)

// WorkerReport is the heartbeat of a worker process: its status, and its capacity by job type.
type WorkerReport struct {
	api.WorkerStatus
	// StartedPerSecond is the start rate by type: jobs a second, a mean over the last 5 s or less.
	// RunMS is the moving average of run times by type, ms.
	StartedPerSecond map[string]float64 `json:"started_per_second"`
	RunMS            map[string]float64 `json:"run_ms"`
	// PermissionsPerSecond is, by gated type, how many permissions a second all processes together
	// can get for its jobs; a type without a bound is not listed.
	PermissionsPerSecond map[string]float64 `json:"permissions_per_second,omitempty"`
	// NoPermissionUntil is, by gated type, the time until which the worker starts none of its jobs,
	// because it can get no permission.
	NoPermissionUntil map[string]time.Time `json:"no_permission_until,omitempty"`
}

// PublishWorker stores the heartbeat of a worker process.
func PublishWorker(ctx context.Context, conn *redisx.Conn, space keyspace.Space, r WorkerReport) error {
	return publish(ctx, conn, space.Workers(), r.ID, r)
}

// PublishStage stores the heartbeat of a process of a role other than worker and broker.
func PublishStage(ctx context.Context, conn *redisx.Conn, space keyspace.Space, s api.StageStatus) error {
	return publish(ctx, conn, space.Stages(), s.ID, s)
}

// PublishBroker stores the heartbeat of a broker process under s.ID, which is the instance in its
// conns. known is false if Redis had no earlier heartbeat of it.
func PublishBroker(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, s api.StageStatus,
) (known bool, err error) {
	return put(ctx, conn, space.Brokers(), s.ID, s)
}

// Brokers returns the statuses of live brokers, ordered by id. It deletes old statuses, as read
// does.
func Brokers(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]api.StageStatus, error) {
	return read[api.StageStatus](ctx, conn, space.Brokers())
}

// Withdraw removes the heartbeat of a process of any role but broker when the process stops, also
// if ctx has ended. It tries for a second at most and returns no error: a heartbeat that is not
// removed is ignored after TTL.
func Withdraw(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Cmd.HDel(ctx, space.Workers(), id).Err()
	_ = conn.Cmd.HDel(ctx, space.Stages(), id).Err()
}

func publish(ctx context.Context, conn *redisx.Conn, key, id string, status any) error {
	_, err := put(ctx, conn, key, id, status)
	return err
}

// put stores a heartbeat as a field of the hash at key, named by the process's id. known says
// whether the field existed.
func put(ctx context.Context, conn *redisx.Conn, key, id string, status any) (known bool, err error) {
	b, err := json.Marshal(status)
	if err != nil {
		return false, fmt.Errorf("encode status: %w", err)
	}
	r := heartbeat.Read(ctx, conn.Cmd, []string{key}, []any{id, b})
	known = r.Number() == 0
	if err := r.Err(); err != nil {
		return false, fmt.Errorf("publish status: %w", err)
	}
	return known, nil
}

// heartbeat is the script that stores a process's status with the time of Redis, because the clocks
// of hosts differ. heartbeats is the script that returns all statuses of a hash and the time of
// Redis.
var (
	heartbeat  = call.NewScript("heartbeat", lua.Source("processes/heartbeat"))
	heartbeats = call.NewScript("heartbeats", lua.Source("processes/heartbeats"))
)

// Workers returns the reports of live workers, ordered by id. It deletes old reports, as read does.
func Workers(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]WorkerReport, error) {
	return read[WorkerReport](ctx, conn, space.Workers())
}

// Stages returns the statuses of live processes of all roles but worker and broker, ordered by id.
// It deletes old statuses, as read does.
func Stages(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]api.StageStatus, error) {
	return read[api.StageStatus](ctx, conn, space.Stages())
}

// read returns the statuses of live processes in the hash at key, ordered by id. It deletes
// statuses that are older than 20 times TTL or can't be read.
func read[T any](ctx context.Context, conn *redisx.Conn, key string) ([]T, error) {
	r := heartbeats.Read(ctx, conn.Cmd, []string{key}, nil)
	all := map[string]string{}
	for r.Len() > 1 {
		id := r.Text()
		all[id] = r.Text()
	}
	now := r.Time()
	if err := r.Err(); err != nil {
		return nil, fmt.Errorf("read status: %w", err)
	}
	var live []T
	for _, id := range slices.Sorted(maps.Keys(all)) {
		var s T
		shown, text, _ := strings.Cut(all[id], " ")
		ms, _ := strconv.ParseInt(shown, 10, 64)
		err := json.Unmarshal([]byte(text), &s)
		switch age := now.Sub(time.UnixMilli(ms)); {
		case err != nil || age > 20*TTL:
			_ = conn.Cmd.HDel(ctx, key, id).Err() // unreadable, or left by a process that was killed
		case age <= TTL:
			live = append(live, s)
		}
	}
	return live, nil
}
