// Package acl knows which rights in Redis each kind of process needs: the commands that it sends,
// those that its scripts call, and the names of its keys. It prints users of Redis with these
// rights, and checks that a process has them.
package acl

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
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
	"producer":     {commands: []string{"exec", "multi", "xadd", "xlen"}, keys: []string{"ingest"}},
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
