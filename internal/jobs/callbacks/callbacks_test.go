package callbacks_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/callbacks"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

var loopback = webhook.Policy{
	Policy: egress.Policy{AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, AllowHTTP: true,
}

// world is an installation with callbacks.
type world struct {
	*stagetest.World
	callbacks groups.Callbacks
}

func with(w *stagetest.World, policy webhook.Policy) *world {
	w.T.Helper()
	path := filepath.Join(w.T.TempDir(), "key")
	require.NoError(w.T, os.WriteFile(path, []byte(strings.Repeat("k", 32)), 0o600))
	keys, err := webhook.ReadKeys(path)
	require.NoError(w.T, err)
	all := &world{World: w, callbacks: groups.Callbacks{Keys: keys, Policy: policy}}
	w.Store = w.NewStore(groups.Config{Callbacks: all.callbacks})
	return all
}

// watch runs a watcher that sends callbacks.
func (w *world) watch(id string) (stop func()) {
	w.T.Helper()
	events, err := wm.NewPublisher(w.Connect())
	require.NoError(w.T, err)
	return w.Run(watcher.New(stagetest.Process(w.World, id), watcher.Config{
		Interval:  time.Hour,
		Callbacks: callbacks.Config{Callbacks: w.callbacks, Concurrency: 4, Activity: activity.New(w.Conn.Cmd, w.Space, 0, w.Tel.Log)},
	}, w.Store, events))
}

// endpoint sets where tenant acme gets told.
func (w *world) endpoint(url string, events ...string) {
	w.T.Helper()
	_, err := w.Store.SetCallback(stagetest.Trusted(w.T), "acme", api.CallbackSettings{URL: url, Events: events})
	require.NoError(w.T, err)
}

// ended stores a group of acme and lets it end; with a code as failed.
func (w *world) ended(id, url, code string) {
	w.T.Helper()
	w.Submit(messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Seal: true, CallbackURL: url, Jobs: stagetest.Numbered(1)})
	w.Admit("T")
	if code != "" {
		w.Fail(code, w.Take("T", "c", 1)...)
	} else {
		w.Done(`{}`, w.Take("T", "c", 1)...)
		w.Reduce()
	}
}

// call is a request that a receiver got.
type call struct {
	id, signature string
	event         api.WebhookEvent
	valid         error // whether the signature is
}

// receiver is an endpoint that answers with a status.
type receiver struct {
	*httptest.Server
	w      *world
	mu     sync.Mutex
	calls  []call
	answer func(w http.ResponseWriter)
}

func (w *world) receiver() *receiver {
	r := &receiver{w: w, answer: func(http.ResponseWriter) {}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		got := call{id: req.Header.Get(webhook.HeaderID), signature: req.Header.Get(webhook.HeaderSignature)}
		_ = json.Unmarshal(body, &got.event)
		got.valid = webhook.Verify(w.callbacks.Keys.Secret("acme", 1), req.Header, body, time.Now())
		r.mu.Lock()
		r.calls = append(r.calls, got)
		answer := r.answer
		r.mu.Unlock()
		answer(rw)
	}))
	w.T.Cleanup(r.Close)
	return r
}

func (r *receiver) answers(code int, header ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = func(w http.ResponseWriter) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, strings.Repeat("€", 1000))
	}
}

func (r *receiver) got(n int) []call {
	r.w.T.Helper()
	var all []call
	r.w.Await(fmt.Sprintf("%d calls", n), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		all = slices.Clone(r.calls)
		return len(all) >= n
	})
	require.Len(r.w.T, all, n)
	return all
}

func (w *world) list(state string) []api.Callback {
	w.T.Helper()
	list, err := w.Store.Callbacks(stagetest.Trusted(w.T), api.CallbackQuery{State: state, Limit: 1000})
	require.NoError(w.T, err)
	require.Empty(w.T, list.Cursor)
	return list.Callbacks
}

