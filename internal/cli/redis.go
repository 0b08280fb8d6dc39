package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// redisFlags are the flags of commands that connect to the roles' Redis instead of calling the API.
type redisFlags struct{ url, prefix string }

func (f *redisFlags) add(flags *pflag.FlagSet) {
	f.prefix = os.Getenv("BULKACTION_KEY_PREFIX")
	if f.prefix == "" {
		f.prefix = "bulk-action:"
	}
	flags.StringVar(&f.url, "redis-url", "",
		"Redis of the roles; BULKACTION_REDIS_URL sets the default, and the other variables BULKACTION_REDIS_*\n"+
			"the user and TLS (default redis://127.0.0.1:6379/0)")
	flags.StringVar(&f.prefix, "key-prefix", f.prefix,
		"prefix of the roles' keys; BULKACTION_KEY_PREFIX sets the default")
}

// check returns an error if the URL or a variable of the connection is wrong.
func (f *redisFlags) check() error {
	_, err := f.config()
	return err
}

// config returns the settings of the connection, from the flags and from the environment variables
// that roles use, too.
func (f *redisFlags) config() (redisx.Config, error) {
	if err := checkRedisURL(f.url); err != nil {
		return redisx.Config{}, err
	}
	cfg, err := app.LoadRedis(os.Environ(), f.url)
	if err != nil {
		return redisx.Config{}, usagef("%v", err)
	}
	connection := cfg.Connection()
	connection.CommandTimeout = 10 * time.Second
	return connection, nil
}

// connect connects to Redis and checks that it answers. The caller must close the connection. It
// also turns off the default logger of this process.
func (f *redisFlags) connect(ctx context.Context) (*redisx.Conn, error) {
	cfg, err := f.config()
	if err != nil {
		return nil, err
	}
	// errors are returned; log lines would only repeat them
	slog.SetDefault(slog.New(slog.DiscardHandler))
	conn, err := redisx.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := conn.Ping(ctx); err != nil {
		_ = conn.Close() // no command is running
		return nil, withHint(err, "Give the address of Redis with --redis-url or BULKACTION_REDIS_URL.")
	}
	return conn, nil
}

// space returns the key space of an installation that has the given number of partitions.
func (f *redisFlags) space(partitions int) (keyspace.Space, error) {
	space, err := keyspace.New(f.prefix, partitions)
	if err != nil {
		return keyspace.Space{}, usagef("--key-prefix: %v", err)
	}
	return space, nil
}

// installation returns the key space of the roles that use this Redis. It reads the number of
// partitions from Redis, and refuses data whose layout this version can't read.
func (f *redisFlags) installation(ctx context.Context, conn *redisx.Conn) (keyspace.Space, error) {
	one, err := f.space(1)
	if err != nil {
		return keyspace.Space{}, err
	}
	count, err := conn.Cmd.Get(ctx, one.PartitionCount()).Result()
	if errors.Is(err, redis.Nil) {
		return keyspace.Space{}, withHint(fmt.Errorf(
			"no role has used this Redis under the prefix %s yet: there is nothing to work on", f.prefix,
		),
			"Give the Redis of the roles and their prefix with --redis-url and --key-prefix.")
	}
	if err != nil {
		return keyspace.Space{}, fmt.Errorf("read number of partitions: %w", err)
	}
	partitions, err := strconv.Atoi(count)
	if err != nil {
		return keyspace.Space{}, fmt.Errorf("read number of partitions: %q is not a number", count)
	}
	space, err := f.space(partitions)
	if err != nil {
		return space, err
	}
	return space, roles.CheckLayouts(ctx, conn, space)
}

// adminUser is the name of a Redis user for people, with all rights: once the default user is off,
// somebody must be able to change users.
const adminUser = "admin"

// aclCommand has the flags of one call of `bulkaction acl`.
type aclCommand struct {
	root                                    *Root
	role, prefix, format, passwords, output string
	streams                                 string
	producers                               map[string]string // by the name of the user: its further ingest stream
}

func newACL(r *Root) *cobra.Command {
	a := &aclCommand{root: r}
	cmd := &cobra.Command{
		Use:   "acl",
		Short: "Print the users of Redis, one for each role, with the rights that they need",
		Long: "Print the users of Redis, one for each role, with the rights that they need.\n\n" +
			"--format aclfile prints a file for Redis's setting aclfile, --format setuser commands for redis-cli.\n" +
			"Without --role there is a user for each of\n" +
			"  " + strings.Join(acl.Names(), ", ") + ",\n" +
			"a user admin, who may do anything, and the default user is off.\n\n" +
			"With --ingest-streams there is also a user producer-NAME for each of these streams, which can only\n" +
			"write to it.\n\n" +
			"--passwords names a directory with a file for each user, which holds the user's password, as Docker\n" +
			"and Kubernetes mount secrets. The output has only hashes; users without a file are left out. Without\n" +
			"--passwords there are placeholders in place of the hashes, which Redis refuses.\n\n" +
			"docs/redis-users.md says what each user may do.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.run() },
	}
	flags := cmd.Flags()
	flags.StringVar(&a.role, "role", "", "print only the user of this role")
	flags.StringVar(&a.prefix, "prefix", cmp.Or(os.Getenv("BULKACTION_KEY_PREFIX"), "bulk-action:"),
		"prefix of the roles' keys; BULKACTION_KEY_PREFIX sets the default")
	flags.StringVar(&a.streams, "ingest-streams", os.Getenv("BULKACTION_INGEST_STREAMS"),
		"additional ingest streams; BULKACTION_INGEST_STREAMS sets the default")
	flags.StringVar(&a.format, "format", "setuser", "setuser or aclfile")
	flags.StringVar(&a.passwords, "passwords", "", "directory with a file for each user, which holds its password")
	flags.StringVar(&a.output, "output", "",
		"file to write to, with rights only for its owner (default: standard output)")
	return cmd
}

