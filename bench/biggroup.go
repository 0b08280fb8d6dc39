package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// BigGroupOptions say how large the group is and on which fleet it runs.
type BigGroupOptions struct {
	FleetOptions
	Jobs     int
	Payload  int            // bytes of each job's payload
	Progress func(done int) // called with the number of jobs done; may be nil
}

// BigGroup has the figures of one large group. Its jobs are uploaded from a file over HTTP and run
// at the same time; then its results are read back.
type BigGroup struct {
	Jobs          int     `json:"jobs"`
	PayloadBytes  int     `json:"payload_bytes"`
	FileMB        float64 `json:"file_mb"`
	UploadSeconds float64 `json:"upload_seconds"`
	// from the first request until the group was COMPLETED, by Redis's clock
	ElapsedSeconds float64 `json:"elapsed_seconds"`
	JobsPerSecond  float64 `json:"jobs_per_second"`
	// jobs a second, from the first job done until a tenth of the jobs is done; then for the last
	// tenth. Both are 0 if the group was not seen often enough
	FirstTenth float64 `json:"first_tenth_jobs_per_second"`
	LastTenth  float64 `json:"last_tenth_jobs_per_second"`
	// speed of the last tenth / speed of the first
	SteadyRatio float64 `json:"steady_ratio"`
	// peak of the largest process of each role, of the producer and of redis-server
	PeakMBByRole map[string]float64 `json:"peak_rss_mb_by_role"`
	// peak of the largest process: of a role or the producer, not of redis-server
	PeakMB         float64 `json:"peak_rss_mb"`
	Results        int     `json:"results"` // results that were read back with the value that their jobs returned
	ResultsSeconds float64 `json:"results_seconds"`
	// all processes, the producer included
	ProcessCPU float64           `json:"process_cpu_us_per_job"`
	RedisCPU   float64           `json:"redis_cpu_us_per_job"`
	Overrides  map[string]string `json:"overrides"`
}

// RunBigGroup uploads, runs and reads back one group of o.Jobs jobs, on a fleet of its own.
func RunBigGroup(ctx context.Context, o BigGroupOptions) (BigGroup, error) {
	out := BigGroup{Jobs: o.Jobs, PayloadBytes: o.Payload}
	dir, err := os.MkdirTemp("", "bulkaction-big-")
	if err != nil {
		return out, fmt.Errorf("make a folder for the file: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	file := filepath.Join(dir, "jobs.ndjson")
	if out.FileMB, err = writeJobs(file, o.Jobs, o.Payload); err != nil {
		return out, fmt.Errorf("write the file: %w", err)
	}
	addr, err := freeAddr(ctx)
	if err != nil {
		return out, err
	}
	r, err := startFleetRun(ctx, &o.FleetOptions, []string{noGlobalLimit, "BULKACTION_API_ADDR=" + addr}, 1)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = o.Overrides()
	r.producer = newProducer(r.fleet.Conn, r.space, ThroughputOptions{Batch: perMessage, Payload: o.Payload})
	if _, err := r.produceAndAwait(ctx, divideJobs(r.name+"-warm", warmJobs, 1, 1), nil); err != nil {
		return out, fmt.Errorf("warm up: %w", err)
	}
	if err := r.fleet.awaitAPI(ctx, addr); err != nil {
		return out, err
	}
	before, err := r.fleet.measureUse(ctx)
	if err != nil {
		return out, err
	}
	if err := r.runBigGroup(ctx, client.NewAPI("http://"+addr), file, &out, o.Progress); err != nil {
		return out, err
	}
	after, err := r.fleet.measureUse(ctx)
	if err != nil {
		return out, err
	}
	u := after.since(before)
	out.ProcessCPU, out.RedisCPU = perJob(u.processCPU(), o.Jobs), perJob(u.redisTotal().cpu, o.Jobs)
	if out.Results, out.ResultsSeconds, err = readResults(ctx, client.NewAPI("http://"+addr), r.name); err != nil {
		return out, err
	}
	if out.PeakMBByRole, err = r.fleet.peaks(); err != nil {
		return out, err
	}
	for role, mb := range out.PeakMBByRole {
		if role != redisRole {
			out.PeakMB = max(out.PeakMB, mb)
		}
	}
	return out, nil
}

// writeJobs writes a file with one job a line, as `POST /v1/groups/{id}/jobs` takes it. It returns
// the file's size in MB (2^20 bytes).
func writeJobs(name string, jobs, payload int) (mb float64, err error) {
	file, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	w := bufio.NewWriter(file)
	line := append(encodeJob(payload, `"result":{"cost":2},`), '\n')
	for range jobs {
		_, _ = w.Write(line) // Flush returns its error
	}
	return round2(float64(len(line)) * float64(jobs) / (1 << 20)), errors.Join(w.Flush(), file.Close())
}

// runBigGroup creates the group, uploads the file name into it while uploaded jobs already run,
// seals it, and waits until it is COMPLETED. It fills in the durations and speeds of out.
func (r *fleetRun) runBigGroup(
	ctx context.Context, c *client.API, name string, out *BigGroup, progress func(int),
) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // it was only read
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g := group{id: r.name, tenant: "big", jobs: out.Jobs}
	began, err := r.fleet.Conn.Cmd.Time(ctx).Result()
	if err != nil {
		return fmt.Errorf("ask for Redis's time: %w", err)
	}
	f := follow(r.fleet, r.space, []group{g}, progress)
	cost := client.Aggregate{As: "cost", Op: "sum", Field: "data.cost"}
	if _, err := c.Submit(
		ctx, client.Group{ID: g.id, Tenant: g.tenant, Type: "NOOP", Aggregate: []client.Aggregate{cost}},
	); err != nil {
		return err
	}
	uploaded, stopped := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(stopped)
		uploaded <- upload(ctx, c, g, file, out)
	}()
	err = f.wait(ctx, uploaded)
	cancel()
	<-stopped
	if err != nil {
		return err
	}
	elapsed := time.UnixMilli(f.end).Sub(began)
	out.ElapsedSeconds, out.JobsPerSecond = round4(elapsed.Seconds()), math.Round(float64(out.Jobs)/elapsed.Seconds())
	out.FirstTenth, out.LastTenth = tenthSpeeds(f.samples, out.Jobs)
	out.SteadyRatio = ratio(out.LastTenth, out.FirstTenth)
	return nil
}

func upload(ctx context.Context, c *client.API, g group, file *os.File, out *BigGroup) error {
	began := time.Now()
	appended, err := c.AppendNDJSON(ctx, g.id, file)
	if err != nil {
		return err
	}
	out.UploadSeconds = round4(time.Since(began).Seconds())
	if int(appended.Accepted) != g.jobs {
		return fmt.Errorf("upload the file: %d jobs were accepted of %d", appended.Accepted, g.jobs)
	}
	_, err = c.Seal(ctx, g.id, nil)
	return err
}

// readResults reads all results of a group over HTTP. It returns how many of them hold the value
// that writeJobs put into each job, and how long the reading took.
func readResults(ctx context.Context, c *client.API, id string) (n int, seconds float64, err error) {
	began := time.Now()
	for result, err := range c.Results(ctx, id) {
		if err != nil {
			return n, 0, err
		}
		if isCost(result) {
			n++
		}
	}
	return n, round4(time.Since(began).Seconds()), nil
}

func isCost(r api.Result) bool { return string(r.Data) == `{"cost":2}` }
