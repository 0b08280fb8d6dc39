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
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// run is one measured run: a fleet, and the groups that were submitted to it.
type run struct {
	*fleet
	publisher
	options   Options
	space     keyspace.Space
	name      string // prefix of the ids of groups
	overrides map[string]string
	journals  string // folder of the processes' journals; "": they log nothing
	// keys with this prefix are deleted at the end; set on a Redis that is not private
	cleanupPrefix string
	groups        []group // groups of submit

	// set by experiment
	ended []groupState // of groups, in this order
	log   journal.Log
}

// group is a group of NOOP jobs to be submitted.
type group struct {
	id, tenant string
	jobs       int
	// returns the i-th job that one call of submit or fill publishes, encoded; nil: without payload
	job    func(i int) []byte
	fields map[string]any // more fields of the group, such as priority
	fails  int            // jobs that fail for good
}

const (
	// noGlobalLimit switches the global limit off, so that the machine limits the speed.
	noGlobalLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"
	warmJobs      = 2000
)

func globalLimit(rps int) string { return "BULKACTION_BACKPRESSURE_GLOBAL_RPS=" + strconv.Itoa(rps) }

// start starts a fleet with the settings env and those of o, which win. On a Redis that is not
// private, its keys get a prefix of their own. It does not wait until the processes are ready. It
// resets this process's peak memory.
func start(ctx context.Context, o Options, journals bool, env ...string) (_ *run, err error) {
	r := &run{options: o, name: "b" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	prefix, partitions := "bulk-action:", max(1, o.Partitions)
	if o.RedisURL != "" { // other data may be there
		r.cleanupPrefix = "bulk-action-bench-" + r.name + ":"
		prefix = r.cleanupPrefix
		env = append(env, "BULKACTION_KEY_PREFIX="+prefix)
	}
	if partitions > 1 {
		env = append(env, "BULKACTION_PARTITIONS="+strconv.Itoa(partitions))
	}
	r.overrides = o.overrides(env...)
	if r.space, err = keyspace.New(prefix, partitions); err != nil {
		return nil, err
	}
	measure.ResetPeak()
	if r.fleet, err = startRedis(ctx, o, 20); err != nil {
		return nil, err
	}
	r.publisher = publisher{r.conn.Cmd, r.space.Ingest()}
	if journals {
		if r.journals, err = os.MkdirTemp("", "bulkaction-journals-"); err != nil {
			return nil, errors.Join(fmt.Errorf("make a folder for journals: %w", err), r.fleet.close())
		}
	}
	if err := r.startRoles(o, r.overrides, r.journals); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// close stops the fleet, and the private Redis with it. It deletes the journals and, on a Redis
// that is not private, the keys.
func (r *run) close() {
	_ = r.stop() // the figures are computed, or an error was returned
	if r.cleanupPrefix != "" {
		_ = r.removeKeys(context.Background(), r.cleanupPrefix)
	}
	_ = r.fleet.close()
	if r.journals != "" {
		_ = os.RemoveAll(r.journals)
	}
}

// perMessage is the largest number of jobs in one message, unless an experiment says otherwise.
const perMessage = 500

// A pipeline is sent when it has this number of messages or bytes.
const (
	pipeMessages = 500
	pipeBytes    = 2 << 20
)

// publisher publishes groups and their jobs to the ingest stream.
type publisher struct {
	cmd    redis.UniversalClient
	ingest string // name of the stream
}

// pipeline publishes messages to the ingest stream, many in one round trip.
type pipeline struct {
	redis.Pipeliner
	stream string
	bytes  int
}

func (p publisher) pipeline() *pipeline {
	return &pipeline{Pipeliner: p.cmd.Pipeline(), stream: p.ingest}
}

// add adds a message, and sends the pipeline if it is full. data must not change until then.
func (p *pipeline) add(ctx context.Context, typ string, data []byte) error {
	p.XAdd(ctx, &redis.XAddArgs{Stream: p.stream, Values: []any{"type", typ, "data", data}})
	if p.bytes += len(data); p.Len() < pipeMessages && p.bytes < pipeBytes {
		return nil
	}
	return p.flush(ctx)
}

func (p *pipeline) flush(ctx context.Context) error {
	if p.Len() == 0 {
		return nil
	}
	p.bytes = 0
	if _, err := p.Exec(ctx); err != nil {
		return fmt.Errorf("publish messages: %w", err)
	}
	return nil
}

// submission returns the body of a group.submit message or request that has these fields too.
func (g group) submission(fields map[string]any) ([]byte, error) {
	data := map[string]any{"id": g.id, "tenant": g.tenant, "type": "NOOP"}
	maps.Copy(data, g.fields)
	maps.Copy(data, fields)
	return json.Marshal(data)
}

// complete returns the submission of g with all of its jobs, of which from is the first.
func (g group) complete(from int) ([]byte, error) {
	return g.submission(map[string]any{"seal": true, "jobs": json.RawMessage(g.appendJobs(nil, from, g.jobs))})
}

// appendJobs appends the array of n jobs to b, of which from is the first.
func (g group) appendJobs(b []byte, from, n int) []byte {
	b = append(b, '[')
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		if g.job == nil {
			b = append(b, `{"payload":{}}`...)
		} else {
			b = append(b, g.job(from+i)...)
		}
	}
	return append(b, ']')
}

// submit publishes groups, whose end [Options.experiment] awaits. A small group is one message; the
// jobs of large groups are published in several messages, in turn among the groups. It does not
// wait until ingest has read the messages.
func (r *run) submit(ctx context.Context, groups ...group) error {
	r.groups = append(r.groups, groups...)
	if err := r.create(ctx, groups, perMessage); err != nil {
		return err
	}
	large := slices.DeleteFunc(slices.Clone(groups), func(g group) bool { return g.jobs <= perMessage })
	return r.fill(ctx, large, perMessage)
}

// create publishes groups. A group of at most `inline` jobs is published with its jobs, a larger
// one without. Each group is sealed when it has as many jobs as g.jobs says.
func (p publisher) create(ctx context.Context, groups []group, inline int) error {
	pipe, sent := p.pipeline(), 0
	for _, g := range groups {
		fields := map[string]any{"total": g.jobs}
		if g.jobs <= inline {
			fields["jobs"] = json.RawMessage(g.appendJobs(nil, sent, g.jobs))
			sent += g.jobs
		}
		data, err := g.submission(fields)
		if err != nil {
			return err
		}
		if err := pipe.add(ctx, "group.submit", data); err != nil {
			return err
		}
	}
	return pipe.flush(ctx)
}

// fill publishes the jobs of the groups, one message of up to batch jobs of each group in turn. It
// reuses its buffers, so that the load generator uses little CPU on the machine that it measures.
func (p publisher) fill(ctx context.Context, groups []group, batch int) error {
	pipe, sent := p.pipeline(), 0
	var buffers [pipeMessages][]byte // one for each message of the pipeline
	left := make([]int, len(groups))
	for i, g := range groups {
		left[i] = g.jobs
	}
	for pending := true; pending; {
		pending = false
		for i, g := range groups {
			n := min(left[i], batch)
			if n == 0 {
				continue
			}
			pending = true
			left[i] -= n
			at := pipe.Len()
			buffers[at] = g.appendMessage(buffers[at][:0], sent, n)
			sent += n
			if err := pipe.add(ctx, "jobs.append", buffers[at]); err != nil {
				return err
			}
		}
	}
	return pipe.flush(ctx)
}

// appendMessage appends the body of the message with n jobs of the group to b.
func (g group) appendMessage(b []byte, from, n int) []byte {
	b = append(append(append(b, `{"group":"`...), g.id...), `","jobs":`...)
	return append(g.appendJobs(b, from, n), '}')
}

// encodeJob returns a job whose payload has these fields and this number of bytes, or more if the
// fields need more.
func encodeJob(payload int, fields string) []byte {
	empty := `{` + fields + `"pad":""}`
	if fields == "" && payload < len(empty) {
		return []byte(`{"payload":{}}`)
	}
	return fmt.Appendf(nil, `{"payload":{%s"pad":"%s"}}`, fields, strings.Repeat("x", max(0, payload-len(empty))))
}

// sleeping returns the jobs of a group that each run for ms milliseconds.
func sleeping(ms int) func(int) []byte {
	job := fmt.Appendf(nil, `{"payload":{"sleep_ms":%d}}`, ms)
	return func(int) []byte { return job }
}

// divideJobs divides jobs evenly among groups. Each tenant has `each` groups; tenants alternate.
func divideJobs(name string, jobs, tenants, each int, job func(int) []byte) []group {
	groups := make([]group, tenants*each)
	for i := range groups {
		groups[i] = group{
			id: fmt.Sprintf("%s-%d", name, i), tenant: fmt.Sprintf("tenant-%d", i%tenants),
			jobs: jobs*(i+1)/len(groups) - jobs*i/len(groups), job: job,
		}
	}
	return groups
}

// delayedGroup is a group that is submitted some time after the start of a load.
type delayedGroup struct {
	after time.Duration
	group
}

// submitWhenDue submits each group at its time after the call, and returns after the last one.
// Groups are ordered by time.
func (r *run) submitWhenDue(ctx context.Context, groups []delayedGroup) error {
	began := time.Now()
	for _, g := range groups {
		if err := redisx.Sleep(ctx, g.after-time.Since(began)); err != nil {
			return err
		}
		if err := r.submit(ctx, g.group); err != nil {
			return err
		}
	}
	return nil
}

// experiment starts a fleet whose processes keep journals, with the settings env. It calls load,
// waits until all groups of submit are COMPLETED, runs a full audit, stops the processes and reads
// their journals. It returns the run, which has ended. part names the wait in the progress. It is
// an error if the audit finds a violation or if no start was logged.
func (o *Options) experiment(
	ctx context.Context, part string, load func(*run) error, env ...string,
) (_ *run, err error) {
	r, err := start(ctx, *o, true, env...)
	if err != nil {
		return nil, err
	}
	defer r.close()
	if err := load(r); err != nil {
		return nil, err
	}
	if r.ended, err = r.awaitDone(ctx, part, r.groups); err != nil {
		return nil, err
	}
	report, err := audit.Run(ctx, r.conn, r.space, audit.Options{})
	if err != nil {
		return nil, err
	}
	if !report.OK {
		v := report.Violations[0]
		return nil, fmt.Errorf("audit after the run: %d violations, first law %s, group %q: %s",
			len(report.Violations), v.Law, v.Group, v.Detail)
	}
	return r, r.readJournals()
}

// readJournals stops the processes and reads their journals.
func (r *run) readJournals() (err error) {
	if err = r.stop(); err != nil {
		return err
	}
	if r.log, err = journal.Read(r.journals); err == nil && len(r.log.Starts) == 0 {
		err = errNoStarts
	}
	return err
}

var errNoStarts = errors.New("the processes logged no starts: they are of another version than this program")

// errNoPermits is returned if no process logged a permit, so that no figure can be computed.
var errNoPermits = errors.New("the processes logged no permits: they are of another version than this program")

// setTenant changes the settings of a tenant.
func (r *run) setTenant(ctx context.Context, tenant string, settings ledger.TenantSettings) error {
	if err := ledger.SetTenant(ctx, r.conn.Cmd, r.space.OfTenant(tenant), tenant, settings); err != nil {
		return fmt.Errorf("set tenant %s: %w", tenant, err)
	}
	return nil
}

// limitRule returns the global limit of this run's fleet, for rps permits a second.
func (r *run) limitRule(rps int) (limitRule, error) {
	window, err := time.ParseDuration(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW"], "1s"))
	if err != nil {
		return limitRule{}, fmt.Errorf("read the window: %w", err)
	}
	return newLimitRule(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_LIMITER"], "fixed"), rps, window), nil
}

// workerSlots returns the number of slots of one worker process.
func (r *run) workerSlots() int {
	if n, err := strconv.Atoi(r.overrides["BULKACTION_WORKER_COUNT"]); err == nil && n > 0 {
		return n
	}
	return 10
}

// makespan returns the seconds from the acceptance of the first group to the end of the last job.
func makespan(groups []groupState) float64 {
	first := slices.MinFunc(groups, func(a, b groupState) int { return a.Created.Compare(b.Created) })
	last := slices.MaxFunc(groups, func(a, b groupState) int { return a.JobsEnded.Compare(b.JobsEnded) })
	return last.JobsEnded.Sub(first.Created).Seconds()
}

// sumThrottles returns the number of throttles of all groups.
func sumThrottles(groups []groupState) (n int64) {
	for _, g := range groups {
		n += g.Throttles
	}
	return n
}
