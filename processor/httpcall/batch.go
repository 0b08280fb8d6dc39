package httpcall

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

// BatchType is the job type whose jobs share calls: see [Batch].
const BatchType = "HTTP_BATCH"

// CodeInvalidOutcome is for an item of an answer that is not an outcome: retry.
const CodeInvalidOutcome = "INVALID_OUTCOME"

const (
	maxRequests    = 10      // of one call of the worker, at a time
	maxAnswerBytes = 8 << 20 // of one response
	outcomeBytes   = 1 << 10 // of an item of a response, beside its result
)

// batchMethods are the methods of requests that have a body.
var batchMethods = []string{http.MethodPost, http.MethodPut, http.MethodPatch}

// Batch runs the jobs of type HTTP_BATCH, or of a type of the credentials file with batches: jobs of
// one tenant whose payloads (as for [Processor]) have the same url, method and headers share a
// request. Its body is a JSON array with an item for each job, of which id is the idempotency key:
//
//	[{"id": "GROUP.0", "attempt": 1, "retries_left": 3, "key"?: …, "body": …}, …]
//
// A 2xx answer is a JSON array of as many outcomes in the same order (see outcome); any other is an
// error of each of these jobs, as for [Processor], but a 400, 413 or 422 for several jobs has the code
// BATCH_REJECTED: each of them is then tried alone.
//
// With credentials or guards of hosts a call is one request, and gets a permission for it first: see
// [Guarded].
type Batch struct {
	of      *Guarded // with nothing loaded if calls have neither credentials nor signatures nor guards
	typ     string
	options processor.BatchOptions
}

// batchSettings are what the credentials file says about the batches of a type; zeros stand for the
// settings of HTTP_BATCH.
type batchSettings struct {
	Size int           `yaml:"size"`
	Wait time.Duration `yaml:"wait"`
}

// defaultWait is that of processor.BatchOptions. It is left to the worker, which shortens it if the
// lease is short.
const defaultWait = 50 * time.Millisecond

func (s *batchSettings) options(c Config) (processor.BatchOptions, error) {
	o := processor.BatchOptions{Size: cmp.Or(s.Size, c.BatchSize), Wait: cmp.Or(s.Wait, c.BatchWait)}
	if o.Wait == defaultWait {
		o.Wait = 0
	}
	_, err := o.Defaults()
	return o, err
}

// check finds mistakes in the settings of a type, whose calls are like request.
func (s *batchSettings) check(c Config, request *http.Request) error {
	if _, err := s.options(c); err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	return payload{URL: request.URL.String(), Method: request.Method}.check(batchMethods)
}

func newBatch(g *Guarded, typ string, s *batchSettings) *Batch {
	o, _ := s.options(g.calls.config) // was checked
	return &Batch{g, typ, o}
}

// Types returns the processor of HTTP_BATCH. Close is for p alone.
func (p *Processor) Types() []processor.Runner {
	g := &Guarded{calls: p}
	g.loaded.Store(&content{})
	return []processor.Runner{newBatch(g, BatchType, &batchSettings{})}
}

// Type is HTTP_BATCH, or the type of the credentials file.
func (b *Batch) Type() string { return b.typ }

// Options returns which jobs share a call.
func (b *Batch) Options() processor.BatchOptions { return b.options }

// item is what a request has of a job.
type item struct {
	ID          string          `json:"id"`
	Attempt     int             `json:"attempt"`
	RetriesLeft int             `json:"retries_left"`
	Key         string          `json:"key,omitempty"`
	Body        json.RawMessage `json:"body"`
}

// batchRequest is a request for some jobs of a call.
type batchRequest struct {
	payload payload // without a body
	tenant  string
	items   []item
	places  []int // of the jobs in the call
}

// requestsOf divides jobs by their requests. The errors are those of payloads that make no request.
func (b *Batch) requestsOf(jobs []processor.Job, loaded *content) (requests []*batchRequest, errs map[int]error) {
	alike, errs := map[string]*batchRequest{}, map[int]error{}
	for i, job := range jobs {
		p, err := payloadOf(job, loaded.types)
		if err == nil {
			err = p.check(batchMethods)
		}
		if err != nil {
			errs[i] = invalidPayload(err)
			continue
		}
		it := item{job.ID(), job.Attempt, job.RetriesLeft, job.Key, p.Body}
		p.Body = nil
		text, _ := json.Marshal(p) // of strings, with the headers in alphabetical order
		key := job.Tenant + " " + string(text)
		r := alike[key]
		if r == nil {
			r = &batchRequest{payload: p, tenant: job.Tenant}
			alike[key], requests = r, append(requests, r)
		}
		r.items, r.places = append(r.items, it), append(r.places, i)
	}
	return requests, errs
}

// gatedBatch is a Batch with credentials or guards of hosts.
type gatedBatch struct{ *Batch }

// AdmitBatch gets the permission for the request of the first job, if it needs one, as
// [Guarded.Admit] does. It admits the jobs up to the first one with another request; if the first
// request needs no permission, up to the first one that needs one.
func (b gatedBatch) AdmitBatch(ctx context.Context, jobs []processor.Job) (processor.Pass, int, error) {
	loaded := b.of.loaded.Load()
	if b.of.hosts == nil && len(loaded.credentials) == 0 {
		return nil, len(jobs), nil
	}
	requests, _ := b.requestsOf(jobs, loaded)
	needs := make([]*batchRequest, len(jobs)) // nil: no permission
	for _, r := range requests {
		target, _ := url.Parse(r.payload.URL) // was checked
		for _, i := range r.places {
			if b.of.hosts != nil || loaded.credentials.of(target) != nil {
				needs[i] = r
			}
		}
	}
	n := 1
	for n < len(jobs) && needs[n] == needs[0] {
		n++
	}
	pass, err := b.of.Admit(ctx, jobs[0])
	return pass, n, err
}

