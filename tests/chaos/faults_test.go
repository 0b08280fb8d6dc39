package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// These are the kinds of faults, as the report counts them.
const (
	killProcess  = "kill_9"
	stopProcess  = "sigstop"
	restartRedis = "redis_restart"
	delayAll     = "proxy_delay"
	resetAll     = "proxy_reset"
	halfOpen     = "proxy_half_open"
	dropReplies  = "proxy_drop_replies"
	flushScripts = "script_flush"
	fillMemory   = "memory_full"
	cutAOF       = "aof_cut"
	failOver     = "sentinel_failover"
	loseMaster   = "cluster_master_killed"
	swapMaster   = "cluster_failover"
	reshardSlots = "cluster_reshard"
	replaceRole  = "graceful_restart"
)

// These constants name the kinds of faults that administrators' commands and misbehaving clients
// cause.
const (
	delConsumer   = "xgroup_delconsumer"
	setID         = "xgroup_setid"      // forwards: unread entries are skipped
	setIDBack     = "xgroup_setid_back" // entries are delivered again
	destroyGroup  = "xgroup_destroy"
	deleteStream  = "del_stream"
	renameStream  = "rename_stream"
	deleteEntries = "xdel_entries"
	futureID      = "xadd_future_id" // behind the largest possible id Redis refuses every entry
	silentReaders = "client_silent_readers"
	stalledBodies = "client_stalled_bodies"
	endlessLine   = "client_endless_line"
	writeGarbage  = "client_garbage"
	hostileIDs    = "client_hostile_ids"
)

// fault is one planned fault: its time in the phase, its kind, and random numbers that choose, for
// example, the process it hits.
type fault struct {
	at   time.Duration
	kind string
	n    int // number of the fault among those of its kind
	rng  *rand.Rand
}

// schedule returns faults of all kinds in random order, spread evenly over the time `during`. The
// same seed gives the same faults.
func schedule(rng *rand.Rand, kinds counts, during time.Duration) []fault {
	var all []fault
	for _, kind := range slices.Sorted(mapsKeys(kinds)) {
		for n := range kinds[kind] {
			all = append(all, fault{kind: kind, n: n})
		}
	}
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	step := float64(during) / float64(max(1, len(all)))
	for i := range all {
		all[i].at = time.Duration(step * (float64(i) + rng.Float64()))
		all[i].rng = rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
	}
	return all
}

func mapsKeys(c counts) func(func(string) bool) {
	return func(yield func(string) bool) {
		for kind := range c {
			if !yield(kind) {
				return
			}
		}
	}
}

// clock is the format of times of day in a report.
const clock = "15:04:05.000"

// breaker causes faults in a fleet and its Redis, and ends them.
type breaker struct {
	fleet   *fleet
	lease   time.Duration
	server  *redisproc.Server
	rdb     *redis.Client
	proxies []*redisproc.Proxy
	admin   *administrator
	clients *misbehaving

	onRedis sync.RWMutex // one fault of the server at a time; commands on streams share the lock
	onProxy []sync.Mutex

	mu     sync.Mutex
	done   counts // faults that were made without an error
	failed []error
	log    []string // each fault with its time, in the order of their ends
}

// newBreaker starts n proxies in front of the server.
func newBreaker(server *redisproc.Server, lease time.Duration, n int) (*breaker, error) {
	b := &breaker{server: server, lease: lease, done: counts{}, onProxy: make([]sync.Mutex, n)}
	b.rdb = redis.NewClient(&redis.Options{Addr: server.Addr(), MaxRetries: -1, DisableIdentity: true})
	for range n {
		p, err := redisproc.NewProxy(server.Addr())
		if err != nil {
			return nil, err
		}
		b.proxies = append(b.proxies, p)
	}
	return b, nil
}

func (b *breaker) close() {
	if b.clients != nil {
		b.clients.close()
	}
	for _, p := range b.proxies {
		_ = p.Close() // no process uses the proxy any more
	}
	_ = b.rdb.Close()
}

// url returns the Redis URL for the i-th process: that of a proxy. There are several proxies, so
// that a fault can cut off only some of the processes.
func (b *breaker) url(i int) string {
	return "redis://" + b.proxies[i%len(b.proxies)].Addr() + "/0"
}

