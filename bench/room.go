package main

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

const (
	brokerRole = "broker"
	// userHeader is the HTTP header with the user's id. The brokers trust it because it comes from
	// loopback.
	userHeader = "X-Bench-User"
)

// roomBench is one run of the benchmark of the waiting room: a Redis, the brokers on it, and ingest
// for the calls of a shop. The users are goroutines of this process.
type roomBench struct {
	options
	*fleet
	roomCalls
	users    int     // with a stream each, in each part but enter, empty and scripts
	count    int     // of brokers
	kill     int     // brokers that the part kill kills
	capacity int     // slots of the part kill
	rate     float64 // admissions a second of the part promotion

	settings map[string]string // of the processes
	dir      string            // of the token key
	public   string            // URL of the brokers
	brokers  []string          // host:port of those that run
	shop     string            // base URL of ingest

	faults      map[string]int // what must not happen, over all parts
	violations  []string       // faults that must never happen, such as a lost user
	mostStreams int
	scripts     values // figures that are no part of the contract of the JSON
}

var roomBenchmark = benchmark{
	"room", "The waiting room: streams, entries, promotions, killed brokers; each frame and token is checked",
	func(f *flags) runner {
		b := &roomBench{violations: []string{}, scripts: values{"cpus": runtime.NumCPU()}, faults: map[string]int{
			"position_rises":   0, // positions above the one before
			"order_inversions": 0, // users promoted before a lower number that was present
			"over_capacity":    0, // tokens received while all slots had valid tokens
			"lost":             0, // users who got no token
		}}
		f.int(&b.users, "users", 3000, 10, 20_000, "users with a stream each")
		f.int(&b.count, "brokers", 2, 1, 64, "broker processes")
		f.int(&b.kill, "kill", 1, 1, 63, "brokers that the part kill kills")
		f.int(&b.capacity, "capacity", 0, 0, 20_000, "slots of the part kill; 0: a quarter of the users")
		f.float(&b.rate, "rate", 1000, 1, 100_000, "admissions a second of the part promotion")
		parts := f.parts(
			part{"streams", b.streams}, part{"enter", b.enter}, part{"promotion", b.promotion},
			part{"kill", b.killBrokers})
		return func(ctx context.Context, o options) (any, error) {
			if b.capacity == 0 {
				b.capacity = max(1, b.users/4)
			}
			if b.kill >= b.count {
				b.kill = b.count - 1
			}
			defer b.close()
			b.start(ctx, o)
			out, err := runParts(ctx, o, parts(), false)
			b.scripts["overrides"] = b.settings
			for name, n := range b.faults {
				out[name] = n
			}
			return out.with(values{
				"users": b.users, "brokers": b.count, "streams": b.mostStreams, "scripts": b.scripts,
				"violations": b.violations,
			}), err
		}
	},
}

// start starts Redis, the brokers and ingest.
func (b *roomBench) start(ctx context.Context, o options) {
	b.options, b.dir = o, must(os.MkdirTemp("", "bulkaction-room-"))
	_, key, err := ed25519.GenerateKey(nil)
	check(err)
	keys := filepath.Join(b.dir, "token-keys.pem")
	block := &pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(key))}
	check(os.WriteFile(keys, pem.EncodeToMemory(block), 0o600))
	b.fleet = startRedis(ctx, o)
	b.roomCalls = newRoomCalls(b.fleet, "bulk-action:") // the default prefix
	addrs := make([]string, b.count)
	for i := range addrs {
		addrs[i] = childproc.FreeAddr()
	}
	b.public = "http://" + addrs[0]
	b.settings = o.overrides(
		"BULKACTION_BROKER_IDENTITY=header", "BULKACTION_BROKER_IDENTITY_HEADER="+userHeader,
		"BULKACTION_BROKER_TRUSTED_PROXIES=127.0.0.1/32", "BULKACTION_BROKER_MAX_CONNECTIONS_PER_IP=1000000",
		"BULKACTION_BROKER_ENTER_RATE_PER_IP=1000000", "BULKACTION_BROKER_TOKEN_KEYS_FILE="+keys,
		"BULKACTION_BROKER_PUBLIC_URL="+b.public, "BULKACTION_BROKER_DRAIN=0s")
	for i, addr := range addrs {
		b.startBroker(ctx, i, addr)
	}
	shop := childproc.FreeAddr()
	env := maps.Clone(b.settings)
	env["BULKACTION_API_ADDR"] = shop
	b.shop = "http://" + shop
	b.startRole(o, "ingest", 0, env, "")
	check(b.awaitHTTP(ctx, b.shop+"/v1/stats"))
}

