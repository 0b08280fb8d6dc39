package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// compareRun is a fleet of one of the compared programs, under one variant. The program may be of
// another revision, with other keys and scripts, so this code relies on contracts: the ingest
// stream, the HTTP API, the events stream and Redis's INFO. It also needs two things that are not
// contracts: the hidden command that runs a role, and the format of the journal.
type compareRun struct {
	*fleetRun
	v    compareVariant
	api  *client.API
	ends *endListener
	jobs [][]byte // encoded jobs that are sent again and again, comparePeriod of them
}

const (
	compareClients = 32  // concurrent HTTP requests
	comparePayload = 200 // bytes of each payload
	// pause between reads of the events stream: reading often would cost CPU
	eventsPause = 50 * time.Millisecond
)

// start starts a fleet with the program that role names, sets the tenants' limits if v has them,
// listens to events, and warms the fleet up.
func (o *CompareOptions) start(
	ctx context.Context, role []string, v compareVariant, journals string,
) (*compareRun, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	env := append([]string{noGlobalLimit, "BULKACTION_API_ADDR=" + addr}, quickRetries...)
	r, err := startFleetRun(ctx, &FleetOptions{Role: role, Env: o.Env, Journal: journals}, env, 1)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConnsPerHost: compareClients}
	c := &compareRun{
		fleetRun: r, v: v, jobs: v.encodeJobs(),
		api: client.NewAPI("http://"+addr, client.WithHTTPClient(&http.Client{Transport: transport})),
	}
	if err := c.prepare(ctx, addr, o); err != nil {
		c.close()
		return nil, fmt.Errorf("prepare: %w", err)
	}
	return c, nil
}

// close stops the fleet and the listener of its events.
func (c *compareRun) close() {
	if c.ends != nil {
		c.ends.close()
	}
	c.fleetRun.close()
}

func (c *compareRun) prepare(ctx context.Context, addr string, o *CompareOptions) (err error) {
	if err := c.fleet.awaitAPI(ctx, addr); err != nil {
		return err
	}
	if c.v.limits {
		rps := float64(unreachedLimit)
		for _, g := range divideJobs("", 0, c.v.tenants, 1) {
			if _, err := c.api.SetTenant(ctx, g.tenant, api.TenantSettings{RPS: &rps}); err != nil {
				return err
			}
		}
	}
	if c.ends, err = c.listenForEnds(ctx, eventsPause); err != nil {
		return err
	}
	_, err = c.send(ctx, "-warm", min(warmJobs, o.jobs(c.v)))
	return err
}

// send submits jobs as fast as possible, waits until their groups are completed, and checks them;
// see await.
func (c *compareRun) send(ctx context.Context, suffix string, jobs int) ([]groupEnd, error) {
	var groups []group
	var err error
	if c.v.http {
		groups = c.singles(suffix, jobs)
		all, ctx := errgroup.WithContext(ctx)
		all.SetLimit(compareClients)
		for i := range groups {
			all.Go(func() error { return c.submit(ctx, groups[i], i) })
		}
		err = all.Wait()
	} else {
		groups = divideJobs(c.name+suffix, jobs, c.v.tenants, 1)
		c.producer = c.newProducer()
		if err = c.producer.create(ctx, groups, c.groupFields()); err == nil {
			err = c.producer.fill(ctx, groups)
		}
	}
	if err != nil {
		return nil, err
	}
	return c.await(ctx, groups, jobs)
}

// sendPaced submits jobs at a steady rate, each in a group of its own, waits until all are
// completed, and checks them; see await.
func (c *compareRun) sendPaced(ctx context.Context, rate, jobs int) ([]groupEnd, error) {
	groups := c.singles("-paced", jobs)
	err := pace(ctx, rate, jobs, func(ctx context.Context, i int, _ time.Time) error {
		return c.submit(ctx, groups[i], i)
	})
	if err != nil {
		return nil, err
	}
	return c.await(ctx, groups, jobs)
}

// singles returns n groups of one job each. They belong to all tenants in turn.
func (c *compareRun) singles(suffix string, n int) []group {
	groups := make([]group, n)
	for i := range groups {
		id, tenant := fmt.Sprintf("%s%s-%d", c.name, suffix, i), fmt.Sprintf("tenant-%d", i%c.v.tenants)
		groups[i] = group{id: id, tenant: tenant, jobs: 1}
	}
	return groups
}

