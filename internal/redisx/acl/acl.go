// Package acl knows which rights in Redis each kind of process needs: the commands that it sends,
// those that its scripts call, and the names of its keys. It prints users of Redis with these
// rights, and checks that a process has them.
package acl

import (
	"context"
	"crypto/sha256"
	_ "embed" // for commands.txt
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

//go:generate go run ./derive ../../..
//go:generate go run ../../../cmd/bulkaction acl --prefix bulk-action: --format aclfile --output ../../../deployments/redis/users.acl

// need is what a kind of process does in Redis.
type need struct {
	scripts  []string // names of scripts
	commands []string // commands that it sends outside of scripts
	keys     []string // patterns of keys, without the prefix
	channels []string // patterns of channels, without the prefix
}

// User is a user of Redis and its rights.
type User struct {
	Name     string
	Commands []string // in lower case, subcommands as "xgroup|create"
	Keys     []string // patterns of keys that it reads and writes
	ReadOnly []string // patterns of keys that it only reads
	Channels []string // patterns of channels
}

// roleNames are the roles that bulkaction runs as processes.
var roleNames = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher", "broker"}

// Roles lists the roles that have a user of their own.
func Roles() []string { return slices.Clone(roleNames) }

// All is the user of a process that runs all roles.
const All = "all"

// Names lists the Redis users of an installation: one for each role, one for all roles in one
// process, and those of other programs. producer is a program that publishes to the ingest stream,
// event-reader a program that follows the stream events, guard a program that uses package guard,
// and cli is the command line where it calls Redis and not the API.
func Names() []string {
	return append(slices.Clone(roleNames), All, "producer", "event-reader", "guard", "cli")
}

// connection lists the commands by which go-redis opens and maintains connections, also to a Redis
// Cluster. Every user may run them.
var connection = []string{
	"asking", "client|setname", "cluster|slots", "command", "ping", "readonly", "select",
}

// outside lists the rights of programs outside of this module: what they send through packages
// client/producer and client/stream, and what their operators send with redis-cli. It is written by
// hand: package derive would also find commands of watermill that these packages never send.
var outside = map[string]need{
	"producer":     {commands: []string{"exec", "multi", "xadd", "xinfo|groups", "xlen"}, keys: []string{"ingest"}},
	"event-reader": {commands: []string{"xinfo|stream", "xrange", "xread", "xrevrange"}, keys: []string{"events"}},
}

// guardWake is the pattern of keyspace.GuardWake's channels. It is a literal, because package
// derive would take a call of GuardWake for a need of each role that reaches this package.
const guardWake = "guard:wake:*"

// Of returns the Redis user with this name, and its rights on keys that begin with prefix. An
// unknown name is an error.
func Of(name, prefix string) (User, error) {
	u := User{Name: name}
	switch {
	case name == All:
		for _, role := range roleNames {
			one, err := Of(role, prefix)
			if err != nil {
				return User{}, err
			}
			u.Commands = append(u.Commands, one.Commands...)
			u.Keys = append(u.Keys, one.Keys...)
			u.Channels = append(u.Channels, one.Channels...)
		}
	case slices.Contains(Names(), name):
		for _, n := range []need{needs[name], outside[name]} {
			if err := u.fill(n, prefix); err != nil {
				return User{}, err
			}
		}
	default:
		return User{}, fmt.Errorf("no user %q: there are %s", name, strings.Join(Names(), ", "))
	}
	for _, list := range []*[]string{&u.Commands, &u.Keys, &u.ReadOnly, &u.Channels} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	u.Keys = withoutCovered(u.Keys)
	return u, nil
}

// withoutCovered returns the key patterns without those that a wider pattern of the list covers. It
// takes only patterns whose single * is at the end for wider ones.
func withoutCovered(patterns []string) []string {
	return slices.DeleteFunc(slices.Clone(patterns), func(pattern string) bool {
		return slices.ContainsFunc(patterns, func(other string) bool {
			begin, ok := strings.CutSuffix(other, "*")
			return ok && other != pattern && !strings.Contains(begin, "*") && strings.HasPrefix(pattern, begin)
		})
	})
}

// ProducerOf returns the Redis user of a program that publishes only to the additional ingest
// stream with this name (keyspace.IngestOf).
func ProducerOf(stream, prefix string) (User, error) {
	u, err := Of("producer", prefix)
	u.Name = "producer-" + stream
	for i := range u.Keys {
		u.Keys[i] += ":" + stream
	}
	return u, err
}

func (u *User) fill(n need, prefix string) error {
	u.Commands = slices.Concat(u.Commands, connection, n.commands)
	for _, name := range n.scripts {
		scripts := call.Named(name)
		if len(scripts) == 0 {
			return fmt.Errorf("rights of %s: this program does not have the script %s", u.Name, name)
		}
		for _, s := range scripts {
			u.Commands = append(u.Commands, CommandsOf(s.Source())...)
		}
	}
	for _, key := range n.keys {
		if u.Name == "event-reader" {
			u.ReadOnly = append(u.ReadOnly, prefix+key)
		} else {
			u.Keys = append(u.Keys, prefix+key)
		}
	}
	for _, channel := range n.channels {
		u.Channels = append(u.Channels, prefix+channel)
	}
	if slices.Contains(u.Commands, "publish") { // scripts of guards have the channel in their data
		u.Channels = append(u.Channels, prefix+guardWake)
	}
	return nil
}

// Hash returns the form in which Redis keeps a password.
func Hash(password string) string {
	sum := sha256.Sum256([]byte(password))
	return hex.EncodeToString(sum[:])
}

// Placeholder returns a text that printed rules have in place of the hash of a user's password.
// Redis refuses it, so that nobody creates a user with a known password by mistake.
func Placeholder(user string) string { return "SHA256-OF-THE-PASSWORD-OF-" + user }

// Rules returns the rules of a user in the form of ACL SETUSER and of an ACL file. hash is the
// SHA-256 of the password, or a placeholder. The braces in key names need no escape: in patterns
// only * ? [ ] and \ have a meaning, and no key prefix contains these.
func (u User) Rules(hash string) string {
	rules := []string{"on", "#" + hash, "-@all"}
	for _, name := range u.Commands {
		rules = append(rules, "+"+name)
	}
	rules = append(rules, "resetkeys")
	for _, pattern := range u.Keys {
		rules = append(rules, "~"+pattern)
	}
	for _, pattern := range u.ReadOnly {
		rules = append(rules, "%R~"+pattern)
	}
	rules = append(rules, "resetchannels")
	for _, pattern := range u.Channels {
		rules = append(rules, "&"+pattern)
	}
	return strings.Join(rules, " ")
}

var checkRights = call.NewScript("check_rights", lua.Source("processes/check_rights"))

// Missing is the error for rights that the Redis user of a process does not have.
type Missing struct {
	User     string
	Commands []string
	Keys     []string // patterns that it may not read and write
	Channels []string // patterns
}

// Error names what is missing, and what to do.
func (m *Missing) Error() string {
	var parts []string
	if len(m.Commands) > 0 {
		parts = append(parts, "run "+strings.Join(m.Commands, ", "))
	}
	if len(m.Keys) > 0 {
		parts = append(parts, "read and write keys "+strings.Join(m.Keys, ", "))
	}
	if len(m.Channels) > 0 {
		parts = append(parts, "use channels "+strings.Join(m.Channels, ", "))
	}
	return fmt.Sprintf(
		"the Redis user of this process may not %s: a script that Redis stops half way would lose jobs; %s",
		strings.Join(parts, "; it may not "), Advice(m.User),
	)
}

// Advice says how to give a user its rights.
func Advice(user string) string {
	return fmt.Sprintf("`bulkaction acl --role %s` prints the user with the rights that it needs", user)
}

// Check returns a *Missing if the Redis user of conn lacks a right of u on a master. It does not
// check the rights in ReadOnly, and u must have Keys, as the users of all roles have. It calls the
// script check_rights once on each master. A server that can't report rights (before Redis 7.0,
// miniredis) is accepted. Other errors are those of Redis and of the network.
func Check(ctx context.Context, conn *redisx.Conn, u User) error {
	return conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		return check(ctx, shard, u)
	})
}

