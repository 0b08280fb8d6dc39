package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Options are the options that all experiments have in common.
type Options struct {
	Role     []string // command that starts a role; see FleetOptions
	RedisURL string   // "": a private redis-server for each run
	Env      []string // NAME=value for the roles; wins over the experiment's own settings
	// Progress is called with the progress of each part of an experiment; it may be nil.
	Progress func(part string, done, total int64)
}

func (o Options) progress(part string, done, total int64) {
	if o.Progress != nil {
		o.Progress(part, done, total)
	}
}

// setup says how the fleet of an experiment differs from an installation with defaults.
type setup struct {
	partitions int // 0: 1
	env        map[string]string
	replicas   map[string]int
}

// experiment is one measured set-up: a fleet whose processes keep journals, and the groups that
// were submitted to it.
type experiment struct {
	fleet    *Fleet
	space    keyspace.Space
	name     string // prefix of the ids of groups
	journals string
	// keys with this prefix are deleted at the end; set on a Redis that is not private
	cleanupPrefix string
	overrides     map[string]string
	progress      func(part string, done, total int64)
	groups        []group // all submitted groups
}

// group is a group of NOOP jobs to be submitted.
type group struct {
	id, tenant, priority string
	jobs                 int
	payload              func(i int) json.RawMessage // of the i-th job; nil: {}
}

// startExperiment starts a fleet with the settings of s and o; those of o win. On a Redis that is
// not private, its keys get a prefix of their own.
func startExperiment(ctx context.Context, o Options, s setup) (_ *experiment, err error) {
	x := &experiment{name: "b" + strconv.FormatInt(time.Now().UnixNano(), 36), progress: o.progress}
	prefix := "bulk-action:"
	env := maps.Clone(s.env)
	if env == nil {
		env = map[string]string{}
	}
	if o.RedisURL != "" { // other data may be there
		x.cleanupPrefix = "bulk-action-bench-" + x.name + ":"
		prefix, env["BULKACTION_KEY_PREFIX"] = x.cleanupPrefix, x.cleanupPrefix
	}
	partitions := max(1, s.partitions)
	if partitions > 1 {
		env["BULKACTION_PARTITIONS"] = strconv.Itoa(partitions)
	}
	if x.space, err = keyspace.New(prefix, partitions); err != nil {
		return nil, err
	}
	if x.journals, err = os.MkdirTemp("", "bulkaction-journals-"); err != nil {
		return nil, fmt.Errorf("make a folder for journals: %w", err)
	}
	options := FleetOptions{Role: o.Role, RedisURL: o.RedisURL, Replicas: s.replicas, Journal: x.journals}
	for name, value := range env {
		options.Env = append(options.Env, name+"="+value)
	}
	options.Env = append(options.Env, o.Env...)
	x.overrides = options.Overrides()
	if x.fleet, err = StartFleet(ctx, options); err != nil {
		return nil, errors.Join(err, os.RemoveAll(x.journals))
	}
	return x, nil
}

// close stops the fleet, and the private Redis with it. It deletes the journals and, on a Redis
// that is not private, the keys.
func (x *experiment) close() {
	_ = x.fleet.Stop() // the figures are computed, or an error was returned
	if x.cleanupPrefix != "" {
		_ = x.fleet.removeKeys(context.Background(), x.cleanupPrefix)
	}
	_ = x.fleet.Close()
	_ = os.RemoveAll(x.journals)
}

// perMessage is the largest number of jobs in one message.
const perMessage = 500

