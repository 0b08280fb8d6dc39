package cli

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// redisForKeys starts a Redis for the commands of this test, and returns a client of it.
func redisForKeys(t *testing.T) *redis.Client {
	t.Helper()
	_, url := redistest.Mini(t)
	t.Setenv("BULKACTION_REDIS_URL", url)
	opts, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func decodeKey(t *testing.T, text string) (k apikey.NewKey) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(text), &k))
	return k
}

func TestKeyLifecycle(t *testing.T) {
	c := redisForKeys(t)
	got := console{}.exec(t.Context(), "key", "create", "--role", "producer", "--tenant", "acme", "--name", "shop")
	require.Equal(t, exitOK, got.code, got.err)
	token := strings.TrimSuffix(got.out, "\n")
	role, err := auth.ParseToken(token)
	require.NoError(t, err, "standard output has nothing but the key")
	require.Equal(t, auth.Producer, role)
	id := auth.SHA256(token).KeyID()
	require.Equal(t, "Created key "+id+" with role producer. It is shown only this time:\n", got.err)

	got = console{}.exec(t.Context(), "key", "create", "--role", "reader", "--payloads", "--expires", "720h", "--json")
	require.Equal(t, exitOK, got.code, got.err)
	require.Empty(t, got.err)
	reader := decodeKey(t, got.out)
	require.Equal(t, auth.SHA256(reader.Token).KeyID(), reader.ID)
	require.True(t, reader.Payloads)
	require.Equal(t, 720*time.Hour, reader.ExpiresAt.Sub(reader.CreatedAt))
	require.Regexp(t, "^cli", reader.CreatedBy)

	got = console{}.exec(t.Context(), "key", "create", "--role", "operator", "--no-payloads", "--json")
	operator := decodeKey(t, got.out)
	require.False(t, operator.Payloads)

	got = console{}.exec(t.Context(), "key", "ls")
	require.Equal(t, exitOK, got.code, got.err)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Regexp(t, `^ID +ROLE +TENANT +PAYLOADS +NAME +CREATED +BY +EXPIRES +LAST USED$`, lines[0])
	require.Len(t, lines, 4)
	require.Regexp(t, `(?m)^`+id+` +producer +acme +yes +shop .* never`, got.out)
	require.NotContains(t, got.out, token)

	got = console{}.exec(t.Context(), "key", "rotate", id)
	require.Equal(t, exitOK, got.code, got.err)
	next := strings.TrimSuffix(got.out, "\n")
	nextID := auth.SHA256(next).KeyID()
	require.Regexp(t, "^Created key "+nextID+". Key "+id+" expires at .*Z. It is shown only this time:\n$", got.err)
	console{}.exec(t.Context(), "key", "rotate", id).ends(t, exitError, "key "+nextID+" replaces it")
	got = console{}.exec(t.Context(), "key", "ls")
	require.Contains(t, got.out, "replaced by "+nextID)
	got = console{}.exec(t.Context(), "key", "rotate", nextID, "--json")
	require.Equal(t, "shop", decodeKey(t, got.out).Name)

	require.Equal(t, run{exitOK, "", "Revoked key " + id + ". Processes refuse it within ten seconds.\n"},
		console{}.exec(t.Context(), "key", "revoke", id))
	console{}.exec(t.Context(), "key", "revoke", id).ends(t, exitError, "revoke API key "+id+": there is no key with this id; it may have been revoked")
	require.Equal(t, run{exitOK, `{"id":"` + reader.ID + `","revoked":true}` + "\n", ""},
		console{}.exec(t.Context(), "key", "revoke", reader.ID, "--json"))
	got = console{}.exec(t.Context(), "key", "ls", "--json")
	for line := range strings.Lines(got.out) {
		require.NotContains(t, []string{id, reader.ID}, decodeKey(t, line).ID)
	}
	require.Equal(t, 3, strings.Count(got.out, "\n"))

	// The activity log has each change of a key, including one that failed. It has no rotation that
	// was refused before it began. The entry of a rotation names the new key.
	space, err := keyspace.New("bulk-action:", 1)
	require.NoError(t, err)
	log, err := activity.New(c, space, 0, slog.New(slog.DiscardHandler)).Read(t.Context(), activity.Query{Limit: 100})
	require.NoError(t, err)
	var entries []string
	for _, e := range slices.Backward(log.Activity) {
		require.Regexp(t, "^cli", e.Actor)
		require.Equal(t, api.ViaCLI, e.Via)
		require.NotContains(t, string(e.After), token)
		if e.Action == "key.rotate" && e.Object == id {
			require.JSONEq(t, `{"replaced_by":"`+nextID+`"}`, string(e.After))
		}
		what, _, _ := strings.Cut(e.Outcome, ":")
		entries = append(entries, strings.TrimSpace(e.Action+" "+e.Object+" "+what))
	}
	require.Equal(t, []string{
		"key.create " + id, "key.create " + reader.ID, "key.create " + operator.ID, "key.rotate " + id,
		"key.rotate " + nextID, "key.revoke " + id, "key.revoke " + id,
		"key.revoke " + id + " failed", "key.revoke " + reader.ID,
	}, entries)

	// A key's record in an unknown version is reported as an error, and the other keys are still
	// listed.
	require.NoError(t, c.HSet(t.Context(), "bulk-action:auth:keys", string(auth.SHA256("x")), `{"v":2}`).Err())
	got = console{}.exec(t.Context(), "key", "ls", "--json")
	got.ends(t, exitOK, "key "+auth.SHA256("x").KeyID()+": its record can't be used")
	require.Equal(t, 3, strings.Count(got.out, "\n"))

	// The audit knows the keys: they violate no law.
	inUse(t, c, space)
	require.Equal(t, run{exitOK, "ok: 0 groups, 0 jobs\n", ""}, console{}.exec(t.Context(), "audit"))
	require.Equal(t, run{exitOK, "ok: 0 groups, 0 jobs\n", ""}, console{}.exec(t.Context(), "audit", "--repair"))
	require.EqualValues(t, 4, c.HLen(t.Context(), "bulk-action:auth:keys").Val())
}

