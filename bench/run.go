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
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/journal"
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
	// cleanupPrefix is set on a Redis that is not private: close deletes all keys with this prefix.
	cleanupPrefix string
	groups        []group // groups of submit

	// set by experiment
	ended []groupState // of groups, in this order
	log   journal.Log
}

// group is a group of jobs to be submitted. They are NOOP jobs, unless fields has another type.
type group struct {
	id, tenant string
	jobs       int
	// job returns the JSON of the i-th job that one call of create or fill publishes; nil: all jobs
	// have an empty payload.
	job    func(i int) []byte
	fields map[string]any // more fields of the group, such as priority
	fails  int            // jobs that fail for good
}

const (
	// noGlobalLimit is the setting that switches the global limit off, so that only the machine
	// limits the speed.
	noGlobalLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"
	warmJobs      = 2000
)

func globalLimit(rps int) string { return "BULKACTION_BACKPRESSURE_GLOBAL_RPS=" + strconv.Itoa(rps) }

// start starts a fleet with the environment variables env and those of o; the latter win. On a
// Redis that is not private, its keys get a prefix of their own. It does not wait until the
// processes are ready. It resets this process's peak of memory, so that peaks are those of this
// run.
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

// close stops the processes, and the private Redis if there is one. It deletes the journals and, on
// a Redis that is not private, the keys of the run.
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

// perMessage is the largest number of jobs that one message to the ingest stream gets, unless an
// experiment says otherwise.
const perMessage = 500

// pipeMessages and pipeBytes bound a pipeline: it is sent as soon as it has this number of messages
// or bytes.
const (
	pipeMessages = 500
	pipeBytes    = 2 << 20
)

// publisher publishes groups and their jobs to the ingest stream.
type publisher struct {
	cmd    redis.UniversalClient
	ingest string // name of the stream
}

// pipeline collects messages to the ingest stream and sends many of them in one round trip.
type pipeline struct {
	redis.Pipeliner
	stream string
	bytes  int
}

func (p publisher) pipeline() *pipeline {
	return &pipeline{Pipeliner: p.cmd.Pipeline(), stream: p.ingest}
}

// add adds a message to the pipeline, and sends the pipeline if it is full. The caller may not
// change data until it is sent.
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

// submission returns the JSON that submits the group, for a group.submit message or an HTTP
// request. fields are added to it.
func (g group) submission(fields map[string]any) ([]byte, error) {
	data := map[string]any{"id": g.id, "tenant": g.tenant, "type": "NOOP"}
	maps.Copy(data, g.fields)
	maps.Copy(data, fields)
	return json.Marshal(data)
}

// complete returns the JSON that submits g with all of its jobs. from is the index of its first job
// in the load.
func (g group) complete(from int) ([]byte, error) {
	return g.submission(map[string]any{"seal": true, "jobs": json.RawMessage(g.appendJobs(nil, from, g.jobs))})
}

// appendJobs appends the JSON array of n jobs to b. from is the index of the first one in the load.
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

// submit publishes groups to the ingest stream. [Options.experiment] waits for their end later. A
// small group is one message. A large one is published without jobs; messages with its jobs follow,
// taking turns with other large groups. submit does not wait until ingest has read the messages.
func (r *run) submit(ctx context.Context, groups ...group) error {
	r.groups = append(r.groups, groups...)
	if err := r.create(ctx, groups, perMessage); err != nil {
		return err
	}
	large := slices.DeleteFunc(slices.Clone(groups), func(g group) bool { return g.jobs <= perMessage })
	return r.fill(ctx, large, perMessage)
}

// create publishes groups to the ingest stream. A group of at most `inline` jobs is published with
// its jobs, a larger one without. Ingest seals a group as soon as it has g.jobs jobs.
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

// fill publishes the jobs of groups that create has published without jobs: one message of up to
// batch jobs for each group in turn. It reuses its buffers, so that the load generator uses little
// CPU on the machine that it measures.
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

// appendMessage appends to b the JSON of a message that adds n jobs to the group. from is the index
// of the first one in the load.
func (g group) appendMessage(b []byte, from, n int) []byte {
	b = append(append(append(b, `{"group":"`...), g.id...), `","jobs":`...)
	return append(g.appendJobs(b, from, n), '}')
}

// encodeJob returns the JSON of a job whose payload has the given fields, and is padded to
// `payload` bytes unless the fields already need more.
func encodeJob(payload int, fields string) []byte {
	empty := `{` + fields + `"pad":""}`
	if fields == "" && payload < len(empty) {
		return []byte(`{"payload":{}}`)
	}
	return fmt.Appendf(nil, `{"payload":{%s"pad":"%s"}}`, fields, strings.Repeat("x", max(0, payload-len(empty))))
}

// sleeping returns a function for group.job: each job runs for ms milliseconds.
func sleeping(ms int) func(int) []byte {
	job := fmt.Appendf(nil, `{"payload":{"sleep_ms":%d}}`, ms)
	return func(int) []byte { return job }
}

// divideJobs returns groups, not submitted yet, among which the jobs are divided evenly. Each
// tenant has `each` groups; tenants take turns in the list.
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

// delayedGroup is a group with the time, from the start of a load, at which it is submitted.
type delayedGroup struct {
	after time.Duration
	group
}

// submitWhenDue submits each group when its time, counted from the call, has come. It returns after
// it has submitted the last one. groups are ordered by time.
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

// experiment measures one load. It starts a fleet whose processes keep journals, with the
// environment variables env, and calls load, which submits groups. It waits until all groups are
// COMPLETED, runs a full audit, stops the processes and reads the journals. It returns the ended
// run. part names the progress. It is an error if the audit finds a violation or no start was
// logged.
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

// errNoPermits means that no process logged a permit to its journal, so that no figure can be
// computed.
var errNoPermits = errors.New("the processes logged no permits: they are of another version than this program")

// setTenant changes the settings of a tenant.
func (r *run) setTenant(ctx context.Context, tenant string, settings ledger.TenantSettings) error {
	if err := ledger.SetTenant(ctx, r.conn.Cmd, r.space.OfTenant(tenant), tenant, settings); err != nil {
		return fmt.Errorf("set tenant %s: %w", tenant, err)
	}
	return nil
}

// limitRule returns the global limit of this run's fleet, with the fleet's limiter and window, for
// rps permits a second.
func (r *run) limitRule(rps int) (limitRule, error) {
	window, err := time.ParseDuration(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW"], "1s"))
	if err != nil {
		return limitRule{}, fmt.Errorf("read the window: %w", err)
	}
	return newLimitRule(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_LIMITER"], "fixed"), rps, window), nil
}

// workerSlots returns the number of slots that one worker process of this run has.
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
