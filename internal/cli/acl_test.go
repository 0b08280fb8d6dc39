package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// passwordFiles writes a password file for each user, and returns their folder. The password is
// "secret-" and the user's name.
func passwordFiles(t *testing.T, users ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, user := range users {
		require.NoError(t, os.WriteFile(filepath.Join(dir, user), []byte("secret-"+user+"\n"), 0o600))
	}
	return dir
}

// TestACLFileInDeployments: the ACL file in deployments is what `bulkaction acl` prints, so that a
// change of a role's rights is visible there.
func TestACLFileInDeployments(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile("../../deployments/redis/users.acl")
	require.NoError(t, err)
	r := console{}.exec(t.Context(), "acl", "--format", "aclfile", "--prefix", "bulk-action:")
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, string(want), r.out, "run `go generate ./internal/redisx/acl`")
	require.Contains(t, r.out, "user default off\n")
}

// TestACLOnRedis: Redis accepts the printed file and the printed commands. Each user can then
// connect, except for the default user.
func TestACLOnRedis(t *testing.T) {
	t.Parallel()
	all := append(acl.Names(), adminUser)
	dir := passwordFiles(t, all...)
	file := filepath.Join(t.TempDir(), "users.acl")
	r := console{}.exec(t.Context(), "acl", "--format", "aclfile", "--passwords", dir, "--output", file)
	require.Equal(t, exitOK, r.code, r.err)
	require.Empty(t, r.out+r.err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(text), "secret-")

	server := redistest.Server(t)
	commands := console{}.exec(t.Context(), "acl", "--passwords", dir)
	require.Equal(t, exitOK, commands.code, commands.err)
	require.NotContains(t, commands.out, "secret-")
	admin := server.Client()
	lines := strings.Split(strings.TrimSpace(commands.out), "\n")
	require.Len(t, lines, len(all)+1)
	require.Equal(t, "ACL SETUSER default reset off", lines[len(lines)-1])
	for _, line := range lines {
		var words []any
		for word := range strings.FieldsSeq(line) {
			words = append(words, word)
		}
		require.NoError(t, admin.Do(t.Context(), words...).Err(), line)
	}
	require.ErrorContains(t, server.Client().Ping(t.Context()).Err(), "NOAUTH")
	as := func(user string) *redis.Client {
		c := redis.NewClient(&redis.Options{Addr: server.Addr(), Username: user, Password: "secret-" + user, Protocol: 2, DisableIdentity: true})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	for _, user := range all {
		require.NoError(t, as(user).Ping(t.Context()).Err(), user)
	}
	// the commands make the same users as the file
	byCommands, err := as(adminUser).Do(t.Context(), "acl", "list").StringSlice()
	require.NoError(t, err)
	fromFile := redis.NewClient(&redis.Options{
		Addr: redistest.Server(t, redistest.Args("--aclfile", file)).Addr(), Username: adminUser, Password: "secret-" + adminUser,
		Protocol: 2, DisableIdentity: true,
	})
	t.Cleanup(func() { _ = fromFile.Close() })
	byFile, err := fromFile.Do(t.Context(), "acl", "list").StringSlice()
	require.NoError(t, err)
	require.Equal(t, rulesOf(byCommands), rulesOf(byFile))
}

// rulesOf returns the words of each line of ACL LIST, with the rules sorted, because Redis's order
// varies. It removes sanitize-payload, which Redis adds to users from commands only.
func rulesOf(lines []string) (all [][]string) {
	for _, line := range lines {
		words := strings.Fields(strings.Replace(line, " sanitize-payload", "", 1))
		slices.Sort(words[2:])
		all = append(all, words)
	}
	return all
}

// TestACLOfIngestStreams: the Redis user of an additional ingest stream may add to this stream, but
// may not read or delete it, nor add to other ingest streams.
func TestACLOfIngestStreams(t *testing.T) {
	t.Parallel()
	dir := passwordFiles(t, "producer-acme", "producer-shop")
	streams := "acme=bulk-action:ingest:acme,acme=bulk-action:ingest:shop"
	r := console{}.exec(t.Context(), "acl", "--passwords", dir, "--ingest-streams", streams)
	require.Equal(t, exitOK, r.code, r.err)
	server := redistest.Server(t)
	for line := range strings.Lines(strings.ReplaceAll(r.out, "ACL SETUSER default reset off\n", "")) {
		var words []any
		for word := range strings.FieldsSeq(line) {
			words = append(words, word)
		}
		require.NoError(t, server.Client().Do(t.Context(), words...).Err(), line)
	}
	producing := func(user, stream string) error {
		c := redis.NewClient(&redis.Options{Addr: server.Addr(), Username: user, Password: "secret-" + user, Protocol: 2, DisableIdentity: true})
		defer c.Close()
		require.ErrorContains(t, c.XRange(t.Context(), stream, "-", "+").Err(), "NOPERM")
		require.ErrorContains(t, c.Del(t.Context(), stream).Err(), "NOPERM")
		return c.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: []string{"a", "b"}}).Err()
	}
	require.NoError(t, producing("producer-acme", "bulk-action:ingest:acme"))
	require.NoError(t, producing("producer-shop", "bulk-action:ingest:shop"))
	for _, stream := range []string{"bulk-action:ingest:shop", "bulk-action:ingest", "bulk-action:ingest:acme2"} {
		require.ErrorContains(t, producing("producer-acme", stream), "NOPERM")
	}

	r = console{}.exec(t.Context(), "acl", "--ingest-streams", streams, "--role", "producer-shop")
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, `^ACL SETUSER producer-shop reset on #SHA256-OF-THE-PASSWORD-OF-producer-shop .*~bulk-action:ingest:shop resetchannels\n$`, r.out)
}

