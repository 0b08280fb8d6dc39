package redisx

import (
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzParseURL: each accepted URL has addresses of a host and a port. Neither String nor an error
// shows its password.
func FuzzParseURL(f *testing.F) {
	const secret = "s3cr3t"
	for _, seed := range []string{
		"redis://127.0.0.1:6379/0", "rediss://user:" + secret + "@h/1", "redis://h1:1,h2:2", "redis://h1:1/0,redis://h2:2/0", "redis://h?cluster=true", "rediss-sentinel://s1,s2:2/master",
		"redis-sentinel://u:" + secret + "@s1,s2:2/master/3?sentinel_username=u&sentinel_password=" + secret, "redis://[::1]:1/", "redis://:" + secret + "%@h",
		"redis://a:b@c:d@e:1", "http://h", "redis://", "redis://h:0", "redis://0[0", "redis://h/x", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		o, err := ParseURL(raw)
		if err != nil {
			require.NotContains(t, err.Error(), secret)
			require.Contains(t, err.Error(), "parse redis url: ")
			return
		}
		require.NotEmpty(t, o.Addrs)
		for _, addr := range o.Addrs {
			host, port, err := net.SplitHostPort(addr)
			require.NoError(t, err)
			require.NotEmpty(t, host)
			n, err := strconv.Atoi(port)
			require.NoError(t, err)
			require.Greater(t, n, 0)
		}
		require.GreaterOrEqual(t, o.DB, 0)
		require.False(t, o.Cluster && o.DB != 0)
		if o.password == secret && !strings.Contains(strings.Join(o.Addrs, o.Master), secret) {
			require.NotContains(t, o.String(), secret)
		}
	})
}
