package style_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fieldCommands are the Redis commands, as methods of go-redis, that read or write fields of a hash
// or a part of a string.
var fieldCommands = []string{
	"HGet", "HMGet", "HGetAll", "HGetDel", "HGetEX", "HSet", "HMSet", "HSetNX", "HSetEX", "HSetEXWithArgs", "HIncrBy",
	"HIncrByFloat", "HDel", "HScan", "HScanNoValues", "HExists", "HVals", "HKeys", "HStrLen", "HRandField",
	"HRandFieldWithValues", "HExpire", "HPersist", "GetRange", "SetRange", "SubStr", "GetBit", "SetBit", "BitField",
}

// stringCommands are the Redis commands that read or write a whole string. The check forbids them
// only for the strings with the states of jobs.
var stringCommands = []string{"Get", "Set", "SetArgs", "SetEx", "SetNX", "GetSet", "GetDel", "GetEx", "Append", "StrLen", "MGet"}

// openHashes are methods of package keyspace that build the keys of hashes which other packages
// than ledger own. The check allows their fields everywhere.
var openHashes = []string{
	"Workers", "Stages", "Brokers", // of package presence
}

// fieldUsers are the files and folders that may use fieldCommands, with the reason.
var fieldUsers = map[string]string{
	"internal/jobs/ledger/":                   "owns the layout",
	"internal/audit/":                         "recounts for itself, and repairs",
	"internal/stage/presence/":                "owns the hashes of processes",
	"guard/":                                  "owns the layout of guards",
	"internal/access/apikey/":                 "owns the records of API keys",
	"internal/room/waitingroom/":              "owns the layout of the waiting room",
	"internal/cli/audit_repair_test.go":       "damages a guard",
	"internal/cli/key_test.go":                "damages the record of an API key, and looks at its hash",
	"internal/testkit/tamper/":                "damages data for tests",
	"internal/testkit/audittest/":             "damages data for the tests of the audit",
	"internal/testkit/stagetest/look.go":      "compares the counts of groups with the states of their jobs",
	"internal/room/broker/world_test.go":      "looks at the records of users",
	"internal/room/broker/race_test.go":       "looks at the records of users",
	"internal/room/broker/loss_test.go":       "damages records of users, and looks at them",
	"internal/jobs/groups/grouplist_test.go":  "makes failed groups",
	"internal/jobs/groups/groupviews_test.go": "makes groups with many failed jobs",
	"tests/chaos/oracle_test.go":              "is independent of the ledger, which it checks",
	"bench/ceiling.go":                        "has a hash of its own, to measure Redis alone",
}

// TestHashFieldsBelongToTheLedger requires that all calls that fieldAccesses finds in Go files are
// in fieldUsers, and that each entry of fieldUsers has such a call.
func TestHashFieldsBelongToTheLedger(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	var offences []string
	used := map[string]bool{}
	for _, file := range trackedFiles(t, root, ".go") {
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		found := fieldAccesses(t, file, text)
		if user := userOf(file); user != "" {
			used[user] = used[user] || len(found) > 0
			continue
		}
		offences = append(offences, found...)
	}
	require.Empty(t, offences, "calls that name fields of hashes or read states of jobs: use a view of package ledger")
	for user := range fieldUsers {
		require.True(t, used[user], "%s needs no exception any more", user)
	}
}

func userOf(file string) string {
	for user := range fieldUsers {
		if file == user || strings.HasSuffix(user, "/") && strings.HasPrefix(file, user) {
			return user
		}
	}
	return ""
}

// TestFieldAccessesAreFound tests the check of TestHashFieldsBelongToTheLedger: it finds commands
// on a client, in a pipeline, with the key in a variable, and as a text for Do. It allows
// openHashes, other strings, HLEN and DEL.
func TestFieldAccessesAreFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code  string
		found bool
	}{
		"a field of a group":       {`conn.Cmd.HGet(ctx, p.Group(id), "status")`, true},
		"in a pipeline":            {`pipe.HMGet(ctx, p.partition.Load(typ), "waiting", "non_ready")`, true},
		"a key in a variable":      {`key := p.Tenant(t); c.HSet(ctx, key, "rps", 1)`, true},
		"all fields":               {`c.HGetAll(ctx, w.P.Aggregate("g"))`, true},
		"a state":                  {`c.GetRange(ctx, p.States(id), 0, 1)`, true},
		"all states":               {`c.Get(ctx, p.States(id))`, true},
		"all states, written":      {`pipe.Set(ctx, w.space.OfTenant("t").States("g"), "W!", 0)`, true},
		"a command as text":        {`c.Do(ctx, "hset", p.Group("g"), "status", "COMPLETED")`, true},
		"a command in a slice":     {`c.Do(ctx, append([]any{"HDEL"}, fields...)...)`, true},
		"the processes":            {`c.HSet(ctx, space.Workers(), id, text)`, false},
		"another string":           {`c.Get(ctx, space.OfGroup(id).Owner(id))`, false},
		"the number of fields":     {`c.HLen(ctx, p.Payloads("g"))`, false},
		"a group that is deleted":  {`c.Del(ctx, p.Group("g"), p.States("g"))`, false},
		"another command as text":  {`c.Do(ctx, "xadd", p.Ready("T"), "*", "hset", "x")`, false},
		"a function of the ledger": {`ledger.Statuses(ctx, c, p, ids)`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := fieldAccesses(t, "a/b.go", []byte("package b\n\nfunc f() {\n\t"+c.code+"\n}\n"))
			require.Equal(t, c.found, len(found) > 0, found)
			if c.found {
				require.True(t, strings.HasPrefix(found[0], "a/b.go:4: "), found[0])
			}
		})
	}
}

// fieldAccesses returns the calls in a Go file that read or write fields of hashes or the states of
// jobs.
func fieldAccesses(t *testing.T, file string, text []byte) []string {
	t.Helper()
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution)
	require.NoError(t, err)
	var found []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		command, ok := call.Fun.(*ast.SelectorExpr)
		if ok && accessesFields(command.Sel.Name, call.Args) {
			found = append(found, file+":"+itoa(fset.Position(call.Pos()).Line)+": "+command.Sel.Name)
		}
		return true
	})
	return found
}

// accessesFields says whether a method call is one of fieldCommands on another hash than those of
// openHashes, or one of stringCommands on the states of jobs. The first argument of a command is
// its context, the second its key.
func accessesFields(method string, args []ast.Expr) bool {
	switch {
	case method == "Do" && len(args) > 1:
		return slices.ContainsFunc(fieldCommands, func(c string) bool { return strings.EqualFold(c, firstText(args[1])) })
	case len(args) < 2:
		return false
	case slices.Contains(fieldCommands, method):
		return !slices.Contains(openHashes, methodOf(args[1]))
	case slices.Contains(stringCommands, method):
		return slices.ContainsFunc(args[1:], func(key ast.Expr) bool { return methodOf(key) == "States" })
	}
	return false
}

// methodOf returns the name of the method that an expression calls; "" if it does not call a
// method.
func methodOf(e ast.Expr) string {
	if call, ok := e.(*ast.CallExpr); ok {
		if method, ok := call.Fun.(*ast.SelectorExpr); ok {
			return method.Sel.Name
		}
	}
	return ""
}

// firstText returns the first string constant in an expression.
func firstText(e ast.Expr) (text string) {
	ast.Inspect(e, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING && text == "" {
			text, _ = strconv.Unquote(lit.Value)
		}
		return text == ""
	})
	return text
}