// one waits until exactly one callback is in a state, and fits.
func (w *world) one(state string, fits func(api.Callback) bool) (found api.Callback) {
	w.T.Helper()
	w.Await("a callback that is "+state, func() bool {
		all := w.list(state)
		if len(all) == 1 {
			found = all[0]
		}
		return len(all) == 1 && fits(found)
	})
	return found
}

func (w *world) none() {
	w.T.Helper()
	w.Await("no callbacks", func() bool { return len(w.list(api.CallbackPending))+len(w.list(api.CallbackDead)) == 0 })
}

func TestEndpointsAreToldOfTheEndsOfGroups(t *testing.T) {
	stagetest.Both(t, func(in *stagetest.World) {
		w := with(in, loopback)
		w.watch("w")
		tenants, own := w.receiver(), w.receiver()
		w.endpoint(tenants.URL)
		w.ended("g", "", "")
		first := tenants.got(1)[0]
		require.Equal(w.T, "g.1.completed", first.id)
		require.NoError(w.T, first.valid)
		require.Equal(w.T, "group.completed", first.event.Type)
		require.Equal(w.T, api.StatusCompleted, first.event.Data.Status)
		require.Equal(w.T, w.Group("g").Timestamps["completed"], first.event.Timestamp)
		require.Equal(w.T, api.Counts{Accepted: 1, Done: 1}, first.event.Data.Counts)

		w.ended("h", own.URL+"/hook?token=x", "X") // its own URL alone
		require.Equal(w.T, "h.1.failed", own.got(1)[0].id)
		require.NoError(w.T, own.got(1)[0].valid)
		require.Equal(w.T, own.URL+"/hook?token=x", own.got(1)[0].event.Data.CallbackURL)

		_, err := w.Store.RotateCallbackSecret(stagetest.Trusted(w.T), "acme")
		require.NoError(w.T, err)
		w.endpoint(tenants.URL, "group.created", "group.cancelled")
		w.Submit(messages.SubmitGroup{ID: "i", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)})
		_, err = w.Store.Cancel(stagetest.Trusted(w.T), "i")
		require.NoError(w.T, err)
		all := tenants.got(3)
		ids := []string{all[1].id, all[2].id}
		slices.Sort(ids)
		require.Equal(w.T, []string{"i.1.cancelled", "i.1.created"}, ids)
		for _, c := range all[1:] {
			require.NoError(w.T, c.valid, "the old secret is valid for a day")
			require.Len(w.T, strings.Fields(c.signature), 2)
		}
		w.none()
	})
}

