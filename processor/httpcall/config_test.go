package httpcall_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/caarlos0/env/v10"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

func parse(t testing.TB, vars map[string]string) httpcall.Config {
	var c httpcall.Config
	require.NoError(t, env.ParseWithOptions(&c, env.Options{Prefix: "HTTP_PROCESSOR_", Environment: vars}))
	return c
}

func TestConfig(t *testing.T) {
	c := parse(t, map[string]string{})
	require.NoError(t, c.Validate())
	limits := credential.Limits{
		Rate: credential.Rate{Permits: 80, Window: 10 * time.Minute}, Limiter: credential.Sliding,
		Breaker: credential.Breaker{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}, Concurrency: 1,
	}
	require.Equal(t, httpcall.Config{Timeout: 30 * time.Second, MaxResponseBytes: 65536, MaxIdleConnsPerHost: 64, Limits: limits}, c)
	require.False(t, c.GuardsHosts())

	c = parse(t, map[string]string{
		"HTTP_PROCESSOR_TIMEOUT": "5s", "HTTP_PROCESSOR_MAX_RESPONSE_BYTES": "100", "HTTP_PROCESSOR_ALLOW_PRIVATE": "true",
		"HTTP_PROCESSOR_ALLOWED_CIDRS": "10.0.0.0/8,fd00::/8", "HTTP_PROCESSOR_MAX_IDLE_CONNS_PER_HOST": "2",
		"HTTP_PROCESSOR_CREDENTIALS_FILE": "c.yaml", "HTTP_PROCESSOR_ACCOUNT_RATE": "none", "HTTP_PROCESSOR_ACCOUNT_LIMITER": "token",
		"HTTP_PROCESSOR_ACCOUNT_BREAKER": "none", "HTTP_PROCESSOR_ACCOUNT_CONCURRENCY": "unbounded",
		"HTTP_PROCESSOR_HOST_RATE": "100/1s", "HTTP_PROCESSOR_HOST_BREAKER": "5/1m/2",
	})
	require.NoError(t, c.Validate())
	require.Equal(t, httpcall.Config{
		Timeout: 5 * time.Second, MaxResponseBytes: 100, MaxIdleConnsPerHost: 2, AllowPrivate: true,
		AllowedCIDRs:    []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		CredentialsFile: "c.yaml", Limits: credential.Limits{Limiter: credential.Token, Concurrency: credential.Unbounded},
		HostRate: credential.Rate{Permits: 100, Window: time.Second}, HostBreaker: credential.Breaker{Failures: 5, OpenFor: time.Minute, Successes: 2},
	}, c)
	require.True(t, c.GuardsHosts())
	require.True(t, parse(t, map[string]string{"HTTP_PROCESSOR_HOST_BREAKER": "5/1m/2"}).GuardsHosts())

	_, err := httpcall.New(httpcall.Config{MaxResponseBytes: 1 << 20, AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}})
	for _, field := range []string{"TIMEOUT", "MAX_RESPONSE_BYTES", "MAX_IDLE_CONNS_PER_HOST", "ALLOWED_CIDRS"} {
		require.ErrorContains(t, err, field+": ")
	}
}
