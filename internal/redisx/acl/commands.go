package acl

import (
	_ "embed" // for commands.txt
	"regexp"
	"slices"
	"strings"
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