func TestKeyWithPepper(t *testing.T) {
	c := redisForKeys(t)
	pepper := writeFile(t, "pepper", strings.Repeat("p", 32)+"\n")
	require.NoError(t, os.Chmod(pepper, 0o600))
	hasher, err := auth.ReadHasher(pepper)
	require.NoError(t, err)
	t.Setenv("BULKACTION_AUTH_PEPPER_FILE", pepper)
	got := console{}.exec(t.Context(), "key", "create", "--role", "admin", "--key-prefix", "p:")
	require.Equal(t, exitOK, got.code, got.err)
	require.Equal(t, []string{string(hasher.Hash(strings.TrimSpace(got.out)))}, c.HKeys(t.Context(), "p:auth:keys").Val())

	require.NoError(t, os.WriteFile(pepper, []byte("short"), 0o600))
	got = console{}.exec(t.Context(), "key", "create", "--role", "admin")
	got.ends(t, exitError, "has 5 bytes, at least 32 are needed")
	require.NotContains(t, got.err, "short")
}

// TestKeyForFile: to create a key for a file of keys needs no Redis. The printed line can be added
// to such a file.
func TestKeyForFile(t *testing.T) {
	t.Setenv("BULKACTION_REDIS_URL", "redis://"+freeAddress(t))
	got := console{}.exec(t.Context(), "key", "create", "--role", "metrics", "--name", "prometheus", "--for-file")
	require.Equal(t, exitOK, got.code, got.err)
	token := strings.TrimSpace(got.out)
	line := "prometheus metrics - " + string(auth.SHA256(token))
	require.Contains(t, got.err, "\n"+line+"\n")
	require.NotContains(t, got.err, token)
	_, err := apikey.OpenFile(writeFile(t, "keys", line))
	require.NoError(t, err)

	got = console{}.exec(t.Context(), "key", "create", "--role", "reader", "--for-file", "--json")
	var shown struct{ Key, Line string }
	require.NoError(t, json.Unmarshal([]byte(got.out), &shown))
	hash := auth.SHA256(shown.Key)
	require.Equal(t, hash.KeyID()+" reader - "+string(hash), shown.Line)
}