// printedUser is a user in the output with --json.
type printedUser struct {
	User     string   `json:"user"`
	Commands []string `json:"commands,omitempty"`
	Keys     []string `json:"keys,omitempty"`
	ReadOnly []string `json:"read_only_keys,omitempty"`
	Channels []string `json:"channels,omitempty"`
	Rules    string   `json:"rules"` // what follows the name in ACL SETUSER
}

func (a *aclCommand) run() error {
	if a.format != "setuser" && a.format != "aclfile" {
		return usagef("--format %q: write setuser or aclfile", a.format)
	}
	if !keyspace.ValidPrefix(a.prefix) {
		return usagef("--prefix %q: must be %s", a.prefix, keyspace.PrefixRule)
	}
	names, err := a.names()
	if err != nil {
		return err
	}
	if a.role != "" {
		if !slices.Contains(names, a.role) {
			return usagef("--role %q: there are %s", a.role, strings.Join(names, ", "))
		}
		names = []string{a.role}
	}
	users, err := a.users(names)
	if err != nil {
		return err
	}
	if a.role == "" { // last: an administrator may be connected as the default user
		users = append(users, printedUser{User: "default", Rules: "reset off"})
	}
	var text strings.Builder
	for _, u := range users {
		a.write(&text, u)
	}
	if a.output != "" {
		if err := os.WriteFile(a.output, []byte(text.String()), 0o600); err != nil {
			return fmt.Errorf("write users: %w", err)
		}
		return nil
	}
	if a.root.JSON {
		return a.root.Print(users)
	}
	_, err = fmt.Fprint(a.root.Out, text.String())
	return err
}

// names returns the names of all Redis users except default, including one for each additional
// ingest stream. It also sets a.producers, from user to stream. A wrong --ingest-streams is an
// error.
func (a *aclCommand) names() ([]string, error) {
	names := acl.Names()
	a.producers = map[string]string{}
	if a.streams != "" {
		streams, ok := app.ParseIngestStreams(strings.Split(a.streams, ","))
		for _, s := range streams {
			ok = ok && s.Prefix == a.prefix
			user := "producer-" + s.Name
			names, a.producers[user] = append(names, user), s.Name
		}
		if !ok {
			return nil, usagef("--ingest-streams %q: must be a comma list of tenant=stream, without spaces; a stream "+
				"is %singest: and a name", a.streams, a.prefix)
		}
	}
	return append(names, adminUser), nil
}

// users returns the Redis users with these names. With --passwords, a user without a password file
// is an error with --role; without --role, it is left out, and a note on Err names it; it is an
// error if all are left out.
func (a *aclCommand) users(names []string) ([]printedUser, error) {
	var all []printedUser
	var without []string
	for _, name := range names {
		hash, err := a.hash(name)
		if errors.Is(err, fs.ErrNotExist) && a.role == "" {
			without = append(without, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		if name == adminUser {
			all = append(all, printedUser{User: name, Rules: "on #" + hash + " ~* &* +@all"})
			continue
		}
		u, err := a.user(name)
		if err != nil {
			return nil, err
		}
		all = append(all, printedUser{
			User: name, Commands: u.Commands, Keys: u.Keys, ReadOnly: u.ReadOnly, Channels: u.Channels,
			Rules: u.Rules(hash),
		})
	}
	if len(all) == 0 {
		return nil, usagef("--passwords %s: no file is named like a user: %s", a.passwords, strings.Join(names, ", "))
	}
	if len(without) > 0 {
		a.root.Notef("Left out, without a file in %s: %s.", a.passwords, strings.Join(without, ", "))
	}
	return all, nil
}

func (a *aclCommand) user(name string) (acl.User, error) {
	if stream, ok := a.producers[name]; ok {
		return acl.ProducerOf(stream, a.prefix)
	}
	return acl.Of(name, a.prefix)
}

// hash returns the hash of a user's password for Redis, or a placeholder without --passwords.
func (a *aclCommand) hash(name string) (string, error) {
	if a.passwords == "" {
		return acl.Placeholder(name), nil
	}
	text, err := os.ReadFile(filepath.Join(a.passwords, name))
	if err != nil {
		return "", fmt.Errorf("read the password of %s: %w", name, err)
	}
	password := strings.TrimRight(string(text), "\r\n")
	if password == "" {
		return "", fmt.Errorf("read the password of %s: the file %s is empty", name, filepath.Join(a.passwords, name))
	}
	return acl.Hash(password), nil
}

// write adds the line of a user in the format of --format. Only ACL SETUSER needs the rule reset:
// in an ACL file, each user begins without rights.
func (a *aclCommand) write(text *strings.Builder, u printedUser) {
	rules := strings.TrimPrefix(u.Rules, "reset ")
	if a.format == "setuser" {
		rules = "reset " + rules
		fmt.Fprintf(text, "ACL SETUSER %s %s\n", u.User, rules)
		return
	}
	fmt.Fprintf(text, "user %s %s\n", u.User, rules)
}