func TestAnswers(t *testing.T) {
	stagetest.Both(t, func(in *stagetest.World) {
		w := with(in, loopback)
		stop := w.watch("w")
		ctx, r := stagetest.Trusted(w.T), w.receiver()
		w.endpoint(r.URL)
		r.answers(500)
		w.ended("g", "", "")
		c := w.one(api.CallbackPending, func(c api.Callback) bool { return c.Tries == 1 })
		require.Equal(w.T, "answered 500 Internal Server Error", c.Error)
		require.Equal(w.T, strings.Repeat("€", 1024/3), c.Answer)
		require.Equal(w.T, r.URL, c.URL)
		require.WithinRange(w.T, *c.NextAt, time.Now(), time.Now().Add(7*time.Second))
		var at api.TenantCallback
		endpoint := func(is func() bool) {
			w.Await("the endpoint's health", func() bool {
				var err error
				at, err = w.Store.Callback(ctx, "acme")
				require.NoError(w.T, err)
				return is()
			})
		}
		endpoint(func() bool { return at.FailingSince != nil })
		require.EqualValues(w.T, 1, at.Pending)

		r.answers(503, "Retry-After", "3600")
		_, err := w.Store.Redeliver(ctx, c.ID)
		require.NoError(w.T, err)
		c = w.one(api.CallbackPending, func(c api.Callback) bool { return c.NextAt.After(time.Now().Add(time.Minute)) })
		require.WithinDuration(w.T, time.Now().Add(time.Hour), *c.NextAt, time.Minute)
		require.Zero(w.T, c.Tries, "it has all its tries again, and who asks for patience uses none")

		elsewhere := w.receiver()
		r.answers(302, "Location", elsewhere.URL)
		_, err = w.Store.Redeliver(ctx, c.ID)
		require.NoError(w.T, err)
		w.one(api.CallbackPending, func(c api.Callback) bool { return c.Tries == 1 && c.Error == "answered 302 Found" })
		elsewhere.got(0)

		r.answers(410)
		_, err = w.Store.Redeliver(ctx, c.ID)
		require.NoError(w.T, err)
		w.one(api.CallbackDead, func(c api.Callback) bool { return c.DiedAt != nil && c.NextAt == nil })
		endpoint(func() bool { return at.DisabledAt != nil })
		w.Await("the activity log", func() bool {
			acts, err := activity.New(w.Conn.Cmd, w.Space, 0, w.Tel.Log).Read(ctx, activity.Query{Limit: 10})
			require.NoError(w.T, err)
			return len(acts.Activity) == 1 && acts.Activity[0].Action == "callback.disable" && acts.Activity[0].Tenant == "acme"
		})
		w.ended("h", "", "") // nobody is told
		w.Await("the outbox to be empty", func() bool { return w.Conn.Cmd.XLen(ctx, w.P.Outbox()).Val() == 0 })
		require.Len(w.T, r.got(4), 4)

		// The dead one has no body any more.
		r.answers(200)
		w.endpoint(r.URL)
		stop()
		sent, err := w.Store.RedeliverDead(ctx, "acme")
		require.NoError(w.T, err)
		require.Equal(w.T, api.Redelivered{Redelivered: 1}, sent)
		require.Empty(w.T, w.list(api.CallbackDead))
		w.watch("v")
		again := r.got(5)[4]
		require.Equal(w.T, "g.1.completed", again.id)
		require.NoError(w.T, again.valid)
		require.Equal(w.T, r.got(5)[0].event, again.event)
		w.none()
		require.ErrorIs(w.T, func() error { _, err := w.Store.Redeliver(ctx, c.ID); return err }(), api.ErrNotFound)
	})
}

// TestADeletedEndpoint: what is pending dies when it is due.
func TestADeletedEndpoint(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	r := w.receiver()
	r.answers(500)
	w.endpoint(r.URL)
	w.watch("w")
	w.ended("g", "", "")
	w.one(api.CallbackPending, func(c api.Callback) bool { return c.Tries == 1 })
	require.NoError(t, w.Store.DeleteCallback(stagetest.Trusted(t), "acme"))
	_, err := w.Store.Redeliver(stagetest.Trusted(t), "g.1.completed")
	require.NoError(t, err)
	w.one(api.CallbackDead, func(c api.Callback) bool { return c.Error == "the tenant has no callback endpoint any more" })
	require.Len(t, r.got(1), 1)
	sent, err := w.Store.RedeliverDead(stagetest.Trusted(t), "")
	require.NoError(t, err)
	require.Equal(t, api.Redelivered{Refused: 1}, sent)
}

// TestSlowEndpointsHoldNobodyUp: one has two slots, and many share half of them.
func TestSlowEndpointsHoldNobodyUp(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	release := make(chan struct{})
	var called, hangs atomic.Int64
	var urls []string
	for range 3 {
		slow := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			called.Add(1)
			if hangs.Load() > 0 {
				<-release
			}
			<-time.After(1100 * time.Millisecond)
		}))
		t.Cleanup(slow.Close)
		urls = append(urls, slow.URL)
		w.ended(fmt.Sprint("a", len(urls)), slow.URL, "")
	}
	t.Cleanup(func() { close(release) })
	good := w.receiver()
	w.watch("w")
	w.Await("all endpoints to be known as slow", func() bool { return called.Load() == 3 && len(w.list(api.CallbackPending)) == 0 })
	hangs.Store(1)
	for i := range 6 {
		w.ended(fmt.Sprint("h", i), urls[i%3], "")
	}
	w.Await("slow calls", func() bool { return called.Load() > 3 })
	for i := range 5 {
		w.ended(fmt.Sprint("b", i), good.URL, "")
	}
	good.got(5)
	require.EqualValues(t, 3+2, called.Load(), "half of four slots")
}

