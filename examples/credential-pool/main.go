// Command credential-pool is a worker binary whose processor calls an API with one of several
// tokens. All worker processes together use each token at most 80 times in any 10 minutes, for one
// call at a time, and don't use it for 10 minutes after three failures in a row. A job that finds
// no token free waits without a slot of the worker, and uses no retry.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

func main() {
	url := os.Getenv("BULKACTION_REDIS_URL")
	if url == "" {
		url = "redis://127.0.0.1:6379/0"
	}
	options, err := redis.ParseURL(url)
	if err != nil {
		log.Fatal("BULKACTION_REDIS_URL: ", err)
	}
	// With this prefix, `bulkaction guard show translate` shows the pool.
	guards := guard.New(redis.NewClient(options), guard.Prefix("bulk-action:"))
	p, err := newTranslator(context.Background(), guards, os.Getenv("TRANSLATE_URL"), os.Getenv("TRANSLATE_TOKENS"))
	if err != nil {
		log.Fatal(err)
	}
	run.Worker(p)
}

// translator is the processor of TRANSLATE.
type translator struct {
	url    string
	tokens map[string]string // by id; only the ids are in Redis
	pool   *guard.Pool
}

// newTranslator declares the pool. list has the tokens, such as "eu-1=secret1,eu-2=secret2".
func newTranslator(ctx context.Context, guards *guard.Client, url, list string) (*translator, error) {
	t := &translator{url: url, tokens: map[string]string{}}
	spec := guard.Spec{
		Rate:    guard.PerWindow(80, 10*time.Minute),
		Breaker: guard.BreakerPolicy{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3},
	}
	for entry := range strings.SplitSeq(list, ",") {
		id, token, ok := strings.Cut(entry, "=")
		if !ok {
			return nil, errors.New("TRANSLATE_TOKENS: must be id=token,…")
		}
		t.tokens[id] = token
		spec.Members = append(spec.Members, guard.Member{ID: id})
	}
	var err error
	t.pool, err = guards.Pool(ctx, "translate", spec)
	return t, err
}

func (t *translator) Type() string { return "TRANSLATE" }

// Admit gets a token before the job is started.
func (t *translator) Admit(ctx context.Context, _ processor.Job) (processor.Pass, error) {
	lease, err := t.pool.Acquire(ctx, guard.MaxWait(2*time.Second))
	var denied *guard.DeniedError
	switch {
	case errors.As(err, &denied):
		return nil, processor.Deferred(denied.After, "no token is free: "+string(denied.Reason))
	case err != nil:
		return nil, processor.Deferred(time.Second, "no token is free: "+err.Error())
	}
	return pass{lease}, nil
}

// Availability tells the worker how many tokens are free, and how many permits all tokens together
// get a second: the worker reads only as many jobs ahead as can use a token soon.
func (t *translator) Availability() processor.Availability {
	a := t.pool.Availability()
	if math.IsNaN(a.PerSecond) {
		a.PerSecond = math.Inf(1)
	}
	return processor.Availability{Free: max(a.Free, 0), PerSecond: a.PerSecond}
}

// pass is a lease of a token as the permission for a job.
type pass struct{ *guard.Lease }

type passKey struct{}

func (p pass) Into(ctx context.Context) context.Context {
	return context.WithValue(ctx, passKey{}, p.Member())
}

// Return says how the call went. It must not wait for Redis.
func (p pass) Return(err error) {
	outcome := guard.Failure
	switch processor.Classify(err).Kind {
	case processor.Done:
		outcome = guard.Success
	case processor.Fail:
		outcome = guard.Neutral // the text was at fault, not the token
	case processor.Defer:
		outcome = guard.Unused
	case processor.Throttle:
		outcome = guard.Throttled(processor.Classify(err).After)
	}
	go func() {
		if err := p.Release(context.Background(), outcome); err != nil {
			log.Print("release a token, its lease ends by itself: ", err)
		}
	}()
}

// Process makes the call.
func (t *translator) Process(ctx context.Context, job processor.Job) (any, error) {
	id, _ := ctx.Value(passKey{}).(string)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, strings.NewReader(string(job.Payload)))
	if err != nil {
		return nil, processor.Permanent("BAD_URL", err)
	}
	request.Header.Set("Authorization", "Bearer "+t.tokens[id])
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, processor.Retry("UNREACHABLE", err)
	}
	defer response.Body.Close()
	err = fmt.Errorf("status %d", response.StatusCode)
	switch {
	case response.StatusCode == http.StatusTooManyRequests:
		return nil, processor.Throttled(time.Minute, err)
	case response.StatusCode == http.StatusUnauthorized, response.StatusCode >= 500:
		return nil, processor.Retry("REFUSED", err)
	case response.StatusCode >= 400:
		return nil, processor.Permanent("BAD_TEXT", err)
	}
	return map[string]string{"token": id}, nil
}