// startBroker starts the i-th broker and waits until it answers.
func (b *roomBench) startBroker(ctx context.Context, i int, addr string) {
	env := maps.Clone(b.settings)
	env["BULKACTION_BROKER_ADDR"] = addr
	b.brokers = append(b.brokers, addr)
	b.startRole(b.options, brokerRole, i, env, "")
	check(b.awaitHTTP(ctx, keysURL(addr)))
}

func keysURL(broker string) string { return "http://" + broker + "/.well-known/jwks.json" }

func (b *roomBench) close() {
	if b.fleet != nil {
		b.fleet.close()
	}
	_ = os.RemoveAll(b.dir)
}

// violatef notes a violation, unless 100 are noted already.
func (b *roomBench) violatef(format string, args ...any) {
	if len(b.violations) < 100 {
		b.violations = append(b.violations, fmt.Sprintf(format, args...))
	}
}

const (
	// streamsWindow is how long CPU time and the ages of positions are measured; commandsWindow is
	// how long Redis commands are then counted.
	streamsWindow  = 8 * time.Second
	commandsWindow = 4 * time.Second
	// standstill is how long nobody is promoted before positions are checked. The contract says
	// that all shown positions are exact after a second.
	standstill = 2500 * time.Millisecond
)

// streams measures users who wait for one event, each on a stream of its own. One user a second is
// promoted, so that each stream gets a frame with a new position each second.
func (b *roomBench) streams(ctx context.Context) values {
	const event = "streams"
	b.declare(ctx, event, func(s *waitingroom.Settings) { s.Capacity, s.Rate, s.Burst = int64(b.users), 1, 1 })
	before := b.resident()
	c, numbers := b.enterWaiting(ctx, event, 0)
	defer c.end()
	b.setMode(ctx, event, api.ModeOpen)
	check(redisx.Sleep(ctx, time.Second)) // a first round of frames
	frames := c.mark()
	used := b.measure(ctx, func() { check(redisx.Sleep(ctx, streamsWindow)) })
	frames = c.frames.Load() - frames
	commands := 0.0
	for _, n := range countCommands(ctx, b.server.URL(), commandsWindow) {
		commands += float64(n)
	}
	after := b.resident()
	b.setMode(ctx, event, api.ModePaused)
	check(redisx.Sleep(ctx, standstill))
	queue := b.numbers(ctx, event)
	visits := c.end()
	b.judge(c, numbers, b.users, false)
	if wrong := wrongPositions(visits, queue); len(wrong) > 0 {
		b.violatef("%d users have a wrong position after the queue has stood still, first %s", len(wrong), wrong[0])
	}
	b.forget(ctx, event)
	b.scripts["frame_cpu_us"] = perJob(used.roles[brokerRole], int(max(frames, 1)))
	b.scripts["frames_per_second"] = round2(float64(frames) / used.took.Seconds())
	return values{
		"rss_kib_per_stream":        round2((after - before) / float64(b.users)), // of the brokers
		"position_age_p99_ms":       percentile(c.ages, 99),
		"redis_cpu_ratio":           ratio(used.redis.cpu.Seconds(), used.took.Seconds()),
		"redis_commands_per_second": round2(commands / commandsWindow.Seconds() / float64(b.count)), // of a broker
	}
}

// resident returns the resident memory of all brokers in KiB.
func (b *roomBench) resident() (sum float64) {
	for _, pid := range b.pids()[brokerRole] {
		sum += memoryOf(pid, "VmRSS:")
	}
	return sum
}

// enter measures POST …/ticket: as fast as the brokers answer over 32 connections, and at 3,000 users
// a second, from the time at which a call was due until its answer.
func (b *roomBench) enter(ctx context.Context) values {
	const connections, span, paced = 32, 3, 3000
	b.declare(ctx, "enter", func(*waitingroom.Settings) {})
	var conns [connections]net.Conn
	var answers [connections]*bufio.Reader
	for i := range conns {
		conns[i] = must(net.Dial("tcp", b.brokers[i%len(b.brokers)]))
		defer conns[i].Close()
		answers[i] = bufio.NewReader(conns[i])
	}
	var next atomic.Int64
	enter := func(_ context.Context, i int) error {
		_, err := fmt.Fprintf(conns[i],
			"POST /events/enter/ticket HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n%s: e%d\r\n\r\n",
			conns[i].RemoteAddr(), userHeader, next.Add(1))
		if err != nil {
			return err
		}
		resp, err := http.ReadResponse(answers[i], nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			return fmt.Errorf("status %s for a new user", resp.Status)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	var entered int
	used := b.measure(ctx, func() { entered = must(saturate(ctx, connections, span, enter)) })
	waits := make([]float64, paced*span)
	check(pace(ctx, paced, len(waits), func(ctx context.Context, i int, due time.Time) error {
		err := enter(ctx, i%paceSenders)
		waits[i] = millis(time.Since(due))
		return err
	}))
	b.forget(ctx, "enter")
	b.scripts["enter_cpu_us"] = perJob(used.roles[brokerRole], max(entered, 1))
	b.scripts["enter_redis_cpu_us"] = perJob(used.redis.cpu, max(entered, 1))
	return values{
		"enter_per_second": round2(float64(entered) / used.took.Seconds()), "enter_p99_ms": round2(percentile(waits, 99)),
	}
}

// promotion measures the time from the promotion of a user, by Redis's clock, until the user has
// received the entry token, while users are promoted at a steady rate.
func (b *roomBench) promotion(ctx context.Context) values {
	const event = "promotion"
	b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.Rate, s.Burst = int64(b.users), b.rate, max(1, int64(b.rate/20))
	})
	c, numbers := b.enterWaiting(ctx, event, 0)
	defer c.end()
	used := b.measure(ctx, func() {
		b.setMode(ctx, event, api.ModeOpen)
		c.await(ctx, func() bool { return c.nAdmitted.Load() == int64(b.users) })
	})
	ms := admittedAfter(c.end(), func(v visit) int64 { return v.fence })
	b.judge(c, numbers, b.users, true)
	b.forget(ctx, event)
	b.scripts["promotion_cpu_us"] = perJob(used.roles[brokerRole], max(1, len(ms)))
	b.scripts["promotion_redis_cpu_us"] = perJob(used.redis.cpu, max(1, len(ms)))
	return values{
		"promote_to_admitted_p50_ms": round2(percentile(ms, 50)),
		"promote_to_admitted_p99_ms": round2(percentile(ms, 99)),
	}
}

// admittedAfter returns, for each user with a token, the ms from a time (µs) to its receipt.
func admittedAfter(visits []visit, from func(visit) int64) (ms []float64) {
	for _, v := range visits {
		if v.admitted > 0 {
			ms = append(ms, float64(v.admitted-from(v))/1000)
		}
	}
	return ms
}

// killBrokers kills brokers, as a crash does, while slots become free and are given to the next
// users all the time. It measures the time from the break of a user's stream until a later stream
// has shown the user the position or the token. At the end it starts these brokers again.
func (b *roomBench) killBrokers(ctx context.Context) values {
	const event = "kill"
	b.declare(ctx, event, func(s *waitingroom.Settings) {
		// A broker may die just after one of its users was promoted. The times are long enough for
		// this user to reach another broker and still have the slot. If a user never returns, the
		// slot is free within a minute.
		s.Capacity, s.TokenTTL, s.Leeway, s.Ready = int64(b.capacity), 30*time.Second, 5*time.Second, 30*time.Second
	})
	c, numbers := b.enterWaiting(ctx, event, time.Second)
	defer c.end()
	b.setMode(ctx, event, api.ModeOpen)
	c.await(ctx, func() bool { return c.nAdmitted.Load() >= int64(b.users/10) })
	victims, from := slices.Clone(b.brokers[:b.kill]), time.Now()
	for range victims {
		i := slices.IndexFunc(b.procs, func(p process) bool { return p.role == brokerRole })
		victim := b.procs[i]
		b.procs = slices.Delete(b.procs, i, i+1)
		victim.Kill()
	}
	// Streams that broke up to 2 s after the last kill count too: a user notices the end a little
	// later.
	to := time.Now().Add(2 * time.Second)
	c.await(ctx, func() bool { return c.nShown.Load()+c.nAdmitted.Load() >= int64(b.users) })
	after := b.numbers(ctx, event)
	c.await(ctx, func() bool { return c.nEnded.Load() == int64(b.users) })
	r := checkReturns(c.end(), from.UnixMicro(), to.UnixMicro(), numbers, after)
	b.judge(c, numbers, b.capacity, true)
	if r.users == 0 {
		b.violatef("no stream was broken: the killed broker had no users")
	}
	if lost := slices.Concat(r.notBack, r.notKept); len(lost) > 0 {
		b.violatef("%d users did not come back and %d lost their places, first %s", len(r.notBack), len(r.notKept), lost[0])
	}
	leaked := b.leakedSlots(ctx, event)
	for i, addr := range victims { // for the next parts
		b.brokers = b.brokers[1:]
		b.startBroker(ctx, b.count+i, addr)
	}
	b.forget(ctx, event)
	b.scripts["broken_streams"], b.scripts["slots_leaked"] = r.users, leaked
	return values{
		"returned_p99_s": round2(percentile(r.seconds, 99)),
		"places_kept":    ratio(r.users-len(r.notBack)-len(r.notKept), r.users), // part of the users
	}
}

// leakedSlots waits until all slots of an event are free, at most a minute. It returns how many are
// still in use: these are a violation.
func (b *roomBench) leakedSlots(ctx context.Context, event string) (slots int) {
	began := time.Now()
	check(b.await(ctx, "free slots", pollInterval, func() (int, error) {
		s, err := b.rooms.Snapshot(ctx, b.space.OfEvent(event), event)
		if slots = 0; len(s.Events) > 0 {
			slots = int(s.Events[0].Used)
		}
		if time.Since(began) > time.Minute {
			return 0, err
		}
		return slots, err
	}))
	if slots > 0 {
		b.violatef("%d slots are in use a minute after the last user has left", slots)
	}
	return slots
}

// roomCalls are the calls that the benchmark itself makes on events, directly in Redis.
type roomCalls struct {
	on    *fleet
	rooms *waitingroom.Rooms
	space keyspace.Space
}

func newRoomCalls(on *fleet, prefix string) roomCalls {
	space := must(keyspace.New(prefix, 1))
	return roomCalls{on, waitingroom.New(on.conn, space, nil), space}
}

// declare creates an event. It is paused, so that nobody is promoted yet, unless change sets
// another mode. change may set other settings too.
func (e roomCalls) declare(ctx context.Context, event string, change func(*waitingroom.Settings)) {
	s := waitingroom.Settings{
		MaxWaiting: 10_000_000, TokenTTL: 5 * time.Minute, Leeway: 10 * time.Second, MaxSession: 15 * time.Minute,
		Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait",
		Mode: api.ModePaused, Retention: time.Hour,
	}
	change(&s)
	must(e.rooms.Declare(ctx, event, s, waitingroom.DeclareOptions{}))
}

func (e roomCalls) setMode(ctx context.Context, event, mode string) {
	must(e.rooms.Change(ctx, event, waitingroom.Changes{Mode: mode}))
}

// numbers returns the ticket numbers of the present, waiting users of an event, by user.
func (e roomCalls) numbers(ctx context.Context, event string) map[string]int64 {
	const page = 1000
	out := map[string]int64{}
	for last := int64(0); ; {
		users := must(e.on.conn.Cmd.ZRangeByScoreWithScores(ctx, e.space.OfEvent(event).RoomWaiting(event),
			&redis.ZRangeBy{Min: "(" + strconv.FormatInt(last, 10), Max: "+inf", Count: page}).Result())
		for _, u := range users {
			user, _ := u.Member.(string)
			last = int64(u.Score)
			out[user] = last
		}
		if len(users) < page {
			return out
		}
	}
}

// forget closes an event and waits until its queue is empty, so that it costs nothing while other
// parts are measured. Brokers delete the event.
func (e roomCalls) forget(ctx context.Context, event string) {
	retention, capacity := time.Duration(0), int64(0)
	must(e.rooms.Change(ctx, event, waitingroom.Changes{
		Mode: api.ModeClosed, Retention: &retention, Capacity: &capacity,
	}))
	check(e.on.await(ctx, "the end of event "+event, pollInterval, func() (left int, err error) {
		s, err := e.rooms.Snapshot(ctx, e.space.OfEvent(event), event)
		for _, one := range s.Events {
			left += int(one.Waiting + one.Away)
		}
		return left, err
	}))
}
