package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

// FuzzParsePosition checks that parsePosition returns no negative number for any text, and that it
// reads a position again that String has written.
func FuzzParsePosition(f *testing.F) {
	for _, seed := range []string{"", "1.2", "1.2.3", "1.2.0", "-1.2", "99999999999.1", "1.2.3.4", "a.b", "+1.2", "01.2"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, id string) {
		p := parsePosition(id)
		require.False(t, p.round < 0 || p.rank < 0, "%+v", p)
		require.Equal(t, p, parsePosition(p.String()))
	})
}

// FuzzDecodeSettings checks that a decoded rps and weight are within their limits, and that decoded
// settings do not change when they are encoded and decoded again.
func FuzzDecodeSettings(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"rps":50,"weight":2,"base_priority":-3}`, `{"rps":null}`, `{"rps":1e-300}`, `{"rps":1e999}`, `{"weight":"2"}`, `{"rsp":1}`, `[]`, ``, `{"rps":NaN}`, `{"base_priority":1.5}`, `{"in_flight":1000001}`, `{"rps":1,"rps":-1}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		set, err := decodeSettings(body)
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		require.False(t, set.RPS.Value != nil && (*set.RPS.Value <= 0 || *set.RPS.Value > maxRPS), "%s", body)
		require.False(t, set.Weight.Value != nil && (*set.Weight.Value < minTenantWeight || *set.Weight.Value > maxTenantWeight), "%s", body)
		b, err := json.Marshal(set)
		require.NoError(t, err)
		again, err := decodeSettings(b)
		require.NoError(t, err, "%s", b)
		require.Equal(t, set, again)
	})
}

func TestRouteWithoutScopeOrObjectPanics(t *testing.T) {
	s := newServer(Options{Backend: struct{ Backend }{}})
	for _, rt := range []route{
		{method: "GET", path: "/x", object: noTenant}, {method: "GET", path: "/x", scope: auth.Read},
	} {
		require.Panics(t, func() { s.authorized(rt, s.streamResults) })
	}
	for _, rt := range s.routes() {
		require.Equal(t, strings.Contains(rt.path, "/groups/{id}"), rt.object == groupInPath, rt.path)
		require.Equal(t, strings.Contains(rt.path, "/operations/{id}"), rt.object == operationInPath, rt.path)
		require.Equal(t, strings.Contains(rt.path, "/tenants/{id}"), rt.object == tenantInPath, rt.path)
	}
}

// TestBodiesDoNotWaitForEachOther: if all bodies that hold memory need more, they don't block each
// other: at least half are refused with 429, and the memory that they free lets the others go on.
func TestBodiesDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newBodyMemory()
		const n = 8
		size := int64(maxBodyMemory / n)
		done, refused := make(chan time.Duration, n), make(chan *web.Problem, n)
		for range n {
			go func() {
				l := &memoryLease{pool: m}
				defer l.release()
				err := l.grow(context.Background(), size)
				<-time.After(3 * time.Second)
				if err == nil {
					err = l.grow(context.Background(), 2*size)
				}
				if p, ok := errors.AsType[*web.Problem](err); ok {
					refused <- p
					return
				}
				<-time.After(4 * time.Second)
				done <- time.Since(l.since)
			}()
		}
		grown := 0 // how many depends on the order in which the goroutines run
		for range n {
			select {
			case held := <-done:
				require.Equal(t, 7*time.Second, held)
				grown++
			case p := <-refused:
				require.Equal(t, 429, p.Status)
			}
		}
		synctest.Wait() // all have released their memory
		require.Positive(t, grown, "the memory of those that were refused")
		require.LessOrEqual(t, grown, n/2, "a body that grows needs the memory of one that was refused")
		require.True(t, m.free.TryAcquire(maxBodyMemory))
		p, ok := errors.AsType[*web.Problem](m.full(context.Background()))
		require.True(t, ok)
		require.Greater(t, p.RetryAfter, 3*time.Second, "bodies have held memory for 3 to 7 s")
		require.Less(t, p.RetryAfter, 7*time.Second)
	})
}

// TestRatesAreBounded: after one request of each of 3*maxRates keys, 1 ms apart, at most maxRates
// limiters are kept.
func TestRatesAreBounded(t *testing.T) {
	c := newCallers(10)
	now := time.Now()
	for i := range 3 * maxRates {
		p := auth.Principal{KeyID: "key_" + strconv.Itoa(i)}
		require.NoError(t, c.request(p, now.Add(time.Duration(i)*time.Millisecond)))
	}
	require.LessOrEqual(t, len(c.rates), maxRates)
}