// run causes all faults of a schedule, each at its time, so that some overlap. It returns when all
// have ended. If ctx ends, it starts no more faults. It returns the first error.
func (b *breaker) run(ctx context.Context, faults []fault) error {
	began := time.Now()
	var under sync.WaitGroup
	for _, f := range faults {
		if redisx.Sleep(ctx, f.at-time.Since(began)) != nil {
			break
		}
		under.Go(func() {
			from := time.Now()
			what, err := b.do(ctx, f)
			b.mu.Lock()
			defer b.mu.Unlock()
			b.log = append(b.log, fmt.Sprintf("%s to %s: %s %s", from.Format(clock), time.Now().Format(clock), f.kind, what))
			if errors.Is(err, errNoEffect) {
				return
			}
			if err != nil {
				b.failed = append(b.failed, fmt.Errorf("%s: %w", f.kind, err))
				return
			}
			b.done[f.kind]++
		})
	}
	under.Wait()
	if len(b.failed) > 0 {
		return b.failed[0]
	}
	return ctx.Err()
}

// do causes one fault and waits until it has ended. It returns details for the log; "" if the kind
// says all.
func (b *breaker) do(ctx context.Context, f fault) (what string, err error) {
	switch f.kind {
	case delConsumer, setID, setIDBack, destroyGroup, deleteStream, renameStream, deleteEntries, futureID:
		b.onRedis.RLock()
		defer b.onRedis.RUnlock()
		return b.admin.run(ctx, f)
	case writeGarbage:
		b.onRedis.RLock()
		defer b.onRedis.RUnlock()
		return b.clients.writeGarbage(ctx, f)
	case silentReaders, stalledBodies, endlessLine, hostileIDs:
		return b.clients.run(ctx, f)
	}
	return "", b.harm(ctx, f)
}

func (b *breaker) harm(ctx context.Context, f fault) error {
	switch f.kind {
	case killProcess:
		return b.target(f.rng).kill(ctx)
	case stopProcess:
		return b.target(f.rng).stop(ctx, between(f.rng, 2*b.lease, 3*b.lease))
	case restartRedis, flushScripts, fillMemory:
		b.onRedis.Lock()
		defer b.onRedis.Unlock()
		return b.harmRedis(ctx, f)
	}
	i := f.rng.IntN(len(b.proxies))
	b.onProxy[i].Lock()
	defer b.onProxy[i].Unlock()
	p := b.proxies[i]
	defer p.Heal()
	switch f.kind {
	case delayAll:
		p.Delay(between(f.rng, 20*time.Millisecond, 1500*time.Millisecond))
	case resetAll:
		p.Reset()
		return nil
	case halfOpen:
		p.HalfOpen()
	case dropReplies:
		p.DropReplies(0.05+0.4*f.rng.Float64(), f.rng)
	}
	return redisx.Sleep(ctx, between(f.rng, 300*time.Millisecond, 2*b.lease))
}

// target chooses the process that a fault hits at random; with a probability of more than one half
// it is a worker.
func (b *breaker) target(rng *rand.Rand) *slot {
	slots := b.fleet.slots
	if rng.IntN(2) == 0 {
		slots = b.fleet.of("worker")
	}
	return slots[rng.IntN(len(slots))]
}

func (b *breaker) harmRedis(ctx context.Context, f fault) error {
	switch f.kind {
	case restartRedis:
		b.server.Kill()
		err := redisx.Sleep(ctx, between(f.rng, 0, time.Second))
		if restart := b.server.Restart(context.WithoutCancel(ctx)); restart != nil {
			return restart
		}
		return err
	case flushScripts:
		return b.rdb.ScriptFlush(ctx).Err()
	}
	if err := b.rdb.ConfigSet(ctx, "maxmemory", "1mb").Err(); err != nil { // less than an empty server uses
		return err
	}
	err := redisx.Sleep(ctx, between(f.rng, time.Second, 3*time.Second))
	if ended := b.rdb.ConfigSet(context.WithoutCancel(ctx), "maxmemory", "0").Err(); ended != nil {
		return ended
	}
	return err
}

func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rng.Int64N(int64(most-least)+1))
}
