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

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// BigGroupOptions say how large the group is.
type BigGroupOptions struct {
	Options
	Jobs    int
	Payload int // bytes of each job's payload
}

// BigGroup has the figures of one large group. Its jobs are uploaded from a file over HTTP, and run
// while the upload goes on; then its results are read back.
type BigGroup struct {
	Jobs          int     `json:"jobs"`
	PayloadBytes  int     `json:"payload_bytes"`
	FileMB        float64 `json:"file_mb"`
	UploadSeconds float64 `json:"upload_seconds"`
	// ElapsedSeconds is the time from the first request until the group was COMPLETED, by Redis's
	// clock.
	ElapsedSeconds float64 `json:"elapsed_seconds"`
	JobsPerSecond  float64 `json:"jobs_per_second"`
	// FirstTenth is the speed in jobs a second from the first done job until a tenth of the jobs is
	// done, LastTenth that of the last tenth. Both are 0 if the group has fewer than 20 jobs.
	FirstTenth float64 `json:"first_tenth_jobs_per_second"`
	LastTenth  float64 `json:"last_tenth_jobs_per_second"`
	// speed of the last tenth / speed of the first
	SteadyRatio float64 `json:"steady_ratio"`
	// PeakMBByRole has the peak of resident memory of the largest process of each role, of this
	// process (producer), and of a private redis-server.
	PeakMBByRole map[string]float64 `json:"peak_rss_mb_by_role"`
	// PeakMB is the peak of resident memory of the largest process among roles and producer;
	// redis-server does not count.
	PeakMB         float64 `json:"peak_rss_mb"`
	Results        int     `json:"results"` // results that were read back with the value that their jobs returned
	MissingResults int     `json:"missing_results"`
	ResultsSeconds float64 `json:"results_seconds"`
	// all roles and the producer; redis-server does not count
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
	addr := childproc.FreeAddr()
	r, err := start(ctx, o.Options, false, noGlobalLimit, "BULKACTION_API_ADDR="+addr)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = r.overrides
	if err := r.warmUp(ctx, failingJobs(o.Payload, 0), perMessage); err != nil {
		return out, err
	}
	if err := r.awaitAPI(ctx, addr); err != nil {
		return out, err
	}
	c := client.NewAPI("http://" + addr)
	u, err := r.measure(ctx, func() error { return out.measure(ctx, r, c, file) })
	if err != nil {
		return out, err
	}
	out.ProcessCPU, out.RedisCPU = measure.PerJob(u.processCPU(), o.Jobs), measure.PerJob(u.redisTotal().CPU, o.Jobs)
	began := time.Now()
	for result, err := range c.Results(ctx, r.name) {
		if err != nil {
			return out, err
		}
		if string(result.Data) == jobResult {
			out.Results++
		}
	}
	out.MissingResults, out.ResultsSeconds = out.Jobs-out.Results, measure.Round4(time.Since(began).Seconds())
	if out.PeakMBByRole, err = r.peaks(); err != nil {
		return out, err
	}
	for role, mb := range out.PeakMBByRole {
		if role != redisRole {
			out.PeakMB = max(out.PeakMB, mb)
		}
	}
	return out, nil
}

// jobResult is the result of each job.
const jobResult = `{"cost":2}`

// writeJobs writes a file with one job a line, as `POST /v1/groups/{id}/jobs` takes it. It returns
// the file's size in MB (2^20 bytes).
func writeJobs(name string, jobs, payload int) (mb float64, err error) {
	file, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	w := bufio.NewWriter(file)
	line := append(encodeJob(payload, `"result":`+jobResult+`,`), '\n')
	for range jobs {
		_, _ = w.Write(line) // Flush returns its error
	}
	return measure.Round2(float64(len(line)) * float64(jobs) / (1 << 20)), errors.Join(w.Flush(), file.Close())
}

// measure creates the group, uploads the jobs in the file name while the first of them already run,
// seals the group, and waits until it is COMPLETED. It stores durations and speeds in b.
func (b *BigGroup) measure(ctx context.Context, r *run, c *client.API, name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // it was only read
	began, err := r.now(ctx)
	if err != nil {
		return err
	}
	f := r.follow("jobs", []group{{id: r.name, tenant: "big", jobs: b.Jobs}})
	cost := client.Aggregate{As: "cost", Op: "sum", Field: "data.cost"}
	if _, err := c.Submit(
		ctx, client.Submission{ID: r.name, Tenant: "big", Type: "NOOP", Aggregate: []client.Aggregate{cost}},
	); err != nil {
		return err
	}
	if err := f.waitBeside(ctx, func(ctx context.Context) error {
		began := time.Now()
		appended, err := c.AppendNDJSON(ctx, r.name, file)
		if err != nil {
			return err
		}
		b.UploadSeconds = measure.Round4(time.Since(began).Seconds())
		if int(appended.Accepted) != b.Jobs {
			return fmt.Errorf("upload the file: %d jobs were accepted of %d", appended.Accepted, b.Jobs)
		}
		_, err = c.Seal(ctx, r.name, nil)
		return err
	}); err != nil {
		return err
	}
	elapsed := f.end.Sub(began)
	b.ElapsedSeconds = measure.Round4(elapsed.Seconds())
	b.JobsPerSecond = math.Round(float64(b.Jobs) / elapsed.Seconds())
	b.FirstTenth, b.LastTenth = tenthSpeeds(f.samples, b.Jobs)
	b.SteadyRatio = measure.Ratio(b.LastTenth, b.FirstTenth)
	return nil
}
