package groups

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// layoutOfLimits is the first layout in which all processes read limits from Redis.
const layoutOfLimits = 3

// applyWait is how long a change of limits waits until it is in effect.
const applyWait = 2 * time.Second

// Limits returns the limits of all jobs together and of types.
func (s *Store) Limits(ctx context.Context) (api.Limits, error) {
	set, err := ledger.ReadLimitSettings(ctx, s.conn.Cmd, s.space)
	if err != nil {
		return api.Limits{}, apiError(err)
	}
	l, err := s.limits(ctx, set, set.Rev)
	return l, apiError(err)
}

// PatchLimits changes global limits, and waits until they are in effect.
func (s *Store) PatchLimits(ctx context.Context, patch api.LimitsPatch) (api.Limits, error) {
	if rps := patch.Global.RPS.Value; rps != nil {
		if err := s.checkRate("global.rps", *rps); err != nil {
			return api.Limits{}, err
		}
	}
	return s.changeLimits(ctx, func(set ledger.LimitSettings) (ok bool, err error) {
		if err := s.checkBackoffs(set, patch.Global); err != nil {
			return false, err
		}
		return ledger.SetLimits(ctx, s.conn.Cmd, s.space, set.Rev, patch.Global, nil)
	})
}

// PatchType changes the limits of a type, and waits until they are in effect.
func (s *Store) PatchType(ctx context.Context, typ string, patch api.TypePatch) (api.Limits, error) {
	if patch.RPS.Value != nil {
		if err := s.checkRate("rps", *patch.RPS.Value); err != nil {
			return api.Limits{}, err
		}
	}
	return s.changeLimits(ctx, func(set ledger.LimitSettings) (ok bool, err error) {
		ends := patch.RPS.Value == nil && patch.InFlight.Value == nil
		if _, known := set.Types[typ]; !known && !ends && len(set.Types) >= api.MaxLimitedTypes {
			return false, fmt.Errorf("type %s: %d types have limits of their own, no more may: end one of them: %w",
				typ, len(set.Types), api.ErrConflict)
		}
		return ledger.SetLimits(ctx, s.conn.Cmd, s.space, set.Rev, api.GlobalPatch{}, map[string]api.TypePatch{typ: patch})
	})
}

// checkLayout refuses limits that processes of an earlier version would not keep.
func (s *Store) checkLayout() error {
	if s.space.Layout() >= layoutOfLimits {
		return nil
	}
	return fmt.Errorf("limits and bounds can be set when all processes have this version: run bulkaction migrate: %w",
		api.ErrConflict)
}

// checkRate refuses a rate of less than one permit in a window: a window has at least one.
func (s *Store) checkRate(field string, rps int64) error {
	if window := s.cfg.Meter.Window.Milliseconds(); window > 0 && rps > 0 && rps*window < 1000 {
		return badField(field, fmt.Sprintf("must be at least %d with windows of %s", (999+window)/window, s.cfg.Meter.Window))
	}
	return nil
}

func badField(field, problem string) error {
	return &messages.ValidationError{Fields: []messages.FieldError{{Field: field, Problem: problem}}}
}

// checkBackoffs refuses a change after which the first backoff would be longer than the longest one.
func (s *Store) checkBackoffs(set ledger.LimitSettings, p api.GlobalPatch) error {
	after := func(change api.Change[string], have *time.Duration, configured string) time.Duration {
		text := configured
		if change.Value != nil {
			text = *change.Value
		} else if have != nil && !change.Given {
			return *have
		}
		d, _ := time.ParseDuration(text) // the API and the configuration have checked it
		return d
	}
	if !p.DefaultBackoff.Given && !p.MaxBackoff.Given {
		return nil
	}
	first := after(p.DefaultBackoff, set.DefaultBackoff, s.cfg.Configured.DefaultBackoff)
	longest := after(p.MaxBackoff, set.MaxBackoff, s.cfg.Configured.MaxBackoff)
	switch {
	case first <= longest:
		return nil
	case p.DefaultBackoff.Given:
		return badField("global.default_backoff", fmt.Sprintf("must not be longer than max_backoff, which is %s", longest))
	}
	return badField("global.max_backoff", fmt.Sprintf("must not be shorter than default_backoff, which is %s", first))
}

