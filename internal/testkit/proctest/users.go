package proctest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	_ "github.com/bulkaction/bulkaction/internal/access/apikey" // acl.Of needs its script
	_ "github.com/bulkaction/bulkaction/internal/process/roles" // the scripts of all roles
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// Password is the password of all Redis users that this package makes, which have the rights that
// `bulkaction acl` prints. The test itself stays the default user, who may do everything and has no
// password.
const Password = "sesame"

// Users returns an option that gives a server the Redis users of an installation with the default
// key prefix. They survive a restart of the server.
func Users(t testing.TB) redistest.Option {
	t.Helper()
	lines := []string{"user default on nopass ~* &* +@all"}
	for _, name := range acl.Names() {
		u, err := acl.Of(name, "bulk-action:")
		require.NoError(t, err)
		lines = append(lines, "user "+name+" "+u.Rules(acl.Hash(Password)))
	}
	file := filepath.Join(t.TempDir(), "users.acl")
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	return redistest.Args("--aclfile", file)
}

// Apply applies options of package redistest, such as Users, to the options of a server that
// another package starts.
func Apply(o redisproc.Options, opts ...redistest.Option) redisproc.Options {
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// AsUser returns the URL of a Redis with a user.
func AsUser(user, url string) string {
	return strings.Replace(url, "://", "://"+user+":"+Password+"@", 1)
}

// AddUser gives a running server one user of an installation with this key prefix, and returns the URL
// for it. Installations with other prefixes may share the server. change, if not nil, first changes
// the user's rights. If it is nil, AddUser requires at the end of the test that Redis has denied this
// user nothing.
func AddUser(t testing.TB, url, name, prefix string, change func(*acl.User)) (userURL string) {
	t.Helper()
	u, err := acl.Of(name, prefix)
	require.NoError(t, err)
	if change != nil {
		change(&u)
	}
	opt, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(opt)
	user := strings.NewReplacer(":", "").Replace(name + "-" + prefix)
	args := []any{"acl", "setuser", user}
	for rule := range strings.FieldsSeq(u.Rules(acl.Hash(Password))) {
		args = append(args, rule)
	}
	require.NoError(t, rdb.Do(t.Context(), args...).Err())
	t.Cleanup(func() {
		if !t.Failed() && change == nil {
			requireNoDenial(t, rdb, user)
		}
		require.NoError(t, rdb.Close())
	})
	return AsUser(user, url)
}

// RequireNoDenial requires that Redis has denied no user anything but a login since its start. rdb
// is one server.
func RequireNoDenial(t testing.TB, rdb redis.UniversalClient) {
	t.Helper()
	requireNoDenial(t, rdb, "")
}

// requireNoDenial requires that Redis's ACL LOG has no denial for a user; "" means all users. A
// failed login does not count as a denial.
func requireNoDenial(t testing.TB, rdb redis.UniversalClient, user string) {
	t.Helper()
	denied, err := rdb.Do(context.WithoutCancel(t.Context()), "acl", "log").Slice()
	require.NoError(t, err)
	denied = slices.DeleteFunc(denied, func(entry any) bool {
		text := fmt.Sprint(entry)
		return strings.Contains(text, "reason auth") || user != "" && !strings.Contains(text, user)
	})
	require.Empty(t, denied, "ACL LOG")
}
