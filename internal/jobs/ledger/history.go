package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

const (
	// SampleSlot is the length of a slot of time. Of each slot one sample is kept.
	SampleSlot = 10 * time.Second
	// MaxSamples is how many samples are kept: those of a day.
	MaxSamples = int(24 * time.Hour / SampleSlot)
)

var history = call.NewScript("history", lua.Source("processes/history"))

// Sample is the figures of the installation at one time. It has totals and no rates: a rate is
// computed from two samples, whatever time lies between them.
type Sample struct {
	At time.Time `json:"-"` // by Redis
	api.JobTotals
	api.Gauges
}

// RecordSample stores a sample, unless a sample of the same slot or a later one is stored. It first
// deletes samples of the future, which a clock that was set back has left. It reports whether it
// has stored the sample. Twice: the second call stores nothing.
func RecordSample(ctx context.Context, c redis.Cmdable, space keyspace.Space, s Sample) (bool, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return false, fmt.Errorf("encode a sample of the history: %w", err)
	}
	args := []any{s.At.UnixMilli(), SampleSlot.Milliseconds(), MaxSamples, text}
	r := history.Read(ctx, c, []string{space.History()}, args)
	stored := r.Flag()
	if err := r.Err(); err != nil {
		return false, fmt.Errorf("store a sample of the history: %w", err)
	}
	return stored, nil
}

// Samples returns the n newest samples, the newest first. It leaves out what it can't read.
func Samples(ctx context.Context, c redis.Cmdable, space keyspace.Space, n int) ([]Sample, error) {
	lines, err := c.LRange(ctx, space.History(), 0, int64(n)-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the history: %w", err)
	}
	samples := make([]Sample, 0, len(lines))
	for _, line := range lines {
		at, text, _ := strings.Cut(line, " ")
		ms, err := strconv.ParseInt(at, 10, 64)
		var s Sample
		if err == nil {
			err = json.Unmarshal([]byte(text), &s)
		}
		if err != nil {
			continue
		}
		s.At = time.UnixMilli(ms).UTC()
		samples = append(samples, s)
	}
	return samples, nil
}
