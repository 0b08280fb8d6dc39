package acl

import (
	"context"
	_ "embed" // for commands.txt
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

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

// missing returns the error for the probes that were denied.
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
				all = append(all, probe{name + " " + sample(pattern), ofChannel, name, pattern})
			}
		case slices.Contains(withoutKey, name):
			all = append(all, probe{strings.ReplaceAll(name, "|", " "), ofCommand, name, ""})
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

// command returns the text of a Redis command on a key, with the arguments that Redis needs to find
// the key in it. check_rights tests the text; nothing runs it.
func command(name, key string) string {
	words := strings.ReplaceAll(name, "|", " ")
	switch name {
	case "blpop":
		return words + " " + key + " 0" // the last argument is not a key
	case "eval", "evalsha":
		return words + " script 1 " + key
	case "xread":
		return words + " streams " + key + " 0"
	case "xreadgroup":
		return words + " group g c streams " + key + " >"
	}
	return words + " " + key
}

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