func check(ctx context.Context, server redis.Cmdable, u User) error {
	probes := u.probes()
	args := make([]any, len(probes))
	for i, p := range probes {
		args[i] = p.command
	}
	r := checkRights.Read(ctx, server, nil, args)
	denied := r.Numbers()
	err := r.Err()
	if call.IsNoPermission(err) {
		name := "evalsha"
		if strings.Contains(err.Error(), "'eval'") {
			name = "eval"
		}
		return &Missing{User: u.Name, Commands: []string{name}}
	}
	if err != nil {
		return fmt.Errorf("check rights: %w", err)
	}
	if len(denied) == 0 {
		return nil
	}
	var numbers []int
	for _, n := range denied {
		if n < 1 || n > int64(len(probes)) {
			return fmt.Errorf("check rights: unexpected number %d in the reply", n)
		}
		numbers = append(numbers, int(n)-1)
	}
	return u.missing(probes, numbers)
}

func (u User) missing(probes []probe, denied []int) *Missing {
	m := &Missing{User: u.Name}
	for _, i := range denied {
		if p := probes[i]; p.kind == ofKey {
			m.Keys = append(m.Keys, p.right)
		}
	}
	silent := map[string]bool{} // channels on which one of the two commands is allowed
	for i, p := range probes {
		silent[p.on] = silent[p.on] || p.kind == ofChannel && !slices.Contains(denied, i)
	}
	for _, i := range denied {
		switch p := probes[i]; {
		case p.kind == ofChannel && !silent[p.on]:
			m.Channels = append(m.Channels, p.on)
			m.Commands = append(m.Commands, p.right)
		case p.kind == ofChannel, p.kind == ofCommand && !slices.Contains(m.Keys, p.on):
			m.Commands = append(m.Commands, p.right)
		}
	}
	for _, list := range []*[]string{&m.Commands, &m.Keys, &m.Channels} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return m
}