// ProcessBatch makes the requests for the jobs. The error of a single request is that of the call.
func (b *Batch) ProcessBatch(ctx context.Context, jobs []processor.Job) ([]processor.Outcome[any], error) {
	all, loaded := make([]processor.Outcome[any], len(jobs)), b.of.loaded.Load()
	requests, errs := b.requestsOf(jobs, loaded)
	for i, err := range errs {
		all[i].Err = err
	}
	var last error
	running, free := sync.WaitGroup{}, make(chan struct{}, maxRequests)
	for _, r := range requests {
		free <- struct{}{}
		running.Go(func() {
			defer func() { <-free }()
			outcomes, err := b.send(ctx, loaded, r)
			for k, i := range r.places {
				if all[i].Err = err; err == nil {
					all[i] = outcomes[k]
				}
			}
			if len(requests) == 1 {
				last = err
			}
		})
	}
	running.Wait()
	return all, last
}

// send makes one request. The error is that of each of its jobs.
func (b *Batch) send(ctx context.Context, loaded *content, r *batchRequest) ([]processor.Outcome[any], error) {
	body, err := json.Marshal(r.items)
	if err != nil {
		return nil, invalidPayload(err)
	}
	request, err := r.payload.request(bytes.NewReader(body), "application/json", "")
	if err != nil {
		return nil, &outcomes{invalidPayload(err), unused, unused}
	}
	credentials, err := b.of.poolOf(request, loaded)
	if err != nil {
		return nil, &outcomes{err, unused, unused}
	}
	setJobHeaders(request, map[string]string{"Tenant": r.tenant, "Type": b.typ})
	// The id is that of these attempts: a receiver that answers a known id from its memory must not
	// do so to a retry.
	digest := sha256.Sum256(body)
	most := min(len(r.items)*(b.of.calls.config.MaxResponseBytes+outcomeBytes), maxAnswerBytes)
	a, err := b.of.send(ctx, request, credentials, hex.EncodeToString(digest[:16]), most)
	rejected := a.status == http.StatusBadRequest || a.status == http.StatusRequestEntityTooLarge || a.status == http.StatusUnprocessableEntity
	switch {
	case err == nil:
		return outcomesIn(request, a, len(r.items))
	case rejected && a.said == "" && len(r.items) > 1:
		err = processor.Retry(processor.CodeBatchRejected, err)
	}
	return nil, err
}

// outcome is what an item of an answer says about its job:
//
//	{"result": any JSON}                  done
//	{"error": text, "code"?: …}           retry
//	{"outcome": "permanent", …}           as the header Bulkaction-Outcome says: permanent, retry, defer
//	                                      or throttle, with retry_after in seconds, code and error
type outcome struct {
	Result     json.RawMessage `json:"result"`
	Outcome    string          `json:"outcome"`
	Error      *string         `json:"error"`
	Code       string          `json:"code"`
	RetryAfter float64         `json:"retry_after"`
}

// outcomesIn returns the n outcomes in an answer. An item that is none is the error of its job alone.
func outcomesIn(request *http.Request, a answer, n int) ([]processor.Outcome[any], error) {
	var items []json.RawMessage
	err := json.Unmarshal(a.body, &items)
	switch host := request.URL.Hostname(); {
	case a.truncated:
		err = fmt.Errorf("call %s: the answer has more than %d bytes", host, len(a.body))
	case err != nil || items == nil:
		err = fmt.Errorf("call %s: the answer is not a JSON array of outcomes", host)
	case len(items) != n:
		err = fmt.Errorf("call %s: the answer has %d outcomes for %d jobs", host, len(items), n)
	}
	if err != nil {
		return nil, outcomesOf(a.status, processor.Retry(processor.CodeBatchLength, err))
	}
	all := make([]processor.Outcome[any], n)
	for i, raw := range items {
		all[i] = outcomeOf(request, raw)
	}
	return all, nil
}

func outcomeOf(request *http.Request, raw json.RawMessage) processor.Outcome[any] {
	var o outcome
	err := json.Unmarshal(raw, &o)
	said, failed := strings.ToLower(o.Outcome), o.Error != nil || o.Outcome != ""
	if err != nil || !failed && o.Result == nil || o.Outcome != "" && !isOutcome(said) {
		return processor.Outcome[any]{Err: processor.Retry(CodeInvalidOutcome,
			fmt.Errorf("call %s: an item of the answer is not an outcome", request.URL.Hostname()))}
	}
	if !failed {
		return processor.Outcome[any]{Result: o.Result}
	}
	text := ""
	if o.Error != nil {
		text = *o.Error
	}
	code, text := presentable(request, nil, o.Code, text)
	after := min(max(o.RetryAfter, 0), (24 * time.Hour).Seconds())
	return processor.Outcome[any]{Err: errorOf(said, code, time.Duration(after*float64(time.Second)),
		errors.New(cmp.Or(text, code, "the answer names no reason")))}
}