// TestACLPlaceholders: Redis refuses a user with a placeholder for the password's hash, so nobody
// runs it by mistake.
func TestACLPlaceholders(t *testing.T) {
	t.Parallel()
	r := console{}.exec(t.Context(), "acl", "--role", "worker", "--prefix", "x:")
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, `^ACL SETUSER worker reset on #SHA256-OF-THE-PASSWORD-OF-worker -@all \+asking .* ~x:\{\*\}:\* .*&x:guard:wake:\*\n$`, r.out)
	var words []any
	for word := range strings.FieldsSeq(r.out) {
		words = append(words, word)
	}
	require.Error(t, redistest.Server(t).Client().Do(t.Context(), words...).Err())
}

func TestACLPasswords(t *testing.T) {
	t.Parallel()
	dir := passwordFiles(t, "worker", "producer")
	r := console{}.exec(t.Context(), "acl", "--passwords", dir, "--format", "aclfile")
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, "user worker on #"+acl.Hash("secret-worker")+" ")
	require.NotContains(t, r.out, "user ingest")
	require.Contains(t, r.err, "Left out, without a file in "+dir+": ingest, fetcher,")

	r = console{}.exec(t.Context(), "acl", "--json", "--role", "producer")
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, `"user":"producer"`)
	require.Contains(t, r.out, `"keys":["bulk-action:ingest"]`)

	require.NoError(t, os.WriteFile(filepath.Join(dir, "worker"), []byte("\n"), 0o600))
	for args, want := range map[string]string{
		"--passwords " + dir:                       "the file " + filepath.Join(dir, "worker") + " is empty",
		"--passwords " + dir + " --role ingest":    "read the password of ingest",
		"--passwords " + t.TempDir():               "no file is named like a user",
		"--role nobody":                            `--role "nobody": there are ingest,`,
		"--ingest-streams acme=x:ingest:a":         "a stream is bulk-action:ingest: and a name",
		"--ingest-streams acme":                    `--ingest-streams "acme": must be a comma list`,
		"--role producer-acme":                     `--role "producer-acme": there are ingest,`,
		"--format yaml":                            `--format "yaml": write setuser or aclfile`,
		"--prefix a{b":                             `--prefix "a{b": must be 1 to 64 letters`,
		"--output " + filepath.Join(dir, "no/dir"): "write users",
	} {
		r := console{}.exec(t.Context(), append([]string{"acl"}, strings.Fields(args)...)...)
		require.NotEqual(t, exitOK, r.code, args)
		require.Contains(t, r.err, want, args)
		require.Empty(t, r.out, args)
	}
}
