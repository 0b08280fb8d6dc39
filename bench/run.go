package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// run is one measured run: a fleet, and the groups that were submitted to it.
type run struct {
	*fleet
	options   options
	space     keyspace.Space
	name      string // prefix of the ids of groups
	overrides map[string]string
	journals  string // folder of the processes' journals; "": they log nothing
	apiURL    string // of startWithAPI
	api       *client.API
	// cleanupPrefix is set on a Redis that is not private: close deletes all keys with this prefix.
	cleanupPrefix string
	groups        []group // groups of submit

	// set by experiment
	ended []groupState // of groups, in this order
	log   journalLog
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
	// noGlobalLimit switches the global limit off, so that only the machine limits the speed.
	noGlobalLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"
	warmJobs      = 2000
)

func globalLimit(rps int) string { return "BULKACTION_BACKPRESSURE_GLOBAL_RPS=" + strconv.Itoa(rps) }

// privatePrefix returns a prefix of keys that nothing uses yet, for a Redis that may hold other data.
func privatePrefix() string {
	return "bulk-action-bench-b" + strconv.FormatInt(time.Now().UnixNano(), 36) + ":"
}

// start starts a fleet with the environment variables env and those of o; the latter win. On a
// Redis that is not private, its keys get a prefix of their own. It does not wait until the
// processes are ready. It resets this process's peak of memory, so that peaks are those of this
// run.
func start(ctx context.Context, o options, journals bool, env ...string) *run {
	r := &run{options: o, name: "b" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	prefix, partitions := "bulk-action:", max(1, o.partitions)
	if o.redisURL != "" {
		prefix = privatePrefix()
		r.cleanupPrefix = prefix
		env = append(env, "BULKACTION_KEY_PREFIX="+prefix)
	}
	if partitions > 1 {
		env = append(env, "BULKACTION_PARTITIONS="+strconv.Itoa(partitions))
	}
	r.overrides, r.space = o.overrides(env...), must(keyspace.New(prefix, partitions))
	_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) // where it fails, peaks include earlier runs
	r.fleet = startRedis(ctx, o)
	check(attempt("", func() {
		if journals {
			r.journals = must(os.MkdirTemp("", "bulkaction-journals-"))
		}
		r.startRoles(o, r.overrides, r.journals)
	}, r.close))
	return r
}

// startWithAPI is like start, and waits until the API answers.
func startWithAPI(ctx context.Context, o options, journals bool, api []client.Option, env ...string) *run {
	addr := childproc.FreeAddr()
	r := start(ctx, o, journals, append(env, "BULKACTION_API_ADDR="+addr)...)
	r.apiURL, r.api = "http://"+addr, client.NewAPI("http://"+addr, api...)
	check(attempt("", func() { check(r.awaitHTTP(ctx, r.apiURL+"/v1/stats")) }, r.close))
	return r
}

// close stops the processes, and the private Redis if there is one. It deletes the journals and, on
// a Redis that is not private, the keys of the run.
func (r *run) close() {
	_ = r.stop() // see fleet.close
	if r.cleanupPrefix != "" {
		_ = r.removeKeys(context.Background(), r.cleanupPrefix)
	}
	r.fleet.close()
	_ = os.RemoveAll(r.journals) // of "", nothing
}

// perMessage is the largest number of jobs that one message to the ingest stream gets, unless an
// experiment says otherwise.
const perMessage = 500

// A pipeline is sent as soon as it has this number of messages or bytes.
const (
	pipeMessages = 500
	pipeBytes    = 2 << 20
)

// pipeline collects messages to the ingest stream and sends many of them in one round trip.
type pipeline struct {
	redis.Pipeliner
	stream string
	bytes  int
}