// submit publishes groups and adds them to x.groups, whose end finish awaits. A small group is one
// message; the jobs of large groups are published in several messages, in turn among the groups.
// It does not wait until ingest has read the messages.
func (x *experiment) submit(ctx context.Context, groups ...group) error {
	x.groups = append(x.groups, groups...)
	pipe := x.fleet.Conn.Cmd.Pipeline()
	add := func(typ string, data any) error {
		if err := publish(ctx, pipe, x.space, typ, data); err != nil {
			return err
		}
		if pipe.Len() < 20 {
			return nil
		}
		_, err := pipe.Exec(ctx)
		return err
	}
	rounds := 0
	for _, g := range groups {
		data := map[string]any{"id": g.id, "tenant": g.tenant, "type": "NOOP", "total": g.jobs}
		if g.priority != "" {
			data["priority"] = g.priority
		}
		if g.jobs <= perMessage {
			data["jobs"] = g.jobsOfMessage(0)
		} else {
			rounds = max(rounds, (g.jobs+perMessage-1)/perMessage)
		}
		if err := add("group.submit", data); err != nil {
			return fmt.Errorf("submit group %s: %w", g.id, err)
		}
	}
	for round := range rounds {
		for _, g := range groups {
			if g.jobs <= perMessage || round*perMessage >= g.jobs {
				continue
			}
			if err := add(
				"jobs.append", map[string]any{"group": g.id, "jobs": g.jobsOfMessage(round * perMessage)},
			); err != nil {
				return fmt.Errorf("append to group %s: %w", g.id, err)
			}
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("submit groups: %w", err)
	}
	return nil
}

// jobsOfMessage returns the jobs of one message, beginning with ordinal from.
func (g *group) jobsOfMessage(from int) []jobBody {
	jobs := make([]jobBody, min(perMessage, g.jobs-from))
	for i := range jobs {
		jobs[i].Payload = json.RawMessage("{}")
		if g.payload != nil {
			jobs[i].Payload = g.payload(from + i)
		}
	}
	return jobs
}

// sleeping returns a payload function of NOOP jobs that each run for ms milliseconds.
func sleeping(ms int) func(int) json.RawMessage {
	payload := json.RawMessage(fmt.Sprintf(`{"sleep_ms":%d}`, ms))
	return func(int) json.RawMessage { return payload }
}

// groupState is how far a group is.
type groupState struct {
	id, tenant string
	ledger.Progress
}

// seconds returns the time from the group's acceptance to COMPLETED.
func (g groupState) seconds() float64 { return g.Completed.Sub(g.Created).Seconds() }

// readProgress reads how far groups are, in one round trip.
func readProgress(ctx context.Context, f *Fleet, space keyspace.Space, groups []group) ([]ledger.Progress, error) {
	refs := make([]ledger.GroupRef, len(groups))
	for i, g := range groups {
		refs[i] = ledger.GroupRef{Partition: space.OfTenant(g.tenant), ID: g.id}
	}
	return ledger.ReadProgress(ctx, f.Conn.Cmd, refs)
}

// readGroups reads the current states of groups. The progress of a
// group that does not exist is zero.
func (x *experiment) readGroups(ctx context.Context, groups []group) ([]groupState, error) {
	now, err := readProgress(ctx, x.fleet, x.space, groups)
	if err != nil {
		return nil, err
	}
	out := make([]groupState, len(groups))
	for i, g := range groups {
		out[i] = groupState{id: g.id, tenant: g.tenant, Progress: now[i]}
	}
	return out, nil
}

// pollInterval is the time between two reads of groups. It does not limit the accuracy of figures:
// those are computed from timestamps in the groups.
const pollInterval = 20 * time.Millisecond

// stallTimeout is the time after which a run is given up that makes no progress, or whose last
// events or messages do not come.
const stallTimeout = 2 * time.Minute

// await waits until groups are COMPLETED with all of their jobs done, and returns their states in
// the order of groups. part names the wait in the progress. It is an error if a group ends in
// another way, a process has ended, or no job becomes done for stallTimeout.
func (x *experiment) await(ctx context.Context, part string, groups []group) ([]groupState, error) {
	open, all := slices.Clone(groups), map[string]groupState{}
	var total, last int64
	for _, g := range groups {
		total += int64(g.jobs)
	}
	movedAt := time.Now()
	for n := 1; len(open) > 0; n++ {
		now, err := x.readGroups(ctx, open)
		if err != nil {
			return nil, err
		}
		left := open[:0]
		for i, g := range now {
			all[g.id] = g
			switch {
			case g.Status == api.StatusCompleted && g.Counts.Done != int64(open[i].jobs):
				return nil, fmt.Errorf("await group %s: completed with %d jobs done of %d",
					g.id, g.Counts.Done, open[i].jobs)
			case g.Status == api.StatusFailed || g.Status == api.StatusCancelled:
				return nil, fmt.Errorf("await group %s: it is %s with %d failed jobs", g.id, g.Status, g.Counts.Failed)
			case g.Status != api.StatusCompleted:
				left = append(left, open[i])
			}
		}
		open = left
		var done int64
		for _, g := range all {
			done += g.Counts.Done
		}
		x.progress(part, done, total)
		if done != last {
			last, movedAt = done, time.Now()
		}
		if time.Since(movedAt) > stallTimeout {
			return nil, fmt.Errorf("await %d groups, %s among them: %d of %d jobs done, no progress for %s",
				len(open), open[0].id, done, total, stallTimeout)
		}
		if n%50 == 0 {
			if err := x.fleet.Check(); err != nil {
				return nil, err
			}
		}
		if len(open) > 0 {
			if err := redisx.Sleep(ctx, pollInterval); err != nil {
				return nil, err
			}
		}
	}
	out := make([]groupState, len(groups))
	for i, g := range groups {
		out[i] = all[g.id]
	}
	return out, nil
}

// finish waits until all submitted groups are COMPLETED, runs a full audit, stops the processes and
// reads their journals. It returns the groups in the order in which they were submitted. It is an
// error if the audit finds a violation or if no start was logged.
func (x *experiment) finish(ctx context.Context, part string) ([]groupState, journal.Log, error) {
	groups, err := x.await(ctx, part, x.groups)
	if err != nil {
		return nil, journal.Log{}, err
	}
	report, err := audit.Run(ctx, x.fleet.Conn, x.space, audit.Options{})
	if err != nil {
		return nil, journal.Log{}, err
	}
	if !report.OK {
		v := report.Violations[0]
		return nil, journal.Log{}, fmt.Errorf("audit after the run: %d violations, first law %s, group %q: %s",
			len(report.Violations), v.Law, v.Group, v.Detail)
	}
	if err := x.fleet.Stop(); err != nil {
		return nil, journal.Log{}, err
	}
	log, err := journal.Read(x.journals)
	if err != nil {
		return nil, journal.Log{}, err
	}
	if len(log.Starts) == 0 {
		return nil, journal.Log{}, errNoStarts
	}
	return groups, log, nil
}

var errNoStarts = errors.New("the processes logged no starts: they are of another version than this program")

// errNoPermits is returned if no process logged a permit, so that no figure can be computed.
var errNoPermits = errors.New("the processes logged no permits: they are of another version than this program")

// makespan returns the seconds from the acceptance of the first group to the end of the last job.
func makespan(groups []groupState) float64 {
	first := slices.MinFunc(groups, func(a, b groupState) int { return a.Created.Compare(b.Created) })
	last := slices.MaxFunc(groups, func(a, b groupState) int { return a.JobsEnded.Compare(b.JobsEnded) })
	return last.JobsEnded.Sub(first.Created).Seconds()
}

// limitRule returns the global limit of this experiment's fleet, for rps permits a second.
func (x *experiment) limitRule(rps int) (limitRule, error) {
	window, err := time.ParseDuration(cmp.Or(x.overrides["BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW"], "1s"))
	if err != nil {
		return limitRule{}, fmt.Errorf("read the window: %w", err)
	}
	return newLimitRule(cmp.Or(x.overrides["BULKACTION_BACKPRESSURE_LIMITER"], "fixed"), rps, window), nil
}

// redisClock returns the time of Redis's clock in µs.
func (x *experiment) redisClock(ctx context.Context) (int64, error) {
	t, err := x.fleet.Conn.Cmd.Time(ctx).Result()
	if err != nil {
		return 0, fmt.Errorf("ask for Redis's time: %w", err)
	}
	return t.UnixMicro(), nil
}