// TestAStoppedWatcherGivesBackWhatItSends, and the next one sends it at once.
func TestAStoppedWatcherGivesBackWhatItSends(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	r := w.receiver()
	release, began := make(chan struct{}), make(chan struct{}, 1)
	r.answer = func(http.ResponseWriter) { began <- struct{}{}; <-release }
	t.Cleanup(func() { close(release) })
	stop := w.watch("w")
	w.ended("g", r.URL, "")
	<-began
	stop()
	r.mu.Lock()
	r.answer = func(http.ResponseWriter) {}
	r.mu.Unlock()
	w.watch("v")
	require.Equal(t, "g.1.completed", r.got(2)[1].id)
	w.none()
}

// TestRefusedAddresses: no connection is made to them.
func TestRefusedAddresses(t *testing.T) {
	w := with(stagetest.Shared(t), webhook.Policy{AllowHTTP: true}) // not parallel: it changes the resolver
	connections := 0
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ConnState = func(net.Conn, http.ConnState) { connections++ }
	server.Start()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	require.NoError(t, err)
	for _, url := range []string{
		server.URL, "http://user@example.com/", "http://[::1]:" + port, "http://10.1.2.3/", "http://localhost:" + port, "http://LocalHost.:" + port, "ftp://example.com",
		"http://[::ffff:127.0.0.1]:" + port, "http://", "//example.com", "http://example.com/#a", "https://example.com/" + strings.Repeat("x", 10_000),
	} {
		_, err := w.Store.SetCallback(stagetest.Trusted(t), "acme", api.CallbackSettings{URL: url})
		require.Contains(t, fields(err), "url", url)
		_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "x", Tenant: "acme", Type: "T", CallbackURL: url}, groups.Origin{})
		require.Contains(t, fields(err), "callback_url", url)
	}
	resolveToLoopback(t)
	w.watch("w")
	w.ended("g", "http://example.com:"+port, "") // the address is checked when the connection is made
	c := w.one(api.CallbackPending, func(c api.Callback) bool { return c.Tries == 1 })
	require.Contains(t, c.Error, "not a public address")
	require.NotContains(t, c.Error, port)
	require.Zero(t, connections)
}

// resolveToLoopback lets each name have the address 127.0.0.1.
func resolveToLoopback(t *testing.T) {
	dns, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	var served sync.WaitGroup
	served.Go(func() {
		for packet := make([]byte, 512); ; {
			n, from, err := dns.ReadFrom(packet)
			if err != nil {
				return
			}
			var question dnsmessage.Message
			if question.Unpack(packet[:n]) != nil {
				continue
			}
			answer := dnsmessage.Message{Header: dnsmessage.Header{ID: question.ID, Response: true}, Questions: question.Questions}
			if q := question.Questions[0]; q.Type == dnsmessage.TypeA {
				answer.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class}, Body: &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}},
				}}
			}
			text, _ := answer.Pack()
			_, _ = dns.WriteTo(text, from)
		}
	})
	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", dns.LocalAddr().String())
	}}
	t.Cleanup(func() {
		net.DefaultResolver = before
		_ = dns.Close()
		served.Wait()
	})
}

// fields returns the fields that an error names.
func fields(err error) (all []string) {
	if bad, ok := err.(*messages.ValidationError); ok { //nolint:errorlint // it is not wrapped
		for _, f := range bad.Fields {
			all = append(all, f.Field)
		}
	}
	return all
}

