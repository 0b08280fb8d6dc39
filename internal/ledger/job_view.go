package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// JobError is the record of a failed attempt. Scripts write it as JSON.
type JobError struct {
	Ordinal  int64  `json:"ordinal"`
	Code     string `json:"code"`
	Error    string `json:"error"`
	Attempts int    `json:"attempts"`
	At       int64  `json:"at"`     // ms
	Until    int64  `json:"until"`  // due time of the next attempt, ms; 0: there is none
	Reason   string `json:"reason"` // a Reason, why the job became non-ready
}

// Time returns when the attempt failed.
func (e *JobError) Time() time.Time { return time.UnixMilli(e.At).UTC() }

func parseJobError(text string) (JobError, error) {
	var e JobError
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return e, fmt.Errorf("read error record: %w", err)
	}
	return e, nil
}

// JobStatus is a job's state and the record of its latest failed attempt.
type JobStatus struct {
	State State
	Err   *JobError // nil: no attempt has failed, or the record can't be read
}

// ReadJob reads a job's state and latest error in one round trip. Errors: api.ErrNotFound.
func ReadJob(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) (JobStatus, error) {
	field := strconv.FormatInt(ordinal, 10)
	var state, failure, lastErr *redis.StringCmd
	// Each reply has the error of the pipeline or its own.
	_, _ = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		state = pipe.GetRange(ctx, p.States(group), StateBytes*ordinal, StateBytes*ordinal+StateBytes-1)
		failure = pipe.HGet(ctx, p.Failures(group), field)
		lastErr = pipe.HGet(ctx, p.Errors(group), field)
		return nil
	})
	for _, cmd := range []*redis.StringCmd{state, failure, lastErr} {
		if err := cmd.Err(); err != nil && !errors.Is(err, redis.Nil) {
			return JobStatus{}, fmt.Errorf("read job %s.%d: %w", group, ordinal, err)
		}
	}
	if len(state.Val()) != StateBytes {
		return JobStatus{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	j := JobStatus{State: State(state.Val())}
	text := lastErr.Val()
	if failure.Val() != "" {
		text, _, _ = strings.Cut(failure.Val(), layout.RecordSeparator)
	}
	if e, err := parseJobError(text); text != "" && err == nil {
		j.Err = &e
	}
	return j, nil
}

// ReadLetter reads the state letter of a job; 0 for an unknown job.
func ReadLetter(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) (Letter, error) {
	letter, err := c.GetRange(ctx, p.States(group), StateBytes*ordinal, StateBytes*ordinal).Result()
	if err != nil || letter == "" {
		return 0, err
	}
	return Letter(letter[0]), nil
}

// CountWaiting counts a group's waiting jobs whose ordinal is below before. It reads the states in
// pieces of 32,768 jobs.
func CountWaiting(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, before int64,
) (int64, error) {
	const piece = 64 << 10 // bytes
	n, end := int64(0), StateBytes*before
	for from := int64(0); from < end; from += piece {
		states, err := c.GetRange(ctx, p.States(group), from, min(from+piece, end)-1).Result()
		if err != nil {
			return 0, err
		}
		for i := 0; i < len(states); i += StateBytes {
			if Letter(states[i]) == Waiting {
				n++
			}
		}
	}
	return n, nil
}
