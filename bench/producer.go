package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// producer publishes jobs. They are encoded once, so that the producer uses little CPU on the
// machine that it measures.
type producer struct {
	conn  *redisx.Conn
	space keyspace.Space
	batch int // the most jobs of a message

	job  func(i int) []byte // returns the i-th job, encoded
	sent int                // number of jobs encoded so far; the next one is job(sent)
}

func newProducer(conn *redisx.Conn, space keyspace.Space, o ThroughputOptions) *producer {
	normal, failing := encodeJob(o.Payload, ""), encodeJob(o.Payload, failOnce)
	return &producer{conn: conn, space: space, batch: o.Batch, job: func(i int) []byte {
		if isFailing(i, o.FailPercent) {
			return failing
		}
		return normal
	}}
}

// failOnce has the payload fields of a NOOP job that fails once and is retried.
const failOnce = `"fail":"retry","fail_times":1,`

// isFailing says whether the i-th job fails, if percent of all jobs do. These jobs are spread
// evenly.
func isFailing(i int, percent float64) bool {
	return percent > 0 && int(float64(i+1)*percent/100) > int(float64(i)*percent/100)
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

// A pipeline is sent when it has this number of messages or bytes.
const (
	pipeMessages = 500
	pipeBytes    = 2 << 20
)

// create submits groups without jobs, each with these fields. Each group is sealed when it has as
// many jobs as g.jobs says.
func (p *producer) create(ctx context.Context, groups []group, fields map[string]any) error {
	pipe := p.conn.Cmd.Pipeline()
	for i, g := range groups {
		data := map[string]any{"id": g.id, "tenant": g.tenant, "type": "NOOP", "total": g.jobs}
		for name, v := range fields {
			data[name] = v
		}
		if err := publish(ctx, pipe, p.space, "group.submit", data); err != nil {
			return err
		}
		if pipe.Len() < pipeMessages && i < len(groups)-1 {
			continue
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return fmt.Errorf("create groups: %w", err)
		}
	}
	return nil
}

// fill publishes the jobs of the groups, one message of each group in turn.
func (p *producer) fill(ctx context.Context, groups []group) error {
	pipe := p.conn.Cmd.Pipeline()
	stream, unsentBytes := p.space.Ingest(), 0
	var buffers [][]byte // one buffer for each message of the pipeline
	flush := func() error {
		if pipe.Len() == 0 {
			return nil
		}
		unsentBytes = 0
		if _, err := pipe.Exec(ctx); err != nil {
			return fmt.Errorf("produce: %w", err)
		}
		return nil
	}
	left := make([]int, len(groups))
	for i, g := range groups {
		left[i] = g.jobs
	}
	for pending := true; pending; {
		pending = false
		for i, g := range groups {
			n := min(left[i], p.batch)
			if n == 0 {
				continue
			}
			pending = true
			left[i] -= n
			at := pipe.Len()
			if at == len(buffers) {
				buffers = append(buffers, nil)
			}
			buffers[at] = p.message(buffers[at][:0], g.id, n)
			unsentBytes += len(buffers[at])
			pipe.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []any{"type", "jobs.append", "data", buffers[at]}})
			if pipe.Len() == pipeMessages || unsentBytes >= pipeBytes {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	return flush()
}

// message appends the message with the next n jobs, for one group, to b. It counts them in p.sent.
func (p *producer) message(b []byte, group string, n int) []byte {
	b = append(append(append(b, `{"group":"`...), group...), `","jobs":[`...)
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, p.job(p.sent)...)
		p.sent++
	}
	return append(b, "]}"...)
}

func publish(ctx context.Context, pipe redis.Pipeliner, space keyspace.Space, typ string, data any) error {
	body, err := json.Marshal(data)
	if err != nil {
		return err
	}
	pipe.XAdd(ctx, &redis.XAddArgs{Stream: space.Ingest(), Values: []any{"type", typ, "data", body}})
	return nil
}

type jobBody struct {
	Payload json.RawMessage `json:"payload"`
}

// divideJobs divides jobs evenly among groups. Each tenant has `each` groups; tenants alternate.
func divideJobs(name string, jobs, tenants, each int) []group {
	groups := make([]group, tenants*each)
	for i := range groups {
		groups[i] = group{
			id: fmt.Sprintf("%s-%d", name, i), tenant: fmt.Sprintf("tenant-%d", i%tenants),
			jobs: jobs*(i+1)/len(groups) - jobs*i/len(groups),
		}
	}
	return groups
}
