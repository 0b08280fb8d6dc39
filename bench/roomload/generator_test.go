package roomload

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"
)

func allEnded(users int64) func(Answer) bool {
	return func(a Answer) bool { return a.Counts.Ended == users }
}

func TestUsersWaitAreAdmittedAndLeave(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, func(s *fakeStream) {
		s.state()
		s.position(2)
		s.send(": heartbeat\n\n")
		s.position(1)
		s.admitted(nil)
		s.open()
	})
	d := drive(t, b, Task{Users: 20, Parallel: 4, Session: time.Millisecond})
	d.await(allEnded(20))
	a := d.step(End)
	require.Empty(t, a.Violations)
	require.Len(t, a.Visits, 20)
	require.Equal(t, Counts{Entered: 20, Admitted: 20, Ended: 20}, a.Counts)
	require.EqualValues(t, 4*20, a.Frames)
	var positions int64
	for _, n := range a.Ages {
		positions += n
	}
	require.EqualValues(t, 40, positions)
	for _, v := range a.Visits {
		require.Len(t, v.Streams, 1)
		require.True(t, v.Streams[0].Own, "the page has gone on to the shop")
		require.LessOrEqual(t, v.Sent, v.Entered)
		require.LessOrEqual(t, v.Entered, v.Admitted)
		require.LessOrEqual(t, v.Admitted+500, v.Freed, "the shortest session")
		require.Positive(t, v.Fence)
		require.Contains(t, b.left, v.User)
	}
	require.Empty(t, Lost(a.Visits, true))
}

func TestUsersCompleteByTheAPI(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, func(s *fakeStream) {
		s.state()
		s.admitted(nil)
		s.open()
	})
	for _, keepOpen := range []bool{false, true} {
		d := drive(t, b, Task{Users: 3, Session: time.Millisecond, API: b.URL, KeepOpen: keepOpen, PerSecond: 1000})
		d.await(allEnded(3))
		a := d.step(End)
		require.Empty(t, a.Violations)
		require.Positive(t, a.Visits[2].Freed)
		require.Empty(t, b.left)
	}
}

func TestUsersReturn(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, func(s *fakeStream) {
		s.state()
		s.position(5 - s.n)
		if s.n == 2 {
			s.open()
		}
		s.send("retry: 2\nevent: reconnect\ndata: {\"reason\":\"draining\"}\n\n")
	})
	d := drive(t, b, Task{Users: 1})
	d.await(func(a Answer) bool { return a.Counts.Open == 1 && a.Counts.Shown == 1 && b.streamsOf("u0") == 3 })
	a := d.step(End)
	require.Empty(t, a.Violations)
	v := a.Visits[0]
	require.True(t, v.Open)
	require.Len(t, v.Streams, 3)
	require.False(t, v.Streams[0].Own)
	require.True(t, v.Streams[2].Own)
	require.EqualValues(t, 4, v.Streams[2].Before)
	require.EqualValues(t, 3, v.Streams[2].First)
	require.GreaterOrEqual(t, v.Streams[2].Shown, v.Streams[2].From)
	require.Zero(t, v.Rises)
}

func (b *fakeBroker) streamsOf(user string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.streams[user]
}

func TestUsersReloadAndCloseTheirTabs(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, func(s *fakeStream) {
		s.state()
		s.position(1)
		s.open()
	})
	d := drive(t, b, Task{Users: 40, Parallel: 40, Close: 0.5, Churn: 0.5, Within: time.Millisecond})
	d.await(func(a Answer) bool { return a.Counts.Shown == 40 })
	d.step(Act)
	returned := func(v Visit) bool { return b.streamsOf(v.User) == 2 }
	d.await(func(a Answer) bool {
		n := 0
		for i := range 40 {
			n += b.streamsOf("u" + strconv.Itoa(i))
		}
		c := a.Counts
		return c.Ended > 0 && c.Open == 40-c.Ended && n == 80-int(c.Ended)
	})
	a := d.step(End)
	require.Empty(t, a.Violations)
	closed := slices.DeleteFunc(slices.Clone(a.Visits), func(v Visit) bool { return !v.Closed })
	require.NotEmpty(t, closed)
	for _, v := range a.Visits {
		require.NotEqual(t, v.Closed, v.Open)
		require.NotEqual(t, v.Closed, returned(v), "a user who closed the tab does not return")
		require.True(t, v.Streams[0].Own)
	}
	require.Empty(t, Lost(a.Visits, false))
}

func TestClosedTabsGiveTheSlotBack(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, func(s *fakeStream) {
		s.state()
		s.admitted(nil)
		s.open()
	})
	d := drive(t, b, Task{Users: 2, KeepOpen: true, Close: 1})
	d.await(func(a Answer) bool { return a.Counts.Admitted == 2 })
	d.step(Act)
	d.await(allEnded(2))
	a := d.step(End)
	require.Positive(t, a.Visits[0].Freed)
	require.LessOrEqual(t, a.Visits[0].Freed, a.Visits[0].Streams[0].To, "the slot counts as free before the stream ends")
}

