package roomapi

import (
	"net/http"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/clientaddr"
)

// TestRateOfNewVisitors: 1,000 visitors enter from one address. Those without a cookie are refused
// above the rate limit; visitors with a cookie, and visitors from another address, are not.
func TestRateOfNewVisitors(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	o := options(room)
	o.EnterRatePerIP = 10
	reasons := map[string]int{}
	o.Metrics.Refused = func(event, reason string) { reasons[event+"/"+reason]++ }
	a := New(o)
	first := call(t, a, "POST", ticketPath)
	refused := 0
	for range 1000 {
		rec := call(t, a, "POST", ticketPath)
		if rec.Code == http.StatusTooManyRequests {
			refused++
			require.Empty(t, rec.Header().Values("Set-Cookie"))
			seconds, err := strconv.Atoi(rec.Header().Get("Retry-After"))
			require.NoError(t, err)
			require.Positive(t, seconds)
		}
	}
	require.Positive(t, refused)
	require.Equal(t, 1001-refused, room.number())
	require.Equal(t, map[string]int{"/rate": refused}, reasons)

	a.clients.newVisitors = clientaddr.NewLimiters(0, 1, 10) // a permit that is taken does not come back
	require.NoError(t, a.clients.newVisitor(netip.MustParseAddr("192.0.2.1")))
	require.Equal(t, http.StatusOK, call(t, a, "POST", ticketPath, cookieOf(t, first, "broker")).Code)
	require.Equal(t, http.StatusTooManyRequests, call(t, a, "GET", "/events/sale/wait").Code)
	require.Contains(t, call(t, a, "GET", "/events/sale/tickets/waiting").Body.String(), "busy")
	require.NoError(t, a.clients.newVisitor(netip.MustParseAddr("192.0.2.2")))
	require.NoError(t, a.clients.newVisitor(netip.Addr{}), "clients of a proxy that names none are not limited")
}

func TestOpenStreamsAreForgotten(t *testing.T) {
	t.Parallel()
	c := newClients(nil, 3, 2, 1)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	require.NoError(t, c.connect(a))
	require.NoError(t, c.connect(a))
	require.Error(t, c.connect(a))
	require.NoError(t, c.connect(b))
	require.Error(t, c.connect(netip.Addr{}))
	c.disconnect(a)
	require.NoError(t, c.connect(netip.Addr{}))
	c.disconnect(netip.Addr{})
	c.disconnect(a)
	c.disconnect(b)
	require.Empty(t, c.byIP)
	require.Zero(t, c.connections())
}