// probe is a command that is denied if a right is missing.
type probe struct {
	command string
	kind    probeKind
	right   string // name of a command, or pattern of keys
	on      string // pattern of the key or channel of the command; "" if it has none
}

type probeKind int

const (
	ofCommand probeKind = iota
	ofKey
	ofChannel // a command on a channel
)

// probes returns a probe, a command for the script check_rights to test, for each right of u but
// those in ReadOnly. u must have Keys. The probe of a key pattern is an evalsha with a matching
// key, because it needs both the right to read the key and the right to write it. Nothing runs the
// probes.
func (u User) probes() []probe {
	var all []probe
	main := u.Keys[len(u.Keys)-1] // the keys of partitions: a brace comes after all letters
	for _, name := range u.Commands {
		switch {
		case slices.Contains(onChannel, name):
			for _, pattern := range u.Channels {
				all = append(all, probe{command(name, sample(pattern)), ofChannel, name, pattern})
			}
		case slices.Contains(withoutKey, name):
			all = append(all, probe{command(name, ""), ofCommand, name, ""})
		default:
			all = append(all, probe{command(name, sample(main)), ofCommand, name, main})
		}
	}
	for _, pattern := range u.Keys {
		all = append(all, probe{command("evalsha", sample(pattern)), ofKey, pattern, pattern})
	}
	return all
}

// sample returns a name that a pattern matches.
func sample(pattern string) string { return strings.ReplaceAll(pattern, "*", "0") }

// command returns the text of a Redis command on a key, channel or nothing, with all arguments that
// it needs: with fewer, some versions of Redis (8.0.2, 8.6.3) answer that the command may not run,
// and Valkey 9.1 crashes. check_rights tests the text; nothing runs it.
func command(name, key string) string {
	words := strings.ReplaceAll(name, "|", " ")
	switch name {
	case "eval", "evalsha":
		return words + " script 1 " + key
	case "rename", "sunionstore":
		return words + " " + key + " " + key
	case "xread":
		return words + " streams " + key + " 0"
	case "xreadgroup":
		return words + " group g c streams " + key + " >"
	case "zunionstore":
		return words + " " + key + " 1 " + key
	}
	if key != "" {
		words += " " + key
	}
	return words + strings.Repeat(" 0", arguments[name])
}