// TestWhatIsWrongIsFound has the negative controls of the checks of frames: a fake broker sends
// wrong frames and tokens, and each must be reported as a violation.
func TestWhatIsWrongIsFound(t *testing.T) {
	t.Parallel()
	claim := func(name string, value any) func(*fakeStream) {
		return func(s *fakeStream) {
			s.state()
			s.admitted(func(c jwt.MapClaims, _ *jwt.Token) { c[name] = value })
		}
	}
	for name, c := range map[string]struct {
		stream func(*fakeStream)
		says   string
	}{
		"a position rises":         {func(s *fakeStream) { s.state(); s.position(3); s.position(4) }, "the position rises from 3 to 4"},
		"it rises after a return":  {func(s *fakeStream) { s.state(); s.position(3 + s.n) }, "the position rises from 3 to 4"},
		"a position of 0":          {func(s *fakeStream) { s.state(); s.position(0) }, "impossible values"},
		"no state first":           {func(s *fakeStream) { s.position(1) }, "the first frame is position"},
		"a state without mode":     {func(s *fakeStream) { s.send("event: state\ndata: {\"state\":\"READY\"}\n\n") }, "no state or mode"},
		"no JSON":                  {func(s *fakeStream) { s.send("event: state\ndata: x\n\n") }, "state: invalid character"},
		"an unknown frame":         {func(s *fakeStream) { s.state(); s.send("event: promoted\ndata: {}\n\n") }, `unknown frame "promoted"`},
		"ended without id":         {func(s *fakeStream) { s.state(); s.send("event: ended\ndata: {\"reason\":\"left\"}\n\n") }, `the id of ended is ""`},
		"an error":                 {func(s *fakeStream) { s.WriteHeader(503); s.state() }, "a stream is answered with status 503"},
		"another type":             {func(s *fakeStream) { s.Header().Set("Content-Type", "text/plain"); s.state() }, "status 200, text/plain"},
		"no content":               {func(s *fakeStream) { s.WriteHeader(204) }, "status 204"},
		"another user's token":     {claim("sub", "u1"), "token has invalid subject"},
		"another event's token":    {claim("evt", "f"), "the token is for another event"},
		"another audience":         {claim("aud", "f"), "token has invalid audience"},
		"another issuer":           {claim("iss", "http://other"), "token has invalid issuer"},
		"an expired token":         {claim("exp", time.Now().Unix()-6), "token is expired"},
		"a token without end":      {claim("exp", nil), "exp claim is required"},
		"a token without fence":    {claim("jti", "x"), `the jti of the token is "x"`},
		"a long token":             {claim("x", strings.Repeat("x", 600)), "more than 600"},
		"a position after a token": {func(s *fakeStream) { s.state(); s.admitted(nil); s.position(1); s.open() }, "a user with a token is shown position 1"},
		"a second token":           {func(s *fakeStream) { s.state(); s.admitted(nil); s.admitted(nil); s.open() }, "a second token"},
		"an unknown key": {func(s *fakeStream) {
			s.state()
			s.admitted(func(_ jwt.MapClaims, t *jwt.Token) { t.Header["kid"] = "k2" })
		}, `no key "k2"`},
		"an unsigned token": {func(s *fakeStream) {
			s.state()
			s.send(`event: admitted` + "\n" + `data: {"token":"eyJhbGciOiJub25lIn0.e30."}` + "\n\n")
		}, "signing method none is invalid"},
		"another expiry": {func(s *fakeStream) {
			s.state()
			s.admitted(func(c jwt.MapClaims, _ *jwt.Token) { c["exp"] = time.Now().Add(50 * time.Second).Unix() })
		}, "expires_at is"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFakeBroker(t, c.stream)
			d := drive(t, b, Task{Users: 1, KeepOpen: true})
			d.await(func(a Answer) bool { return a.Wrong > 0 })
			a := d.step(End)
			require.Contains(t, strings.Join(a.Violations, "\n"), c.says)
		})
	}
}

func TestEntries(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t, nil)
	d := drive(t, b, Task{Kind: Entries, Users: 50, Parallel: 4, Seconds: 60})
	d.await(allEnded(50))
	a := d.step(End)
	require.Empty(t, a.Violations)
	require.Len(t, a.Waits, 50)
	require.EqualValues(t, 50, a.Counts.Entered)

	d = drive(t, b, Task{Kind: Entries, Users: 1000, Parallel: 4, Seconds: 0.05, PerSecond: 1000, First: 50})
	d.await(allEnded(1000))
	a = d.step(End)
	require.Empty(t, a.Violations)
	require.NotEmpty(t, a.Waits)
	require.Less(t, len(a.Waits), 1000)

	d = drive(t, b, Task{Kind: Entries, Users: 1, Seconds: 60})
	d.await(allEnded(1))
	require.Contains(t, d.step(End).Violations[0], "status", "a user who is known already")
}

func TestTasksThatCannotBegin(t *testing.T) {
	t.Parallel()
	for says, task := range map[string]Task{
		`there is no task "x"`:  {Kind: "x", Brokers: []string{"127.0.0.1:1"}, Events: []string{"e"}},
		"needs a broker":        {Kind: Streams},
		"connect: connection r": {Kind: Streams, Brokers: []string{"127.0.0.1:1"}, Events: []string{"e"}, Keys: "http://127.0.0.1:1/"},
	} {
		_, err := newGenerator(t.Context(), task)
		require.ErrorContains(t, err, says)
	}
}

func TestAgePercentile(t *testing.T) {
	t.Parallel()
	require.Zero(t, AgePercentile(nil, 99))
	ages := map[int]int64{1: 98, 5: 1, 2000: 1}
	require.InDelta(t, 1, AgePercentile(ages, 50), 0)
	require.InDelta(t, 5, AgePercentile(ages, 99), 0)
	require.InDelta(t, 2000, AgePercentile(ages, 100), 0)
}
