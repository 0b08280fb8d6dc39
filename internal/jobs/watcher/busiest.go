package watcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

const (
	// busiestEvery is the time between the begins of two searches for the busiest tenants. A
	// search of 100,000 active tenants takes 10 s, so that what it finds is at most 30 s old.
	busiestEvery = 20 * time.Second
	// busiestRate is how many active tenants one process reads in a second at most, so that the
	// searches take less than 2% of Redis's time.
	busiestRate = 10_000
)

// findBusiest returns a function that is to be called every second. Once in busiestEvery it finds
// and stores the busiest tenants of each partition that this process leads, one partition after the
// other.
func findBusiest(partitions []*partition) func(context.Context) error {
	var began time.Time
	return func(ctx context.Context) error {
		if time.Since(began) < busiestEvery {
			return nil
		}
		var errs error
		now := time.Now()
		for _, p := range partitions {
			if _, leads := p.leadership(); !leads {
				continue
			}
			began = now
			if err := p.store.MeasureBusiest(ctx, p.Partition, pace); err != nil {
				errs = errors.Join(errs, fmt.Errorf("busiest tenants of partition %d: %w", p.Index(), err))
			}
		}
		return errs
	}
}

// pace sleeps after n tenants were read, so that at most busiestRate are read in a second.
func pace(ctx context.Context, n int) error {
	return redisx.Sleep(ctx, time.Duration(n)*time.Second/busiestRate)
}