func (r *run) pipeline() *pipeline {
	return &pipeline{Pipeliner: r.conn.Cmd.Pipeline(), stream: r.space.Ingest()}
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

// submit publishes groups to the ingest stream. [options.experiment] waits for their end later. A
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
func (r *run) create(ctx context.Context, groups []group, inline int) error {
	pipe, sent := r.pipeline(), 0
	for _, g := range groups {
		fields := map[string]any{"total": g.jobs}
		if g.jobs <= inline {
			fields["jobs"] = json.RawMessage(g.appendJobs(nil, sent, g.jobs))
			sent += g.jobs
		}
		data, err := g.submission(fields)
		if err == nil {
			err = pipe.add(ctx, "group.submit", data)
		}
		if err != nil {
			return err
		}
	}
	return pipe.flush(ctx)
}

// fill publishes the jobs of groups that create has published without jobs: one message of up to
// batch jobs for each group in turn. It reuses its buffers, so that the load generator uses little
// CPU on the machine that it measures.
func (r *run) fill(ctx context.Context, groups []group, batch int) error {
	pipe, sent := r.pipeline(), 0
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

// publishSingle publishes a group with all of its jobs in one message. from is the index of its
// first job in the load.
func (r *run) publishSingle(ctx context.Context, g group, from int) error {
	data, err := g.complete(from)
	if err != nil {
		return err
	}
	pipe := r.pipeline()
	return errors.Join(pipe.add(ctx, "group.submit", data), pipe.flush(ctx))
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

// failOnce are payload fields with which a NOOP job fails once and is retried.
const failOnce = `"fail":"retry","fail_times":1,`

// failingJobs returns a function for group.job. The given percentage of its jobs, spread evenly,
// fails once and is retried.
func failingJobs(payload int, percent float64) func(int) []byte {
	normal, failing := encodeJob(payload, ""), encodeJob(payload, failOnce)
	return func(i int) []byte {
		if int(float64(i+1)*percent/100) > int(float64(i)*percent/100) {
			return failing
		}
		return normal
	}
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

func byTime(a, b delayedGroup) int { return cmp.Compare(a.after, b.after) }

// submitWhenDue submits each group when its time, counted from the call, has come. groups are
// ordered by time.
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
// run. part names the progress. It fails if the audit finds a violation or no start was logged.
func (o *options) experiment(ctx context.Context, part string, load func(*run), env ...string) *run {
	r := start(ctx, *o, true, env...)
	defer r.close()
	load(r)
	r.finish(ctx, part)
	return r
}

// finish waits until all groups of submit are COMPLETED, runs a full audit, stops the processes and
// reads the journals; see experiment.
func (r *run) finish(ctx context.Context, part string) {
	r.end(ctx, part)
	r.readJournals()
}

// end waits until all groups of submit are COMPLETED, and runs a full audit.
func (r *run) end(ctx context.Context, part string) {
	r.ended = must(r.awaitDone(ctx, part, r.groups))
	report := must(audit.Run(ctx, r.conn, r.space, audit.Options{}))
	if !report.OK {
		v := report.Violations[0]
		failf("audit after the run: %d violations, first law %s, group %q: %s",
			len(report.Violations), v.Law, v.Group, v.Detail)
	}
}

// readJournals stops the processes and reads their journals.
func (r *run) readJournals() {
	check(r.stop())
	if r.log = readJournals(r.journals); len(r.log.starts) == 0 {
		check(errNoStarts)
	}
}

var (
	errNoStarts  = errors.New("the processes logged no starts: they are of another version than this program")
	errNoPermits = errors.New("the processes logged no permits: they are of another version than this program")
)

func (r *run) setTenant(ctx context.Context, tenant string, settings ledger.TenantSettings) error {
	if err := ledger.SetTenant(ctx, r.conn.Cmd, r.space.OfTenant(tenant), tenant, settings); err != nil {
		return fmt.Errorf("set tenant %s: %w", tenant, err)
	}
	return nil
}

// limitRule returns the global limit of this run's fleet, with the fleet's limiter and window, for
// rps permits a second.
func (r *run) limitRule(rps int) limitRule {
	window := must(time.ParseDuration(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW"], "1s")))
	return newLimitRule(cmp.Or(r.overrides["BULKACTION_BACKPRESSURE_LIMITER"], "fixed"), rps, window)
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
	return lastEnded(groups).JobsEnded.Sub(first.Created).Seconds()
}

func lastEnded(groups []groupState) groupState {
	return slices.MaxFunc(groups, func(a, b groupState) int { return a.JobsEnded.Compare(b.JobsEnded) })
}

func sumThrottles(groups []groupState) (n int64) {
	for _, g := range groups {
		n += g.Throttles
	}
	return n
}

// permitEvent is a line of a journal: the permits that one script call spent for one tenant.
type permitEvent struct {
	at     int64  // time of Redis, µs
	by     string // admit or promote
	tenant string
	n      int64 // number of permits
}

// startEvent is a line about the start of a job.
type startEvent struct {
	at    int64 // time of Redis, µs
	group string
}

// journalLog is the content of the journals that `bulkaction role NAME --journal` wrote. Each list
// is ordered by time.
type journalLog struct {
	permits []permitEvent
	starts  []startEvent
}

// readJournals reads the journals of all processes in the folder dir. A line is
// P, time, partition, type, tenant, by, permits or S, time, partition, type, tenant, group,
// ordinal, attempt.
func readJournals(dir string) (log journalLog) {
	names := map[string]string{} // one copy of each name, so that the log does not keep whole lines in memory
	for _, file := range must(filepath.Glob(filepath.Join(dir, "*.journal.tsv"))) {
		f := must(os.Open(file))
		defer f.Close() //nolint:errcheck // it was only read
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			check(attempt("journal "+file, func() { log.add(strings.Split(lines.Text(), "\t"), names) }))
		}
		check(lines.Err())
	}
	slices.SortStableFunc(log.permits, func(a, b permitEvent) int { return cmp.Compare(a.at, b.at) })
	slices.SortStableFunc(log.starts, func(a, b startEvent) int { return cmp.Compare(a.at, b.at) })
	return log
}

// add adds the line with the fields v.
func (l *journalLog) add(v []string, names map[string]string) {
	number := func(i int) int64 { return must(strconv.ParseInt(v[i], 10, 64)) }
	text := func(i int) string {
		if _, known := names[v[i]]; !known {
			names[strings.Clone(v[i])] = strings.Clone(v[i])
		}
		return names[v[i]]
	}
	switch {
	case v[0] == "P" && len(v) == 7:
		l.permits = append(l.permits, permitEvent{at: number(1), tenant: text(4), by: text(5), n: number(6)})
	case v[0] == "S" && len(v) == 8:
		l.starts = append(l.starts, startEvent{at: number(1), group: text(5)})
	default:
		failf("neither a permit nor a start: %q", v)
	}
}

// firstStarts returns, by group id, the time at which the first job of the group started, in µs by
// Redis's clock.
func (l journalLog) firstStarts() map[string]int64 {
	started := map[string]int64{}
	for _, s := range l.starts {
		if _, again := started[s.group]; !again {
			started[s.group] = s.at
		}
	}
	return started
}