func TestMistakesWithKeys(t *testing.T) {
	redisForKeys(t)
	token := auth.NewToken(auth.Admin)
	for want, args := range map[string][]string{
		"key needs a subcommand: create, ls, revoke, rotate": {"key"},
		"key create needs --role: one of admin, operator":    {"key", "create"},
		`role "root": must be one of`:                        {"key", "create", "--role", "root"},
		"tenant: a producer needs one":                       {"key", "create", "--role", "producer"},
		"expires 1s: must be from 1m":                        {"key", "create", "--role", "admin", "--expires", "1s"},
		"exclude each other":                                 {"key", "create", "--role", "reader", "--payloads", "--no-payloads"},
		"are not for --for-file":                             {"key", "create", "--role", "reader", "--for-file", "--expires", "24h"},
		"--name: id \"a b\": must match":                     {"key", "create", "--role", "reader", "--for-file", "--name", "a b"},
		"key revoke needs the id of one key":                 {"key", "revoke"},
		"key rotate needs the id of a key, not the key":      {"key", "rotate", token},
		"--redis-url:":                                       {"key", "ls", "--redis-url", "http://x"},
		"--key-prefix:":                                      {"key", "ls", "--key-prefix", "{x}"},
	} {
		got := console{}.exec(t.Context(), args...)
		got.ends(t, exitUsage, want)
		require.NotContains(t, got.err, token)
	}
	got := console{}.exec(t.Context(), "key", "ls", "--redis-url", "redis://:secret@"+freeAddress(t))
	got.ends(t, exitError, "Give the address of Redis with --redis-url or BULKACTION_REDIS_URL.")
	require.NotContains(t, got.err, "secret")
}

func TestKeyThatMayNotDoThis(t *testing.T) {
	for code, want := range map[api.ProblemCode]string{
		api.NotAllowed:  "Use an API key with another role or tenant: docs/security.md says",
		api.WrongTenant: "Leave out --tenant",
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(api.Problem{Code: code, Status: http.StatusForbidden, Detail: "no"})
		}))
		t.Cleanup(server.Close)
		console{}.exec(t.Context(), "--api", server.URL, "submit", "--type", "T", "--payload", "{}").ends(t, exitError, want)
	}
}

func TestAPIKeyOfCommands(t *testing.T) {
	token := auth.NewToken(auth.Reader)
	var sent []string
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.Header.Get("Authorization"))
		problem(w, http.StatusUnauthorized, "the API key is not valid")
	}))
	t.Cleanup(api.Close)
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte("\n"+token+"\n"), 0o600))
	stats := func(args ...string) run {
		sent = nil
		got := console{}.exec(t.Context(), append([]string{"stats", "--api", api.URL}, args...)...)
		require.NotContains(t, got.err+got.out, token)
		return got
	}
	got := stats()
	require.Equal(t, []string{""}, sent)
	require.Contains(t, got.err, "Give an API key with --api-key-file, BULKACTION_API_KEY_FILE or BULKACTION_API_KEY.")
	stats("--api-key-file", file)
	require.Equal(t, []string{"Bearer " + token}, sent)

	t.Setenv("BULKACTION_API_KEY_FILE", file)
	stats()
	require.Equal(t, []string{"Bearer " + token}, sent)
	t.Setenv("BULKACTION_API_KEY", token)
	stats().ends(t, exitUsage, "there are two API keys: in BULKACTION_API_KEY and in the file "+file)
	stats("--api-key-file", "")
	require.Equal(t, []string{"Bearer " + token}, sent)

	t.Setenv("BULKACTION_API_KEY_FILE", "")
	t.Setenv("BULKACTION_API_KEY", token+" "+token)
	stats().ends(t, exitUsage, "BULKACTION_API_KEY has no API key: a key has no spaces")
	t.Setenv("BULKACTION_API_KEY", "")
	stats("--api-key-file", file+"x").ends(t, exitError, "read the API key: open "+file+"x: no such file")
	require.NoError(t, os.WriteFile(file, []byte("\n"), 0o600))
	stats("--api-key-file", file).ends(t, exitUsage, "is empty: it must have an API key")
}

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

// TestExpiredKey: a time that is over is not shown as one to come.
func TestExpiredKey(t *testing.T) {
	at := time.Unix(1, 0)
	require.Equal(t, "expired at "+formatTime(at), expiryText(apikey.Record{ExpiresAt: at}))
	at = time.Now().Add(time.Hour)
	require.Equal(t, formatTime(at), expiryText(apikey.Record{ExpiresAt: at}))
	require.Equal(t, "never", expiryText(apikey.Record{}))
}