func TestWithoutKeysThereAreNoCallbacks(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.SetCallback(stagetest.Trusted(t), "acme", api.CallbackSettings{URL: "https://example.com"})
	require.ErrorContains(t, err, "BULKACTION_CALLBACK_MASTER_KEY_FILE")
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "x", Type: "T", CallbackURL: "https://example.com"}, groups.Origin{})
	require.Equal(t, []string{"callback_url"}, fields(err))
}

// TestAnEndpointThatIsDeadForDays: a callback is tried eight times in 28 hours and then dies; after five
// days of failures alone the endpoint is disabled.
func TestAnEndpointThatIsDeadForDays(t *testing.T) {
	mini := miniredis.RunT(t)
	now := time.Now()
	mini.SetTime(now)
	w := with(stagetest.New(t, "redis://"+mini.Addr(), "a:", 1), loopback)
	r := w.receiver()
	r.answers(500)
	w.endpoint(r.URL)
	var stop func()
	for day, tries := 0, 0; day < 6; day++ {
		id := fmt.Sprint("g", day)
		w.ended(id, "", "")
		dead := func() bool {
			return slices.ContainsFunc(w.list(api.CallbackDead), func(c api.Callback) bool { return c.Group == id })
		}
		began, before := now, len(w.list(api.CallbackDead))
		if stop == nil {
			stop = w.watch("w")
		}
		for !dead() {
			w.Await("a try", func() bool {
				all := w.list(api.CallbackPending)
				return len(all) == 1 && all[0].Tries > tries || dead()
			})
			if all := w.list(api.CallbackPending); len(all) == 1 {
				tries = all[0].Tries
				require.True(t, all[0].NextAt.After(now))
				now = *all[0].NextAt
				mini.SetTime(now)
				require.NoError(t, w.Conn.Cmd.LPush(t.Context(), w.P.Wake("callbacks"), "1").Err())
			}
		}
		require.Len(t, w.list(api.CallbackDead), before+1)
		if day < 4 {
			require.Len(t, r.got(8*(day+1)), 8*(day+1))
			require.InDelta(t, 30, now.Sub(began).Hours(), 3, "27.6 hours and up to 20%")
		}
		tries = 0
		endpoint := func() api.TenantCallback {
			at, err := w.Store.Callback(stagetest.Trusted(t), "acme")
			require.NoError(t, err)
			return at
		}
		if at := endpoint(); now.Sub(*at.FailingSince) > 5*24*time.Hour {
			w.Await("the endpoint to be disabled", func() bool { at = endpoint(); return at.DisabledAt != nil })
			require.WithinRange(t, *at.DisabledAt, at.FailingSince.Add(5*24*time.Hour), at.FailingSince.Add(7*24*time.Hour))
			return
		}
	}
	require.Fail(t, "the endpoint is not disabled")
}

// TestLargeGroups: a body has at most 20 KB.
func TestLargeGroups(t *testing.T) {
	view := api.Group{ID: "g", Aggregate: map[string]json.RawMessage{"a": json.RawMessage(`"` + strings.Repeat("x", 30_000) + `"`)}, FailuresByCode: map[string]int64{}}
	m := ledger.Move{Status: api.StatusCompleted, After: ledger.Group{Tenant: "acme", CallbackURL: "https://example.com/hook"}}
	n, wanted, err := callbacks.Of(&ledger.OutboxEntry{Group: "g"}, &m, "g.1.completed", &view)
	require.NoError(t, err)
	require.True(t, wanted)
	require.Equal(t, "acme|https://example.com", n.Queue)
	e := stagetest.Decode[api.WebhookEvent](t, string(n.Body))
	require.True(t, e.Truncated)
	require.Nil(t, e.Data.Aggregate)
	for i := range 1000 {
		view.FailuresByCode[fmt.Sprint("CODE_", i, strings.Repeat("x", 50))] = 1
	}
	n, _, err = callbacks.Of(&ledger.OutboxEntry{Group: "g"}, &m, "g.1.completed", &view)
	require.NoError(t, err)
	require.Less(t, len(n.Body), 20<<10)
	require.Empty(t, slices.Collect(maps.Keys(stagetest.Decode[api.WebhookEvent](t, string(n.Body)).Data.FailuresByCode)))
}