// arguments has the number of arguments that commands need, besides their key or channel.
var arguments = func() map[string]int {
	all := map[string]int{}
	for n, names := range map[int]string{
		1: "blpop client|setname hdel hexists hget hmget hscan hstrlen lindex lpush pexpire publish rpush sadd scan select set " +
			"setnx sismember srem sscan xdel xinfo|consumers xpending xsetid zrank zrem zrevrank zscan zscore",
		2: "getrange hincrby hset hsetnx lrange lrem lset ltrim setrange wait xack xgroup|create xgroup|delconsumer xgroup|setid " +
			"xrange xrevrange xtrim zadd zcount zincrby zrange zrangebylex zrangebyscore zremrangebyscore zrevrange zrevrangebyscore",
		3: "xadd",
		4: "xautoclaim xclaim",
	} {
		for _, name := range strings.Fields(names) {
			all[name] = n
		}
	}
	return all
}()

// onChannel lists the commands whose argument is a channel, withoutKey those without a channel or a
// key. All other commands have a key.
var (
	onChannel  = []string{"publish", "subscribe"}
	withoutKey = []string{
		"asking", "client|setname", "cluster|slots", "command", "exec", "info", "multi", "ping", "readonly", "scan",
		"select", "time", "unsubscribe", "wait",
	}
)

// commandList has the name of each command of Redis 7.0, as COMMAND LIST returns them. A subcommand
// has the form "xgroup|create".
//
//go:embed commands.txt
var commandList string

// known has each Redis command by name. The value is true if the command has subcommands.
var known = func() map[string]bool {
	all := map[string]bool{}
	for _, name := range strings.Fields(commandList) {
		all[name] = all[name] || false
		if container, _, ok := strings.Cut(name, "|"); ok {
			all[container] = true
		}
	}
	return all
}()

var (
	comment = regexp.MustCompile(`--.*`)
	literal = regexp.MustCompile(`["']([A-Z]{2,})["']`)
)

// CommandsOf returns the commands that a Lua script calls, each once, sorted by name. It takes each
// string literal in capitals that is the name of a command for a call, as an argument of redis.call
// or of a function that calls it. So scripts must write commands as such literals, and use these
// literals for nothing else. After a command with subcommands, the next literal is the subcommand.
func CommandsOf(script string) []string {
	var all []string
	found := literal.FindAllStringSubmatch(comment.ReplaceAllString(script, ""), -1)
	for i := 0; i < len(found); i++ {
		name := strings.ToLower(found[i][1])
		container, ok := known[name]
		if container {
			if ok = i+1 < len(found); ok {
				i++
				name += "|" + strings.ToLower(found[i][1])
				ok = IsCommand(name)
			}
		}
		if ok {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// CommandsOfMethod returns the commands that a method of a go-redis client sends. Except for some
// listed methods it is one: the longest command name with which the method's name begins, such as
// xrange for XRangeN; nil if there is none.
func CommandsOfMethod(method string) []string {
	switch method {
	case "SetNX": // with a TTL it sends SET
		return []string{"set", "setnx"}
	case "TxPipeline", "TxPipelined":
		return []string{"exec", "multi"}
	case "Subscribe":
		return []string{"subscribe", "unsubscribe"}
	}
	longest, size := "", 0
	for name, container := range known {
		spelled := strings.ReplaceAll(name, "|", "")
		if !container && len(spelled) > size && strings.HasPrefix(strings.ToLower(method), spelled) {
			longest, size = name, len(spelled)
		}
	}
	if longest == "" {
		return nil
	}
	return []string{longest}
}

// IsCommand reports whether Redis has a command of this name, in lower case.
func IsCommand(name string) bool {
	_, ok := known[name]
	return ok
}