// submit submits a group with one job, the i-th of this run: over HTTP or as a message, as the
// variant says.
func (c *compareRun) submit(ctx context.Context, g group, i int) error {
	data := map[string]any{
		"id": g.id, "tenant": g.tenant, "type": "NOOP", "seal": true, "jobs": []json.RawMessage{c.jobs[i%len(c.jobs)]},
	}
	for field, value := range c.groupFields() {
		data[field] = value
	}
	if c.v.http {
		body, err := json.Marshal(data)
		if err != nil {
			return err
		}
		_, err = c.api.SubmitJSON(ctx, body)
		return err
	}
	pipe := c.fleet.Conn.Cmd.Pipeline()
	if err := publish(ctx, pipe, c.space, "group.submit", data); err != nil {
		return err
	}
	_, err := pipe.Exec(ctx)
	return err
}

// groupFields returns the fields that the variant adds to each group.
func (c *compareRun) groupFields() map[string]any {
	if c.v.aggregate == nil {
		return nil
	}
	return map[string]any{"aggregate": c.v.aggregate}
}

func (c *compareRun) newProducer() *producer {
	job := func(i int) []byte { return c.jobs[i%len(c.jobs)] }
	return &producer{conn: c.fleet.Conn, space: c.space, batch: perMessage, job: job}
}

const (
	comparePeriod   = 100 // number of jobs after which the jobs repeat
	aggregateSum    = "cost"
	aggregateSpread = "spread"
)

// encodeJobs returns the jobs of one period, encoded.
func (v compareVariant) encodeJobs() [][]byte {
	jobs := make([][]byte, comparePeriod)
	for i := range jobs {
		fields := ""
		if v.retries && i == comparePeriod-1 {
			fields = failOnce
		}
		if v.aggregate != nil {
			fields += fmt.Sprintf(`"result":{"cost":%d},`, i+1)
		}
		jobs[i] = encodeJob(comparePayload, fields)
	}
	return jobs
}

// await waits until the groups are completed, and checks that their jobs did what the variant says.
func (c *compareRun) await(ctx context.Context, groups []group, jobs int) ([]groupEnd, error) {
	var ids []string
	for _, g := range groups {
		ids = append(ids, g.id)
	}
	ends, err := c.ends.awaitCompleted(ctx, ids)
	if err != nil {
		return nil, err
	}
	return ends, c.v.checkGroups(ends, jobs)
}

var errWrongLoad = errors.New("the jobs did something else than the variant asks for")

// checkGroups returns an error unless the groups together show the jobs, retries and aggregates
// that the variant asks for.
func (v compareVariant) checkGroups(ends []groupEnd, jobs int) error {
	var got, want [4]int64 // jobs done, retries, sum of the values, values in the distributions
	for _, e := range ends {
		got[0] += e.group.Counts.Done
		got[1] += e.group.Retries
		if v.aggregate == nil {
			continue
		}
		var sum float64
		var spread struct {
			Count int64 `json:"count"`
		}
		err := errors.Join(
			json.Unmarshal(e.group.Aggregate[aggregateSum], &sum),
			json.Unmarshal(e.group.Aggregate[aggregateSpread], &spread))
		if err != nil {
			return fmt.Errorf("read aggregate of group %s: %w", e.group.ID, err)
		}
		got[2], got[3] = got[2]+int64(sum), got[3]+spread.Count
	}
	want[0] = int64(jobs)
	if v.retries {
		want[1] = int64(jobs / comparePeriod)
	}
	if v.aggregate != nil {
		for i := range jobs {
			want[2] += int64(i%comparePeriod + 1)
		}
		want[3] = int64(jobs)
	}
	if got != want {
		return fmt.Errorf("%w: [jobs done, retries, sum, values] are %v, want %v", errWrongLoad, got, want)
	}
	return nil
}

// accepted returns the number of accepted jobs of a group; 0 if the group can't be read, for
// example because it does not exist yet.
func (c *compareRun) accepted(ctx context.Context, g group) int {
	// The caller asks again until the number is right, and gives up in the end.
	shown, _ := c.api.Group(ctx, g.id)
	return int(shown.Counts.Accepted)
}