// changeLimits calls change with the settings as they are, again if somebody else has changed them
// meanwhile, and then waits until the change is in effect, for applyWait at most.
func (s *Store) changeLimits(
	ctx context.Context, change func(ledger.LimitSettings) (bool, error),
) (l api.Limits, err error) {
	if err := s.checkLayout(); err != nil {
		return l, err
	}
	var set ledger.LimitSettings
	for ok := false; !ok; {
		if set, err = ledger.ReadLimitSettings(ctx, s.conn.Cmd, s.space); err == nil {
			ok, err = change(set)
		}
		if err != nil {
			return l, apiError(err)
		}
	}
	rev, end := set.Rev+1, time.Now().Add(applyWait)
	if absent, _, err := presence.Absent(ctx, s.conn, s.space, "fetcher"); err == nil && len(absent) > 0 {
		end = time.Now() // nobody will bring it to the partitions
	}
	for {
		_ = s.ask(ctx, func(ctx context.Context) error { return ledger.WakeLimits(ctx, s.conn.Cmd, s.space) })
		if set, err = ledger.ReadLimitSettings(ctx, s.conn.Cmd, s.space); err != nil {
			return l, apiError(err)
		}
		if set.Applied >= rev || time.Now().After(end) || redisx.Sleep(ctx, 20*time.Millisecond) != nil {
			break
		}
	}
	l, err = s.limits(context.WithoutCancel(ctx), set, rev)
	return l, apiError(err)
}

// limits returns the view of the settings. The partitions are asked whether they know the revision rev.
func (s *Store) limits(ctx context.Context, set ledger.LimitSettings, rev int64) (api.Limits, error) {
	l := api.Limits{
		Global: s.globalLimits(set), Types: map[string]api.TypeLimits{},
		Limiter: s.cfg.Meter.Limiter, WindowMS: s.cfg.Meter.Window.Milliseconds(),
		AppliedAt: timeIfAfter(set.AppliedAt, time.Time{}), ProcessesThatDiffer: []api.ProcessLimits{},
	}
	for typ, t := range set.Types {
		entries, _ := s.entries(ctx, typ) // of the partitions that answer
		l.Types[typ] = api.TypeLimits{RPS: t.RPS, InFlight: t.InFlight, InFlightNow: entries}
	}
	if set.Applied < rev {
		l.AppliedAt = nil
		pending := make([]bool, s.space.Partitions())
		_ = concurrently(ctx, len(pending), func(ctx context.Context, i int) error {
			return s.ask(ctx, func(ctx context.Context) error {
				known, err := ledger.AppliedRev(ctx, s.conn.Cmd, s.space.Partition(i))
				pending[i] = err != nil || known < rev
				return nil
			})
		})
		for i, is := range pending {
			if is {
				l.PendingPartitions = append(l.PendingPartitions, i)
			}
		}
		if l.PendingPartitions == nil { // the leader is about to say so
			l.AppliedAt = timeIfAfter(time.Now(), time.Time{})
		}
	}
	processes, err := presence.Configured(ctx, s.conn, s.space)
	for _, p := range processes {
		if p.ConfiguredLimits != s.cfg.Configured {
			l.ProcessesThatDiffer = processes
		}
	}
	return l, err
}

// globalLimits returns the global limits in effect: what was set while processes run, or else the
// environment of the leader.
func (s *Store) globalLimits(set ledger.LimitSettings) api.GlobalLimits {
	own := s.cfg.Configured
	leader := own
	if set.Leader != nil {
		leader = *set.Leader
	}
	text := func(d *time.Duration) *string {
		if d == nil {
			return nil
		}
		t := d.String()
		return &t
	}
	return api.GlobalLimits{
		RPS:            settingOf(own.RPS, leader.RPS, set.RPS),
		Share:          settingOf(own.Share, leader.Share, set.Share),
		DefaultBackoff: settingOf(own.DefaultBackoff, own.DefaultBackoff, text(set.DefaultBackoff)),
		MaxBackoff:     settingOf(own.MaxBackoff, own.MaxBackoff, text(set.MaxBackoff)),
	}
}

func settingOf[T any](own, leader T, set *T) api.LimitSetting[T] {
	if set == nil {
		return api.LimitSetting[T]{Configured: own, Effective: leader, Source: api.SourceEnvironment}
	}
	return api.LimitSetting[T]{Configured: own, Effective: *set, Source: api.SourceAPI}
}

// askTimeout is how long limits wait for one partition: its node may hang.
const askTimeout = 500 * time.Millisecond

func (s *Store) ask(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return do(ctx)
}

// entries returns how many entries a type has in the ready streams of all partitions; after an error,
// of those that have answered.
func (s *Store) entries(ctx context.Context, typ string) (sum int64, err error) {
	counts, errs := make([]int64, s.space.Partitions()), make([]error, s.space.Partitions())
	_ = concurrently(ctx, len(counts), func(ctx context.Context, i int) error {
		errs[i] = s.ask(ctx, func(ctx context.Context) (err error) {
			counts[i], err = s.conn.Cmd.XLen(ctx, s.space.Partition(i).Ready(typ)).Result()
			return err
		})
		return nil
	})
	for i, n := range counts {
		sum, err = sum+n, cmp.Or(err, errs[i])
	}
	if err != nil {
		err = fmt.Errorf("read jobs in flight of type %s: %w", typ, err)
	}
	return sum, err
}
