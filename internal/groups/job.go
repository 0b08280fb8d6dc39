package groups

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
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Job shows one job.
func (s *Store) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Job{}, err
	}
	if ordinal < 0 || ordinal >= messages.MaxTotal {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	j, last, err := s.job(ctx, p, group, ordinal)
	if err != nil || !mayWait[j.State] {
		return j, apiError(err)
	}
	letter, w, err := s.why(ctx, p, group, ordinal, last)
	if err != nil {
		return j, apiError(err)
	}
	// It may have moved since the first look: the state is the one that is explained.
	if j.State = letter.Word(); mayWait[j.State] {
		j.Waiting, j.Until, j.Why = w.Reason, w.Until, &w
	}
	return j, nil
}

// mayWait are the states in which a job is not running and may still.
var mayWait = map[string]bool{"waiting": true, "non_ready": true, "ready": true}

// job reads a job's state and its latest error.
func (s *Store) job(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64,
) (api.Job, errorRecord, error) {
	field := strconv.FormatInt(ordinal, 10)
	var state, failure, lastErr *redis.StringCmd
	_, err := s.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		state = pipe.GetRange(ctx, p.States(group), ordinal*2, ordinal*2+1)
		failure = pipe.HGet(ctx, p.Failures(group), field)
		lastErr = pipe.HGet(ctx, p.Errors(group), field)
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return api.Job{}, errorRecord{}, fmt.Errorf("read job %s.%d: %w", group, ordinal, err)
	}
	if len(state.Val()) != ledger.StateBytes {
		return api.Job{}, errorRecord{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	now := ledger.State(state.Val())
	j := api.Job{
		ID:       group + "." + field,
		Group:    group,
		Ordinal:  ordinal,
		State:    now.Letter().Word(),
		Attempts: now.Attempt(),
	}
	text := lastErr.Val()
	if failure.Val() != "" {
		text, _, _ = strings.Cut(failure.Val(), "\n")
	}
	if text == "" {
		return j, errorRecord{}, nil
	}
	e, err := parseError(text)
	if err != nil {
		return j, errorRecord{}, nil // written by an older version: the state still holds
	}
	j.LastError = &api.JobError{Code: e.Code, Error: e.Error, At: time.UnixMilli(e.At).UTC()}
	j.Attempts = max(j.Attempts, e.Attempts)
	return j, e, nil
}

// errorRecord is what the scripts write of a failed attempt.
type errorRecord struct {
	Ordinal  int64  `json:"ordinal"`
	Code     string `json:"code"`
	Error    string `json:"error"`
	Attempts int    `json:"attempts"`
	At       int64  `json:"at"`    // ms
	Until    int64  `json:"until"` // ms; 0: it failed for good
	Reason   string `json:"reason"`
}

func parseError(text string) (errorRecord, error) {
	var e errorRecord
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return e, fmt.Errorf("read error record: %w", err)
	}
	return e, nil
}
