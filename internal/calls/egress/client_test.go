package egress_test

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var loopback = egress.Policy{AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}

func client(t *testing.T, o egress.Options) *http.Client {
	c := egress.NewClient(o)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func TestTheClientCallsAllowedAddressesAlone(t *testing.T) {
	calls := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls++
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
	}))
	defer server.Close()

	_, err := client(t, egress.Options{}).Get(server.URL) //nolint:bodyclose // there is no response
	require.ErrorIs(t, err, egress.ErrAddressRefused)
	require.Zero(t, calls)

	response, err := client(t, egress.Options{Policy: loopback}).Get(server.URL)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusFound, response.StatusCode, "a redirect is not followed")
	require.Equal(t, 1, calls)
}

func TestTheClientTrustsTheGivenAuthorities(t *testing.T) {
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // one handshake fails on purpose
	server.StartTLS()
	defer server.Close()

	_, err := client(t, egress.Options{Policy: loopback}).Get(server.URL) //nolint:bodyclose // there is no response
	require.ErrorContains(t, err, "certificate")

	roots := server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	response, err := client(t, egress.Options{Policy: loopback, RootCAs: roots}).Get(server.URL)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, 2, response.ProtoMajor)
}