// TestAGroupOfAnotherTenantIsNotShown: a dead callback has outlived its group, whose id another tenant
// uses since. Sent again, it shows nothing of that tenant's group.
func TestAGroupOfAnotherTenantIsNotShown(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	r := w.receiver()
	r.answers(410)
	stop := w.watch("w")
	w.ended("g", r.URL, "")
	w.one(api.CallbackDead, func(api.Callback) bool { return true })
	stop()
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.P.Group("g"), w.P.Owner("g")).Err()) // as expire leaves it
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "globex", Type: "T", Name: "secret", Jobs: stagetest.Numbered(2)})
	r.answers(200)
	_, err := w.Store.Redeliver(stagetest.Trusted(t), "g.1.completed")
	require.NoError(t, err)
	w.watch("v")
	c := w.one(api.CallbackDead, func(api.Callback) bool { return true })
	require.Contains(t, c.Error, "the group was deleted")
	r.got(1)
}

// TestTheReasonOfAnAnswerIsNotKept: it may be as long as the headers.
func TestTheReasonOfAnAnswerIsNotKept(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = bufio.NewReader(c).ReadString('\n')
			_, _ = fmt.Fprintf(c, "HTTP/1.1 500 %s\r\nContent-Length: 0\r\n\r\n", strings.Repeat("x", 50_000))
			_ = c.Close()
		}
	}()
	w.watch("w")
	w.ended("g", "http://"+l.Addr().String(), "")
	c := w.one(api.CallbackPending, func(c api.Callback) bool { return c.Tries == 1 })
	require.Equal(t, "answered 500 Internal Server Error", c.Error)
}

// TestWhoAsksForPatienceUsesNoTry: a short Retry-After would use up all tries within seconds.
func TestWhoAsksForPatienceUsesNoTry(t *testing.T) {
	w := with(stagetest.Parallel(t, 1), loopback)
	r := w.receiver()
	r.answers(429, "Retry-After", "0")
	w.watch("w")
	w.ended("g", r.URL, "")
	c := w.one(api.CallbackPending, func(c api.Callback) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.calls) >= 2 && c.Error != ""
	})
	require.Zero(t, c.Tries)
}

// TestRedeliverDeadSaysThatOtherPartitionsHaveSome: a call that is full in the middle is repeated.
func TestRedeliverDeadSaysThatOtherPartitionsHaveSome(t *testing.T) {
	w := with(stagetest.Parallel(t, 4), loopback)
	for _, p := range w.Space.All() {
		var all []ledger.NewCallback
		for i := range 400 {
			all = append(all, ledger.NewCallback{
				ID: fmt.Sprintf("g%d-%d.1.completed", p.Index(), i), Queue: "q|http://x", Tenant: "q", Group: "g", Type: "group.completed",
				At: time.Now(), URL: "http://x", Body: []byte("{}"),
			})
		}
		_, errs, err := ledger.AddCallbacks(t.Context(), w.Conn.Cmd, p, all)
		require.NoError(t, err)
		require.Empty(t, errs)
		claimed, _, _, err := ledger.ClaimCallbacks(t.Context(), w.Conn.Cmd, p, ledger.Claim{Most: 1000, Each: 1000, Lease: time.Minute})
		require.NoError(t, err)
		require.Len(t, claimed, 400)
		for i := range claimed {
			_, err := ledger.SettleCallback(t.Context(), w.Conn.Cmd, p, &claimed[i], ledger.Dead, 0, "x", "")
			require.NoError(t, err)
		}
	}
	sum := int64(0)
	for more := true; more; {
		d, err := w.Store.RedeliverDead(stagetest.Trusted(t), "")
		require.NoError(t, err)
		sum, more = sum+d.Redelivered, d.More
	}
	require.EqualValues(t, 1600, sum)
}
