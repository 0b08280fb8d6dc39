package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// compareRun is a run of one of the compared programs, under one variant. The program may be of
// another revision, with other keys and scripts, so this code relies on contracts: the ingest
// stream, the HTTP API, the events stream and Redis's INFO. It also needs two things that are not
// contracts: the hidden command that runs a role, and the format of the journal.
type compareRun struct {
	*run
	v    compareVariant
	api  *client.API
	ends *endListener
	job  func(i int) []byte // returns the JSON of job i of the variant
	keys string             // file of the API's keys; "" if it asks for none
}

const (
	compareClients = 32  // concurrent HTTP requests
	comparePayload = 200 // bytes of each payload
	// eventsPause is the pause between two reads of the events stream: reading more often would
	// cost CPU.
	eventsPause = 50 * time.Millisecond
)

// start starts a fleet with the program that role names, sets the tenants' limits if v has them,
// listens to events, and warms the fleet up.
func (o *CompareOptions) start(
	ctx context.Context, role []string, v compareVariant, journals bool,
) (*compareRun, error) {
	addr := childproc.FreeAddr()
	program := o.Options
	program.Role = role
	env := append([]string{noGlobalLimit, "BULKACTION_API_ADDR=" + addr}, quickRetries...)
	transport := &http.Transport{MaxIdleConnsPerHost: compareClients}
	options := []client.Option{client.WithHTTPClient(&http.Client{Transport: transport})}
	file := ""
	if v.keys {
		var token string
		var err error
		if file, token, err = writeKey(); err != nil {
			return nil, err
		}
		env = append(env, "BULKACTION_AUTH=keys", "BULKACTION_AUTH_KEYS_FILE="+file)
		options = append(options, client.WithAPIKey(token))
	}
	r, err := start(ctx, program, journals, env...)
	if err != nil {
		_ = os.RemoveAll(file)
		return nil, err
	}
	c := &compareRun{
		run: r, v: v, job: v.encodeJobs(), api: client.NewAPI("http://"+addr, options...), keys: file,
	}
	if err := c.prepare(ctx, addr, o); err != nil {
		c.close()
		return nil, fmt.Errorf("prepare: %w", err)
	}
	return c, nil
}

// writeKey makes an API key with the role producer that may name any tenant, and writes a file of
// API keys with it.
func writeKey() (file, token string, err error) {
	k, err := apikey.Request{Role: auth.Producer, Tenant: auth.AllTenants}.New(auth.SHA256, time.Now())
	if err != nil {
		return "", "", err
	}
	line, err := apikey.FileLine("bench", k)
	if err != nil {
		return "", "", err
	}
	f, err := os.CreateTemp("", "bulkaction-keys-") // only its owner can read it
	if err != nil {
		return "", "", fmt.Errorf("write a file of keys: %w", err)
	}
	_, err = f.WriteString(line + "\n")
	if err = errors.Join(err, f.Close()); err != nil {
		return "", "", fmt.Errorf("write a file of keys: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return f.Name(), k.Token, nil
}

// close stops the fleet and the listener of its events, and removes the file of API keys.
func (c *compareRun) close() {
	if c.ends != nil {
		c.ends.close()
	}
	c.run.close()
	_ = os.RemoveAll(c.keys) // of "", nothing
}

func (c *compareRun) prepare(ctx context.Context, addr string, o *CompareOptions) (err error) {
	if err := c.awaitAPI(ctx, addr); err != nil {
		return err
	}
	if c.v.limits {
		rps := float64(unreachedLimit)
		for i := range c.v.tenants {
			if _, err := c.api.SetTenant(ctx, c.v.tenant(i), api.TenantSettings{RPS: &rps}); err != nil {
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

// tenant names the tenant of the i-th group.
func (v compareVariant) tenant(i int) string { return fmt.Sprintf("tenant-%d", i%v.tenants) }

// withFields adds the fields of the variant to groups.
func (v compareVariant) withFields(groups []group) []group {
	for i := range groups {
		if v.aggregate != nil {
			groups[i].fields = map[string]any{"aggregate": v.aggregate}
		}
	}
	return groups
}

// send submits jobs as fast as possible, and waits until their groups are completed; see
// awaitChecked for its checks.
func (c *compareRun) send(ctx context.Context, suffix string, jobs int) ([]groupEnd, error) {
	if c.v.http {
		groups := c.singles(suffix, jobs)
		all, sending := errgroup.WithContext(ctx)
		all.SetLimit(compareClients)
		for i := range groups {
			all.Go(func() error { return c.submitSingle(sending, groups[i], i) })
		}
		if err := all.Wait(); err != nil {
			return nil, err
		}
		return c.awaitChecked(ctx, groups, jobs)
	}
	groups := c.v.withFields(divideJobs(c.name+suffix, jobs, c.v.tenants, 1, c.job))
	if err := c.create(ctx, groups, 0); err != nil {
		return nil, err
	}
	if err := c.fill(ctx, groups, perMessage); err != nil {
		return nil, err
	}
	return c.awaitChecked(ctx, groups, jobs)
}

// sendPaced submits jobs at a steady rate, each in a group of its own, and waits until all are
// completed; see awaitChecked for its checks.
func (c *compareRun) sendPaced(ctx context.Context, rate, jobs int) ([]groupEnd, error) {
	groups := c.singles("-paced", jobs)
	err := pace(ctx, rate, jobs, func(ctx context.Context, i int, _ time.Time) error {
		return c.submitSingle(ctx, groups[i], i)
	})
	if err != nil {
		return nil, err
	}
	return c.awaitChecked(ctx, groups, jobs)
}

// singles returns n groups of one job each, not submitted yet. The tenants of the variant take
// turns as their owners.
func (c *compareRun) singles(suffix string, n int) []group {
	return c.v.withFields(singleJobs(c.name+suffix, n, c.v.tenant, c.job))
}

// submitSingle submits a group whose only job is job i of the load, over HTTP or as a message to
// the ingest stream, as the variant says.
func (c *compareRun) submitSingle(ctx context.Context, g group, i int) error {
	if !c.v.http {
		return c.publishSingle(ctx, g, i)
	}
	body, err := g.complete(i)
	if err != nil {
		return err
	}
	_, err = c.api.SubmitJSON(ctx, body)
	return err
}

const (
	comparePeriod   = 100 // number of jobs after which the jobs repeat
	aggregateSum    = "cost"
	aggregateSpread = "spread"
)

// encodeJobs returns a function that returns the JSON of the i-th job of the variant. The jobs
// repeat after comparePeriod jobs.
func (v compareVariant) encodeJobs() func(int) []byte {
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
	return func(i int) []byte { return jobs[i%comparePeriod] }
}

// awaitChecked waits until the groups are completed, and checks that they have the jobs, retries
// and aggregates that the variant must produce.
func (c *compareRun) awaitChecked(ctx context.Context, groups []group, jobs int) ([]groupEnd, error) {
	ends, err := c.ends.awaitCompleted(ctx, groups)
	if err != nil {
		return nil, err
	}
	return ends, c.v.checkGroups(ends, jobs)
}

var errWrongLoad = errors.New("the jobs did something else than the variant asks for")

// checkGroups returns an error unless the ended groups together have the number of done jobs, the
// retries and the aggregates that the variant must produce.
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
	// An error counts as 0 accepted jobs: the caller asks again until the number is right, and has
	// a time limit.
	shown, _ := c.api.Group(ctx, g.id)
	return int(shown.Counts.Accepted)
}
