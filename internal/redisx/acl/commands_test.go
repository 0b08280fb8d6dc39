package acl_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestCommandsOfScripts(t *testing.T) {
	t.Parallel()
	for source, want := range map[string][]string{
		"":                            nil,
		"redis.call('GET', k)":        {"get"},
		`redis.pcall("PUBLISH", 'A')`: {"publish"},
		"call('XINFO', 'STREAM', k)":  {"xinfo|stream"},
		"-- call('DEL', k)\ncall('ZADD', k) -- 'ZREM'": {"zadd"},
		"local f = a and 'ZRANK' or 'ZREVRANK' f(k)":   {"zrank", "zrevrank"},
		"precheck('HLEN', a) precheck('HLEN', b)":      {"hlen"},
		"return { 'OK', 'GONE', 'x', 'W' }":            nil,
		"call('XGROUP', 'NOSUCH', k)":                  nil,
		"call('XINFO')":                                nil,
	} {
		require.Equal(t, want, acl.CommandsOf(source), source)
	}
}

func TestCommandsOfMethods(t *testing.T) {
	t.Parallel()
	for method, want := range map[string][]string{
		"Get": {"get"}, "GetRange": {"getrange"}, "XGroupCreateMkStream": {"xgroup|create"}, "ZAddXX": {"zadd"},
		"XInfoConsumers": {"xinfo|consumers"}, "SetNX": {"set", "setnx"}, "TxPipelined": {"exec", "multi"},
		"XPendingExt": {"xpending"}, "EvalSha": {"evalsha"}, "ClientSetName": {"client|setname"}, "BLPop": {"blpop"},
		"PoolStats": nil, "ForEachMaster": nil, "Close": nil, "Pipelined": nil,
	} {
		require.Equal(t, want, acl.CommandsOfMethod(method), method)
	}
}

// TestAllCommandsAreKnown: commands.txt has every command that the Redis of the tests has.
// Otherwise CommandsOf would miss a call of a script.
func TestAllCommandsAreKnown(t *testing.T) {
	t.Parallel()
	names, err := redistest.Server(t).Client().Do(t.Context(), "command", "list").StringSlice()
	require.NoError(t, err)
	require.Greater(t, len(names), 300)
	for _, name := range names {
		require.True(t, acl.IsCommand(name), name)
	}
}

// TestScriptsNameTheirCommands: each script writes each command that it calls as a string literal
// in capitals, so that CommandsOf finds it.
func TestScriptsNameTheirCommands(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../lua/*/*.lua")
	require.NoError(t, err)
	require.Greater(t, len(files), 60)
	called := regexp.MustCompile(`(?:^|[^a-z_])p?call\(([^,)\s]+)`)
	// passed has, by script file, the first arguments of call that are no literals: variables that
	// hold literals of the script, and functions that return them.
	passed := map[string][]string{
		"base.lua": {"command", "f"}, "repair_misplaced.lua": {"command"}, "why.lua": {"rank_of", "range_of"},
		"requeue.lua": {"cjson.decode"}, "check_rights.lua": {"redis.acl_check_cmd"},
		"places.lua": {"come_back"},
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		commands := acl.CommandsOf(string(text))
		for _, line := range strings.Split(string(text), "\n") {
			code, _, _ := strings.Cut(line, "--")
			for _, found := range called.FindAllStringSubmatch(code, -1) {
				name := found[1]
				if slices.Contains(passed[filepath.Base(file)], name) {
					continue
				}
				require.Regexp(t, `^'[A-Z]+'$`, name, "%s: %s", file, line)
				name = strings.ToLower(strings.Trim(name, "'"))
				require.True(t, slices.ContainsFunc(commands, func(c string) bool {
					return c == name || strings.HasPrefix(c, name+"|")
				}), "%s: %s", file, line)
			}
		}
	}
}
