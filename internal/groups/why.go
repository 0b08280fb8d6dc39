package groups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

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
	_, w, err := s.why(ctx, p, group, ledger.NextJob, errorRecord{})
	return w, apiError(err)
}

// why looks at a job and explains it. The job may move meanwhile: the explanation is of the state
// that is returned with it.
func (s *Store) why(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64, last errorRecord,
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
	last  errorRecord // of the job's latest failed attempt

	due    time.Time // of a parked job
	reason byte      // why it is parked
	place  int64     // of a ready job in its stream
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
	state, err := c.s.conn.Cmd.GetRange(ctx, c.p.States(c.group), c.Ordinal*2, c.Ordinal*2).Result()
	return state == string(c.State), err
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

// find completes what the look at the job has left open: where it is parked, or its place among
// those that are handed out.
func (c *whyCase) find(ctx context.Context) error {
	var err error
	switch {
	case c.State == ledger.Waiting && c.Place < 0:
		c.Place, err = c.countBefore(ctx)
		return err
	case c.State == ledger.Ready, c.State == 0 && c.Ready > 0:
		err = c.findReady(ctx)
	case c.State == ledger.NonReady && len(c.Types) == 1 && c.last.Until > c.Now.UnixMilli() && c.last.Reason != "":
		// its error tells: no need to look for it among many
		c.due, c.reason = time.UnixMilli(c.last.Until), c.last.Reason[0]
		c.Type = c.Types[0]
	case c.State == ledger.NonReady, c.State == 0 && c.NonReady > 0:
		err = c.findParked(ctx)
	}
	if err != nil || c.TypePaused || c.Type == "" {
		return err
	}
	c.TypePaused, err = c.s.conn.Cmd.HExists(ctx, c.p.Pauses(), pauseOfType+c.Type).Result()
	return err
}

// countBefore counts the group's waiting jobs before this one by their states, a letter for each.
func (c *whyCase) countBefore(ctx context.Context) (int64, error) {
	const chunk = 64 << 10 // bytes
	n := int64(0)
	for from := int64(0); from < c.Ordinal*2; from += chunk {
		states, err := c.s.conn.Cmd.GetRange(ctx, c.p.States(c.group), from, min(from+chunk, c.Ordinal*2)-1).Result()
		if err != nil {
			return 0, err
		}
		for i := 0; i < len(states); i += 2 {
			if ledger.Letter(states[i]) == ledger.Waiting {
				n++
			}
		}
	}
	return n, nil
}

// findParked looks through the tenant's parked jobs, a bounded part at a time, for this one; or for
// the group's that is due first.
func (c *whyCase) findParked(ctx context.Context) error {
	pattern := c.group + "|*"
	if c.Ordinal >= 0 {
		pattern = c.group + "|*|" + strconv.FormatInt(c.Ordinal, 10) + "|*"
	}
	var first *redis.Z
	for _, key := range []string{c.p.NonReadyOf(c.Tenant), c.p.SuspendedOf(c.Tenant)} {
		for cursor := uint64(0); ; {
			page, next, err := c.s.conn.Cmd.ZScan(ctx, key, cursor, pattern, 1000).Result()
			if err != nil {
				return err
			}
			for i := 0; i+1 < len(page); i += 2 {
				blob, ok := readParked(page[i])
				if !ok || blob.group != c.group || (c.Ordinal >= 0 && blob.ordinal != c.Ordinal) {
					continue
				}
				if score, err := strconv.ParseFloat(page[i+1], 64); err == nil &&
					(first == nil || score < first.Score) {
					first = &redis.Z{Score: score, Member: blob}
				}
			}
			if cursor = next; cursor == 0 || (first != nil && c.Ordinal >= 0) {
				break
			}
		}
	}
	if first == nil {
		return errMoved
	}
	blob := first.Member.(parkedJob)
	c.State, c.Ordinal, c.Type, c.due, c.reason = ledger.NonReady, blob.ordinal, blob.typ,
		time.UnixMilli(int64(first.Score)), blob.reason
	return nil
}

// parkedJob is the part of a moving blob that tells why it is parked; lua/parts/blob.lua draws it.
type parkedJob struct {
	group, typ string
	reason     byte // 0: it was handed back
	ordinal    int64
}

func readParked(blob string) (parkedJob, bool) {
	part := strings.SplitN(blob, "|", 13)
	if len(part) < 13 {
		return parkedJob{}, false
	}
	ordinal, err := strconv.ParseInt(part[11], 10, 64)
	j := parkedJob{group: part[0], typ: part[1], ordinal: ordinal}
	if part[10] != "" {
		j.reason = part[10][0]
	}
	return j, err == nil
}

// findReady looks for the job in the ready streams of its types, or for the first one of its group.
// These are short.
func (c *whyCase) findReady(ctx context.Context) error {
	const page, pages = 500, 40
	types := c.Types
	if c.Type != "" {
		types = []string{c.Type}
	}
	for _, typ := range types {
		before, from := int64(0), "-"
		for range pages {
			entries, err := c.s.conn.Cmd.XRangeN(ctx, c.p.Ready(typ), from, "+", page).Result()
			if err != nil {
				return err
			}
			for _, e := range entries {
				blob := ledger.MessageBlob(e.Values)
				d, err := ledger.ParseJob(blob)
				mine := err == nil && d.Group == c.group &&
					(d.Ordinal == c.Ordinal || c.Ordinal < 0 && c.isReady(ctx, d.Ordinal))
				if mine {
					c.State, c.Ordinal, c.Type = ledger.Ready, d.Ordinal, typ
					c.place, err = c.undelivered(ctx, typ, before)
					return err
				}
				before++
			}
			if len(entries) < page {
				break
			}
			from = "(" + entries[len(entries)-1].ID
		}
	}
	return errMoved
}

// isReady tells a job that waits for a worker from one that runs: both lie in the stream.
func (c *whyCase) isReady(ctx context.Context, ordinal int64) bool {
	state, err := c.s.conn.Cmd.GetRange(ctx, c.p.States(c.group), ordinal*2, ordinal*2).Result()
	return err == nil && state == string(ledger.Ready)
}

// undelivered takes those off the entries before one that a worker has taken already.
func (c *whyCase) undelivered(ctx context.Context, typ string, before int64) (int64, error) {
	pending, err := c.s.conn.Cmd.XPending(ctx, c.p.Ready(typ), keyspace.GroupWorkers).Result()
	if err != nil && strings.Contains(err.Error(), "NOGROUP") { // no worker has ever come
		return before, nil
	}
	if err != nil {
		return 0, err
	}
	return max(0, before-pending.Count), nil
}

// served says whether a live worker serves a type.
func (s *Store) served(ctx context.Context, typ string) (bool, error) {
	workers, err := presence.Workers(ctx, s.conn, s.space)
	return slices.ContainsFunc(workers,
		func(w presence.WorkerReport) bool { return slices.Contains(w.Types, typ) }), err
}

// clock writes a time as people read it.
func clock(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }
