package groups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const (
	whyMost  = 200 // types of a group, and groups before it, that are looked at
	whyTries = 3   // at a job that moves while it is looked at
)

// errMoved says that a job was not where its state said.
var errMoved = errors.New("the job moved while it was looked at")

// Why says what the next job of a group waits for.
func (s *Store) Why(ctx context.Context, group string) (api.Why, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Why{}, err
	}
	_, w, err := s.why(ctx, p, group, ledger.NextJob, nil)
	return w, apiError(err)
}

// why looks at a job and explains it. The job may move meanwhile: the explanation is of the state
// that is returned with it.
func (s *Store) why(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64, last *ledger.JobError,
) (ledger.Letter, api.Why, error) {
	for try := 1; ; try++ {
		look, err := ledger.Why(ctx, s.conn.Cmd, p, group, ordinal, whyMost)
		if err != nil {
			return 0, api.Why{}, err
		}
		c := whyCase{s: s, Look: look, p: p, group: group, last: last}
		w, err := c.explain(ctx)
		if err != nil && !errors.Is(err, errMoved) {
			return 0, api.Why{}, fmt.Errorf("explain group %s: %w", group, err)
		}
		if err == nil {
			same, err := c.stays(ctx)
			if err != nil || same || try == whyTries {
				return c.State, w, err
			}
		} else if try == whyTries {
			return c.State, api.Why{
				Job: c.job(),
				Detail: "It is on its way from one place to the next: look again. If it stays so, bulkaction " +
					"audit says whether it vanished.",
			}, nil
		}
	}
}

// whyCase is a job that is to be explained.
type whyCase struct {
	ledger.Look
	s     *Store
	p     keyspace.Partition
	group string
	last  *ledger.JobError // of its latest failed attempt; nil: none

	due    time.Time     // of a non-ready job
	reason ledger.Reason // why it is non-ready
	place  int64         // of a ready job in its stream
}

// job is the id of the job that is explained; "" when there is none.
func (c *whyCase) job() string {
	if c.Ordinal < 0 {
		return ""
	}
	return c.group + "." + strconv.FormatInt(c.Ordinal, 10)
}

// stays says whether the job is still in the state in which it was explained.
func (c *whyCase) stays(ctx context.Context) (bool, error) {
	if c.Ordinal < 0 {
		return true, nil
	}
	letter, err := ledger.ReadLetter(ctx, c.s.conn.Cmd, c.p, c.group, c.Ordinal)
	return letter == c.State, err
}

func (c *whyCase) explain(ctx context.Context) (api.Why, error) {
	if c.Ordinal < 0 {
		if said := c.idle(); said != "" {
			return api.Why{Detail: said}, nil
		}
	}
	if err := c.find(ctx); err != nil {
		return api.Why{}, err
	}
	w := api.Why{Job: c.job()}
	if c.State != ledger.Waiting && c.State != ledger.NonReady && c.State != ledger.Ready ||
		c.Status == api.StatusCancelled {
		w.Detail = ended[c.State]
		if c.Status == api.StatusCancelled {
			w.Detail = "Its group was cancelled: it does not start any more."
		}
		return w, nil
	}
	for _, ask := range []func(context.Context, *api.Why) error{
		c.paused, c.scheduled, c.unserved, c.parked, c.limited, c.inLine,
	} {
		if err := ask(ctx, &w); err != nil || w.Reason != "" {
			return w, err
		}
	}
	return w, nil
}

var ended = map[ledger.Letter]string{
	ledger.InFlight:  "It is running.",
	ledger.Done:      "It is done; its result is being reduced.",
	ledger.Reduced:   "It is done.",
	ledger.Failed:    "It has failed for good.",
	ledger.Cancelled: "It was cancelled.",
}

// idle says what a group waits for that has no job to start; "" when it has one.
func (c *whyCase) idle() string {
	switch {
	case c.Status.Ended():
		return "The group has ended: it is " + string(c.Status) + "."
	case c.Status == api.StatusAggregating:
		return "All of its jobs have ended; their results are being reduced."
	case c.Ready+c.NonReady > 0:
		return ""
	case c.InFlight == 1:
		return "No job of it waits: the last one is running."
	case c.InFlight > 0:
		return fmt.Sprintf("No job of it waits: the last %d are running.", c.InFlight)
	case c.Ended >= c.Accepted:
		return "All jobs that it was given have ended. It is not sealed, or about to end: more jobs may come."
	}
	return "Its jobs are on their way from one place to the next: look again."
}

// find completes what the look at the job has left open: its due time if it is non-ready, or its
// place in the ready stream.
func (c *whyCase) find(ctx context.Context) error {
	var err error
	switch {
	case c.State == ledger.Waiting && c.Place < 0:
		c.Place, err = ledger.CountWaiting(ctx, c.s.conn.Cmd, c.p, c.group, c.Ordinal)
		return err
	case c.State == ledger.Ready, c.State == 0 && c.Ready > 0:
		err = c.findReady(ctx)
	case c.State == ledger.NonReady && len(c.Types) == 1 &&
		c.last != nil && c.last.Until > c.Now.UnixMilli() && c.last.Reason != "":
		// The error record says when and why: no need to search the tenant's non-ready jobs.
		c.due, c.reason = time.UnixMilli(c.last.Until), ledger.Reason(c.last.Reason[0])
		c.Type = c.Types[0]
	case c.State == ledger.NonReady, c.State == 0 && c.NonReady > 0:
		err = c.findNonReady(ctx)
	}
	if err != nil || c.TypePaused || c.Type == "" {
		return err
	}
	c.TypePaused, err = ledger.TypePaused(ctx, c.s.conn.Cmd, c.p, c.Type)
	return err
}

func (c *whyCase) findNonReady(ctx context.Context) error {
	j, found, err := ledger.FindNonReady(ctx, c.s.conn.Cmd, c.p, c.Tenant, c.group, c.Ordinal)
	if err != nil {
		return err
	}
	if !found {
		return errMoved
	}
	c.State, c.Ordinal, c.Type, c.due, c.reason = ledger.NonReady, j.Ordinal, j.Type, j.Due, j.Reason
	return nil
}

func (c *whyCase) findReady(ctx context.Context) error {
	types := c.Types
	if c.Type != "" {
		types = []string{c.Type}
	}
	j, found, err := ledger.FindReady(ctx, c.s.conn.Cmd, c.p, types, c.group, c.Ordinal)
	if err != nil {
		return err
	}
	if !found {
		return errMoved
	}
	c.State, c.Ordinal, c.Type, c.place = ledger.Ready, j.Ordinal, j.Type, j.Before
	return nil
}

// served says whether a live worker serves a type.
func (s *Store) served(ctx context.Context, typ string) (bool, error) {
	workers, err := presence.Workers(ctx, s.conn, s.space)
	return slices.ContainsFunc(workers,
		func(w presence.WorkerReport) bool { return slices.Contains(w.Types, typ) }), err
}

// clock writes a time as people read it.
func clock(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }
