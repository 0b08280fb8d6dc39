package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/entry"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// visit is what one simulated user did and received. Times are µs since 1970 by the clock of this
// host, on which Redis and the brokers run too.
type visit struct {
	user    string
	number  int64  // of the user's ticket; 0: unknown. Users do not see it: judge sets it
	sent    int64  // just before the user opened the first connection
	entered int64  // the first frame that the user received; 0: none. The user has a ticket by then
	streams []span // each from its first frame to its end

	position int64 // that was shown last; 0: none
	rises    int   // positions that were above the one before

	admitted int64 // receipt of the token; 0: none
	// fence is the fence of the user's token. It is the time of the promotion by Redis's clock
	// (µs), or a few µs later if several users were promoted at once.
	fence   int64
	expires int64  // of the token
	freed   int64  // just before the slot was given back; 0: it was not
	open    bool   // at the end the user has a stream and no token
	ended   string // reason of the frame ended
}

// span is the time in which a stream was open.
type span struct {
	from, to int64
	own      bool  // the user ended it
	shown    int64 // when the first position or the token was shown; 0: never
	before   int64 // position that was shown last before it
	first    int64 // first position that was shown on it
}

// crowd is a number of users of one event, each with a stream of its own.
type crowd struct {
	*roomBench
	event    string
	session  time.Duration // time inside; 0: until the end of the crowd
	verifier *entry.Verifier
	visitors []*visitor
	cancel   context.CancelFunc
	running  sync.WaitGroup

	frames atomic.Int64 // of all kinds
	// nOpen and nShown are numbers of streams at present: those that have had a frame, and those that
	// have shown a position or the token. The others are numbers of users so far.
	nOpen, nShown, nAdmitted, nEnded atomic.Int64

	mu    sync.Mutex
	ages  []float64 // ms, of position frames since mark
	wrong []string  // violations
}

// startUsers lets users enter: perSecond a second, or 64 at a time if it is 0.
func (b *roomBench) startUsers(
	ctx context.Context, event string, users int, perSecond float64, session time.Duration,
) *crowd {
	verifier := must(entry.New(ctx, entry.Config{
		PublicURL: b.public, Event: event, JWKSURL: keysURL(b.brokers[0]), Leeway: tokenLeeway,
	}))
	c := &crowd{roomBench: b, event: event, session: session, verifier: verifier}
	for i := range users {
		c.visitors = append(c.visitors, &visitor{crowd: c, broker: i, visit: visit{user: event + strconv.Itoa(i)}})
	}
	ctx, c.cancel = context.WithCancel(ctx)
	c.running.Go(func() {
		free, began := make(chan struct{}, 64), time.Now()
		for i, v := range c.visitors {
			entered := func() {}
			if perSecond > 0 {
				_ = redisx.Sleep(ctx, time.Until(began.Add(seconds(float64(i)/perSecond))))
			} else {
				select {
				case free <- struct{}{}:
					entered = func() { <-free }
				case <-ctx.Done():
				}
			}
			if ctx.Err() != nil {
				return
			}
			c.running.Go(func() { v.run(ctx, sync.OnceFunc(entered)) })
		}
	})
	return c
}

// enterWaiting lets b.users users enter and waits until each stream has shown a position, or until
// the counts of users do not change any more: judge reports the missing users. It also returns the
// numbers of the waiting users.
func (b *roomBench) enterWaiting(
	ctx context.Context, event string, session time.Duration,
) (*crowd, map[string]int64) {
	c := b.startUsers(ctx, event, b.users, 0, session)
	c.await(ctx, func() bool { return c.nShown.Load() == int64(b.users) })
	b.mostStreams = max(b.mostStreams, int(c.nOpen.Load()))
	return c, b.numbers(ctx, event)
}

// await waits until reached accepts the counts of users. If these do not change for 20 s, it
// returns without an error: users are lost then, and judge reports which.
func (c *crowd) await(ctx context.Context, reached func() bool) {
	counts := func() [4]int64 {
		return [4]int64{c.nOpen.Load(), c.nShown.Load(), c.nAdmitted.Load(), c.nEnded.Load()}
	}
	last, changed := counts(), time.Now()
	for !reached() && time.Since(changed) < 20*time.Second {
		if now := counts(); now != last {
			last, changed = now, time.Now()
		}
		check(redisx.Sleep(ctx, pollInterval))
		check(c.check())
	}
}

// mark forgets the ages of positions so far, and returns the number of frames.
func (c *crowd) mark() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ages = nil
	return c.frames.Load()
}

// end stops all users, and returns what they received. It may be called again.
func (c *crowd) end() []visit {
	c.cancel()
	c.running.Wait()
	var out []visit
	for _, v := range c.visitors {
		if v.sent > 0 { // the others have not begun
			out = append(out, v.visit)
		}
	}
	return out
}

func (c *crowd) violatef(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// visitor simulates one user with a browser.
type visitor struct {
	*crowd
	visit
	broker int // index of the broker that is asked next
	retry  time.Duration
	token  string // "": none
	now    span   // the present stream; from is 0 before its first frame
}

const (
	// longestSilence is the longest time without a frame. A stream is silent for at most
	// BROKER_HEARTBEAT, 15 s.
	longestSilence = 40 * time.Second
	refusedDelay   = 50 * time.Millisecond // before the next broker is tried, as behind a load balancer
)

// run acts as the user until the user has left or ctx ends. It calls entered after the first frame,
// or when there will be none.
func (v *visitor) run(ctx context.Context, entered func()) {
	defer v.nEnded.Add(1)
	defer entered()
	v.sent, v.retry = time.Now().UnixMicro(), 3*time.Second // EventSource's own delay
	for ctx.Err() == nil && v.admitted == 0 && v.ended == "" {
		delay := v.retry
		if !v.stream(ctx, entered) {
			delay = refusedDelay
		}
		if v.admitted == 0 {
			_ = redisx.Sleep(ctx, delay)
		}
	}
	if v.admitted > 0 && v.session > 0 && redisx.Sleep(ctx, v.session) == nil {
		v.leave(ctx)
	}
}

// stream opens a stream at the next broker and reads it until it ends, or until the user has a
// token and goes on to the shop. It returns false if the broker did not accept the connection.
func (v *visitor) stream(ctx context.Context, entered func()) bool {
	addr := v.brokers[v.broker%len(v.brokers)]
	v.broker++ // a load balancer sends the next request elsewhere
	dialer := net.Dialer{Timeout: 5 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	v.now = span{before: v.position}
	defer v.endStream(ctx)
	// If the broker has ended, there is no answer.
	_, _ = fmt.Fprintf(conn,
		"GET /events/%s/tickets/waiting HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\n%s: %s\r\n\r\n",
		v.event, addr, userHeader, v.user)
	// Small buffers: there are thousands of streams.
	answer, err := http.ReadResponse(bufio.NewReaderSize(conn, 512), nil)
	if err != nil {
		return true
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		v.violatef("user %s: a stream is answered with %s", v.user, answer.Status)
		v.ended = answer.Status
		return true
	}
	err = readFrames(answer.Body, func() { _ = conn.SetReadDeadline(time.Now().Add(longestSilence)) }, func(f frame) bool {
		if f.retry > 0 {
			v.retry = f.retry
		}
		if f.event != "" {
			v.receive(ctx, f)
			entered()
		}
		return v.admitted == 0
	})
	_ = conn.Close() // otherwise Body.Close would read the rest of the stream
	var timeout net.Error
	if ctx.Err() == nil && errors.As(err, &timeout) && timeout.Timeout() {
		v.violatef("user %s: a stream was silent for %s", v.user, longestSilence)
	}
	return true
}

// endStream stores the present stream, if it has had a frame.
func (v *visitor) endStream(ctx context.Context) {
	if v.now.from == 0 {
		return
	}
	stopped := ctx.Err() != nil
	v.now.to, v.now.own = time.Now().UnixMicro(), stopped || v.admitted > 0
	v.open = stopped && v.admitted == 0
	v.streams = append(v.streams, v.now)
	v.nOpen.Add(-1)
	if v.now.shown > 0 {
		v.nShown.Add(-1)
	}
}

// frame is one event of an event stream (WHATWG HTML, section Server-sent events).
type frame struct {
	event, id string
	data      []byte        // valid until the function returns that gets the frame
	retry     time.Duration // of the field retry; 0: none
}

// readFrames reads an event stream and calls emit for each frame until emit returns false or the
// stream ends. It calls before, if that is not nil, before it waits for a line.
func readFrames(body io.Reader, before func(), emit func(frame) bool) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 512), 4<<20)
	var f frame
	for {
		if before != nil {
			before()
		}
		if !lines.Scan() {
			return lines.Err()
		}
		name, value, _ := bytes.Cut(lines.Bytes(), []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "event":
			f.event = string(value)
		case "id":
			f.id = string(value)
		case "data":
			f.data = append(f.data, value...)
		case "retry":
			ms, _ := strconv.Atoi(string(value))
			f.retry = time.Duration(ms) * time.Millisecond
		case "":
			if len(lines.Bytes()) > 0 { // a comment
				continue
			}
			if !emit(f) {
				return nil
			}
			f = frame{data: f.data[:0]}
		}
	}
}

// receive handles a frame of the present stream.
func (v *visitor) receive(ctx context.Context, f frame) {
	at := time.Now()
	v.frames.Add(1)
	if v.now.from == 0 {
		v.now.from = at.UnixMicro()
		v.nOpen.Add(1)
		v.entered = cmp.Or(v.entered, v.now.from)
		if f.event == "position" || f.event == "admitted" {
			v.violatef("user %s: the first frame is %s", v.user, f.event)
		}
	}
	var err error
	switch f.event {
	case "state":
		var s struct{ State, Mode string }
		if err = json.Unmarshal(f.data, &s); err == nil && (s.State == "" || s.Mode == "") {
			err = fmt.Errorf("no state or mode in %s", f.data)
		}
	case "position":
		err = v.receivePosition(f.data, at)
	case "admitted":
		err = v.receiveToken(ctx, f.data, at)
	case "ended":
		var e struct{ Reason string }
		err = json.Unmarshal(f.data, &e)
		if v.ended = e.Reason; f.id != "ended" {
			err = fmt.Errorf("the id of ended is %q", f.id)
		}
	case "reconnect": // then the server closes
	default:
		err = fmt.Errorf("unknown frame %q", f.event)
	}
	if err != nil {
		v.violatef("user %s: %s: %v", v.user, f.event, err)
	}
}

func (v *visitor) receivePosition(data []byte, at time.Time) error {
	var p struct {
		Position, Total int64
		At              time.Time
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	if p.Position < 1 || p.Total < p.Position || p.At.IsZero() {
		return fmt.Errorf("impossible values: %s", data)
	}
	v.mu.Lock()
	v.ages = append(v.ages, float64(at.Sub(p.At).Milliseconds()))
	v.mu.Unlock()
	v.show(at)
	v.now.first = cmp.Or(v.now.first, p.Position)
	if v.position > 0 && p.Position > v.position {
		if v.rises++; v.rises == 1 {
			v.violatef("user %s: the position rises from %d to %d", v.user, v.position, p.Position)
		}
	}
	v.position = p.Position
	return nil
}

// show notes that the stream has shown where the user stands.
func (v *visitor) show(at time.Time) {
	if v.now.shown == 0 {
		v.now.shown = at.UnixMicro()
		v.nShown.Add(1)
	}
}

// longestToken is the contract's limit of a token, in bytes.
const longestToken = 600

func (v *visitor) receiveToken(ctx context.Context, data []byte, at time.Time) error {
	var t struct {
		Token     string
		ExpiresAt time.Time `json:"expires_at"`
	}
	if err := json.Unmarshal(data, &t); err != nil {
		return err
	}
	claims, err := v.verifier.Verify(ctx, t.Token)
	if err != nil {
		return err
	}
	fence, err := strconv.ParseInt(claims.Fence, 10, 64)
	switch d := t.ExpiresAt.Sub(claims.ExpiresAt); {
	case err != nil || fence <= 0:
		return fmt.Errorf("the fence of the token is %q", claims.Fence)
	case claims.User != v.user || claims.Event != v.event:
		return fmt.Errorf("the token is of user %s and event %s", claims.User, claims.Event)
	case len(t.Token) > longestToken:
		return fmt.Errorf("the token has %d bytes, more than %d", len(t.Token), longestToken)
	case d < 0 || d >= time.Second:
		return fmt.Errorf("expires_at is %s later than exp", d)
	}
	v.show(at)
	v.admitted, v.fence, v.expires, v.token = at.UnixMicro(), fence, claims.ExpiresAt.UnixMicro(), t.Token
	v.nAdmitted.Add(1)
	return nil
}

// leave ends the session with a call of the API, as the shop does.
func (v *visitor) leave(ctx context.Context) {
	v.freed = time.Now().UnixMicro()
	shop, err := entry.NewClient(v.shop, nil)
	done := false
	if err == nil {
		done, err = shop.Complete(ctx, v.token, false)
	}
	if err == nil && !done {
		err = errors.New("the token is gone before its expiry")
	}
	if err != nil && ctx.Err() == nil && time.Now().Before(time.UnixMicro(v.expires)) {
		v.violatef("user %s: give the slot back: %v", v.user, err)
	}
}

// tokenLeeway is the time after its expiry for which a verifier may still accept a token.
const tokenLeeway = entry.MaxLeeway

// judge checks what the users of a crowd that has ended have received. It counts all violations,
// and describes the first ones. capacity is the number of slots. With admitAll, users who still
// wait at the end count as lost.
func (b *roomBench) judge(c *crowd, numbers map[string]int64, capacity int, admitAll bool) {
	for _, text := range c.wrong {
		b.violatef("%s", text)
	}
	visits := c.end()
	for i := range visits {
		v := &visits[i]
		v.number = numbers[v.user]
		b.faults["position_rises"] += v.rises
		if v.ended != "" && v.admitted == 0 {
			b.violatef("user %s: the stream has ended: %s", v.user, v.ended)
		}
	}
	if n := inversionsOf(visits); n > 0 {
		b.faults["order_inversions"] += n
		b.violatef("%d users were promoted before a lower number", n)
	}
	if n := overCapacity(visits, capacity); n > 0 {
		b.faults["over_capacity"] += n
		b.violatef("%d tokens over the capacity of %d", n, capacity)
	}
	if users := lostUsers(visits, admitAll); len(users) > 0 {
		b.faults["lost"] += len(users)
		b.violatef("%d users are lost: %s", len(users), strings.Join(users[:min(3, len(users))], ", "))
	}
}

// overCapacity returns the number of tokens that were received while at least capacity other tokens
// were valid. A token is valid from its receipt until its expiry and tokenLeeway, or until its user
// gave the slot back.
func overCapacity(visits []visit, capacity int) (over int) {
	type edge struct {
		at     int64
		change int
	}
	var edges []edge
	for _, v := range visits {
		if v.admitted > 0 {
			to := v.expires + tokenLeeway.Microseconds()
			if v.freed > 0 {
				to = min(to, v.freed)
			}
			edges = append(edges, edge{v.admitted, 1}, edge{to, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.change, b.change))
	})
	valid := 0
	for _, e := range edges {
		if valid += e.change; e.change > 0 && valid > capacity {
			over++
		}
	}
	return over
}

const (
	// settling is how much later (µs) than the user a broker may notice the end of a stream.
	settling = 200_000
	// longestDelivery is the longest time (µs) from the promotion until a connected user has the
	// token. If the message about the promotion is lost, the broker's delivery check finds the user
	// after a second.
	longestDelivery = 3_000_000
)

// inversionsOf returns the number of users who were promoted out of order: before another user who
// had a lower number and was present and waiting. If a number is unknown, the order of entering
// decides: a user whose enter was answered before the other one sent its request has the lower
// number.
func inversionsOf(visits []visit) (n int) {
	byPromotion := slices.Clone(visits)
	slices.SortFunc(byPromotion, func(a, b visit) int {
		if a.fence == 0 || b.fence == 0 {
			return cmp.Compare(b.fence, a.fence) // users who were not promoted come last
		}
		return cmp.Compare(a.fence, b.fence)
	})
	for i := range byPromotion {
		promoted := &byPromotion[i]
		if promoted.fence == 0 {
			break
		}
		for k := i + 1; k < len(byPromotion); k++ {
			if later := &byPromotion[k]; hasLowerNumber(later, promoted) && later.presentAt(promoted.fence) {
				n++
				break
			}
		}
	}
	return n
}

func hasLowerNumber(a, b *visit) bool {
	if a.number > 0 && b.number > 0 {
		return a.number < b.number
	}
	return a.entered > 0 && a.entered < b.sent
}

// presentAt says whether a user who had a number at the time at (µs) waited on an open stream then,
// and the stream stayed open for a while longer: for settling, or, without a token, for
// longestDelivery, because the user may have been promoted and have left before the token came.
func (v *visit) presentAt(at int64) bool {
	until := at + settling
	if v.admitted == 0 {
		until = at + longestDelivery
	}
	for i, s := range v.streams {
		// The first stream counts from the moment of entering, which may be before its first frame.
		if (i == 0 || s.from <= at) && s.to >= until {
			return true
		}
	}
	return false
}

// lostUsers returns the users who got no token. Unless admitAll is set, it leaves out users who
// still wait on an open stream.
func lostUsers(visits []visit, admitAll bool) (users []string) {
	for _, v := range visits {
		if v.admitted == 0 && (admitAll || !v.open || v.entered == 0) {
			users = append(users, v.user)
		}
	}
	return users
}

// wrongPositions returns the users of the queue with an open stream whose last position is not the
// rank of their number among all numbers in the queue. Nobody may have been promoted for a second
// or more.
func wrongPositions(visits []visit, numbers map[string]int64) (users []string) {
	queue := make([]int64, 0, len(numbers))
	for _, n := range numbers {
		queue = append(queue, n)
	}
	slices.Sort(queue)
	for _, v := range visits {
		n, waits := numbers[v.user]
		if !waits || !v.open {
			continue
		}
		if lower, _ := slices.BinarySearch(queue, n); v.position != int64(lower)+1 {
			users = append(users, v.user)
		}
	}
	return users
}

// returns has what happened to users whose stream was broken.
type returns struct {
	users   int       // who lost a stream that they did not end themselves
	seconds []float64 // from the loss until a later stream showed the position or the token
	notKept []string  // users whose place or token was lost
	notBack []string  // users who were shown neither on a later stream
}

// checkReturns checks the users whose stream broke between from and to (µs). before and after have
// the numbers of the waiting users, read before the streams broke and after all users were back. A
// place is kept if the number is the same, or is missing because the user got a token, and if the
// first position on the new stream is not above the last one on the old stream.
func checkReturns(visits []visit, from, to int64, before, after map[string]int64) (r returns) {
	for _, v := range visits {
		i := slices.IndexFunc(v.streams, func(s span) bool { return !s.own && s.to >= from && s.to <= to })
		if i < 0 || v.admitted > 0 && v.admitted <= v.streams[i].to {
			continue
		}
		r.users++
		later := v.streams[i+1:]
		shown := slices.IndexFunc(later, func(s span) bool { return s.shown > 0 })
		if shown < 0 {
			r.notBack = append(r.notBack, v.user)
			continue
		}
		next := later[shown]
		r.seconds = append(r.seconds, float64(next.shown-v.streams[i].to)/1e6)
		number, waits := after[v.user]
		same := waits && number == before[v.user] || !waits && v.admitted > 0
		if rose := next.first > next.before && next.before > 0; !same || rose {
			r.notKept = append(r.notKept, v.user)
		}
	}
	return r
}
