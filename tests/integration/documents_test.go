package integration

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// commandLine matches the beginning of a block that has no language and holds commands for a shell.
// notRun matches the comment above a block that no test runs; its group is the reason.
var (
	commandLine = regexp.MustCompile(
		`^(\$ |bulkaction |make |go |redis-(cli|server) |docker |kubectl |curl |bin/|export |openssl |systemctl |git )`)
	notRun = regexp.MustCompile(`^<!-- not run: (.+) -->$`)
)

// block is a block of code in a document.
type block struct {
	language string // "" also for an indented block
	text     string
	reason   string // why the test can't run it; empty: it is run
}

func (b block) isCommands() bool {
	return b.language == "sh" || b.language == "console" || b.language == "" && commandLine.MatchString(b.text)
}

// blocks returns the blocks of code of a document.
func blocks(t *testing.T, name string) []block {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, name))
	require.NoError(t, err)
	found, err := blocksOf(string(text))
	require.NoError(t, err, name)
	return found
}

// blocksOf returns the code blocks of a Markdown text: fenced ones, and those that are indented by
// four spaces. It returns an error if text follows a comment `not run` before a block does.
func blocksOf(text string) ([]block, error) {
	var found []block
	var open *block // the block that the line is in
	fenced, reason, blank := false, "", true
	for line := range strings.Lines(text) {
		bare := strings.TrimSuffix(line, "\n")
		indented := strings.HasPrefix(line, "    ")
		switch {
		case fenced && bare == "```":
			found, open, fenced = append(found, *open), nil, false
		case fenced:
			open.text += line
		case open != nil && indented:
			open.text += strings.TrimPrefix(line, "    ")
		case strings.HasPrefix(bare, "```"):
			open, fenced = &block{language: bare[3:], reason: reason}, true
			reason = ""
		case indented && blank:
			open = &block{text: strings.TrimPrefix(line, "    "), reason: reason}
			reason = ""
		default:
			if open != nil {
				found, open = append(found, *open), nil
			}
			if match := notRun.FindStringSubmatch(bare); match != nil {
				reason = match[1]
			} else if bare != "" {
				if reason != "" {
					return nil, fmt.Errorf("no block follows the comment %q", reason)
				}
			}
		}
		blank = bare == "" || reason != ""
	}
	if open != nil {
		found = append(found, *open)
	}
	return found, nil
}

// TestBlocks shows which blocks are found in a document, and which of them are commands.
func TestBlocks(t *testing.T) {
	t.Parallel()
	found, err := blocksOf("Text\n    of a paragraph\n\n    make chaos\n    make race\n\n<!-- not run: needs Docker -->\n```sh\n" +
		"docker ps\n```\n<!-- not run: slow -->\n\n    make bench\n\n```go\nvar a int\n```\n```sh\n\n    indented\n```\n\n    a formula = 1\n")
	require.NoError(t, err)
	require.Equal(t, []block{
		{text: "make chaos\nmake race\n"},
		{language: "sh", text: "docker ps\n", reason: "needs Docker"},
		{text: "make bench\n", reason: "slow"},
		{language: "go", text: "var a int\n"},
		{language: "sh", text: "\n    indented\n"},
		{text: "a formula = 1\n"},
	}, found)
	var commands []bool
	for _, b := range found {
		commands = append(commands, b.isCommands())
	}
	require.Equal(t, []bool{true, true, true, false, true, false}, commands)
	_, err = blocksOf("<!-- not run: slow -->\nText\n")
	require.Error(t, err)
}

// shellCommands returns a document's blocks of sh as one script, in their order, without blocks
// that have the comment `not run`.
func shellCommands(t *testing.T, name string) string {
	t.Helper()
	var script strings.Builder
	for _, b := range blocks(t, name) {
		if b.reason == "" && b.language == "sh" {
			script.WriteString(b.text)
		}
	}
	require.NotEmpty(t, script.String(), name)
	return script.String()
}

type document struct {
	notRun int      // how many of its blocks have the comment `not run`
	ownRun bool     // a test of its own runs its commands, or none can be run
	want   []string // what its commands print, among other things
}

// documents has all documents with command blocks, and how many blocks of each have the comment
// `not run`.
var documents = map[string]document{
	"README.md":                        {ownRun: true},
	"docs/tutorial.md":                 {ownRun: true, notRun: 3},
	"docs/waiting-room.md":             {ownRun: true},
	"docs/performance.md":              {ownRun: true, notRun: 4},
	"docs/reliability.md":              {ownRun: true, notRun: 2},
	"docs/operations.md":               {ownRun: true, notRun: 1},
	"docs/guards.md":                   {ownRun: true, notRun: 1},
	"docs/control.md":                  {want: []string{"5,000       api", "In flight        0 of at most 20", "Waits for         scheduled", "Waits for   paused", "WINDOW OF 1000 MS   USED   OF\ntenant"}},
	"docs/redis-users.md":              {want: []string{"user worker", "user default"}},
	"docs/deployment.md":               {notRun: 5, want: []string{"maxmemory_policy:noeviction", "data 5.7 GB, maxmemory 10807mb, Redis 14 GiB, busy 5% of a core", "9 workers, in all 7.25 vCPU and 31.5 GiB, 277 a month, 0.46 for a million jobs", "Jobs erased"}},
	"docs/flow-control.md":             {notRun: 1, want: []string{"Limit a second    50"}},
	"docs/ingest-messages.md":          {},
	"docs/callbacks.md":                {ownRun: true},
	"docs/csv.md":                      {want: []string{"done        2"}},
	"docs/payloads.md":                 {want: []string{"cost        2"}},
	"docs/security.md":                 {want: []string{"LAST USED", "Revoked key key_"}},
	"docs/retries.md":                  {want: []string{"NOOP_PERMANENT", "retries     1"}},
	"docs/tls.md":                      {want: []string{"ok: ", `{"status":"ready"`}},
	"docs/howto/limit-a-customer.md":   {want: []string{`{"id":"acme","rps":50,`, "Weight            2"}},
	"docs/howto/never-send-twice.md":   {want: []string{"accepted    1"}},
	"docs/howto/autoscaling.md":        {notRun: 1, want: []string{`"backlog":0`}},
	"docs/howto/backup-and-restore.md": {want: []string{"ok: "}},
	"docs/howto/upgrading.md":          {want: []string{"ok: "}},
}

// TestDocumentsAreRun requires that the list documents has exactly the README and pages of docs,
// without docs/adr, that have command blocks. Each such block must be of sh, be in
// docs/waiting-room.md, or have the comment `not run`. The number of these comments must be the
// listed one.
func TestDocumentsAreRun(t *testing.T) {
	t.Parallel()
	names := []string{"README.md"}
	require.NoError(t, fs.WalkDir(os.DirFS(repository), "docs", func(name string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(name, ".md") && !strings.HasPrefix(name, "docs/adr/") {
			names = append(names, name)
		}
		return err
	}))
	for _, name := range names {
		d, listed := documents[name]
		commands, marked := 0, 0
		for _, b := range blocks(t, name) {
			if b.reason != "" {
				marked++
			} else if b.isCommands() {
				commands++
				require.True(t, b.language == "sh" || name == "docs/waiting-room.md",
					"%s: put commands into a block of sh, or say before it why it is not run:\n%s", name, b.text)
			}
		}
		require.Equal(t, d.notRun, marked, "%s: blocks that are not run", name)
		require.Equal(t, listed, commands+marked > 0, "%s: the list of documents with commands", name)
	}
	for name := range documents {
		require.Contains(t, names, name)
	}
}

// TestDocumentSnippets requires that each Go snippet of the README and of docs/howto is also in the
// code of an example, which is compiled.
func TestDocumentSnippets(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob(filepath.Join(repository, "docs", "howto", "*.md"))
	require.NoError(t, err)
	require.NotEmpty(t, names)
	var examples strings.Builder
	for _, pattern := range []string{"examples/*/*.go", "processor/example*_test.go", "client/example*_test.go"} {
		files, err := filepath.Glob(filepath.Join(repository, filepath.FromSlash(pattern)))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			examples.Write(text)
		}
	}
	for i, name := range names {
		names[i], err = filepath.Rel(repository, name)
		require.NoError(t, err)
	}
	for _, name := range append(names, "README.md") {
		for _, b := range blocks(t, name) {
			if b.language == "go" {
				require.Contains(t, examples.String(), b.text, "%s must show what the example does", name)
			}
		}
	}
}

// TestDocumentCommands runs the blocks of sh of the listed documents without ownRun against one
// process of `bulkaction dev`, and requires the texts of want in what they print. Each document has
// a folder of its own. Of the commands, only addresses and ports are changed.
func TestDocumentCommands(t *testing.T) {
	t.Parallel()
	redis, api, bin := redistest.Server(t).URL(), childproc.FreeAddr(), t.TempDir()
	_, copyPort, _ := strings.Cut(childproc.FreeAddr(), ":")
	tlsAddr := childproc.FreeAddr()
	_, tlsPort, _ := strings.Cut(tlsAddr, ":")

	var script strings.Builder
	script.WriteString("redis-cli -u " + redis + " CONFIG SET repl-diskless-sync-delay 0\n" + // --rdb need not wait
		"ln -s " + proctest.Path(t, "bulkaction") + " " + bin + "\nexport PATH=" + bin + ":$PATH\n" +
		"bulkaction dev --redis-url $BULKACTION_REDIS_URL > dev.log 2>&1 &\n" +
		"until curl -s -o " + os.DevNull + " http://" + api + "/openapi.yaml; do sleep 0.1; done\n")
	for _, name := range slices.Sorted(maps.Keys(documents)) {
		if d := documents[name]; !d.ownRun {
			script.WriteString("echo '== " + name + "'\n(mkdir -p run/" + name + " && cd run/" + name + "\n" +
				shellCommands(t, name) + ")\n")
		}
	}
	text := strings.NewReplacer("redis://127.0.0.1:6379/0", redis, "127.0.0.1:8080", api, "6399", copyPort,
		// docs/tls.md
		"127.0.0.1:8443", childproc.FreeAddr(), "127.0.0.1:6390", tlsAddr, "6390", tlsPort, "127.0.0.1:9099", childproc.FreeAddr()).
		Replace(script.String())
	said := runScript(t, text, t.TempDir(), "BULKACTION_API=http://"+api, "BULKACTION_API_ADDR="+api, "BULKACTION_REDIS_URL="+redis)
	for name, d := range documents {
		if d.ownRun {
			continue
		}
		_, part, _ := strings.Cut(said, "\n== "+name+"\n")
		part, _, _ = strings.Cut(part, "\n== ")
		for _, want := range d.want {
			require.Contains(t, part, want, name)
		}
	}
}

// TestTutorialCommands runs the commands of docs/tutorial.md as a newcomer does: with a new Redis,
// and a processor in a Go module of its own. Of the commands, only addresses and folders are
// changed, and a link to the built bulkaction takes the place of its build.
func TestTutorialCommands(t *testing.T) {
	t.Parallel()
	_, redisPort, _ := strings.Cut(childproc.FreeAddr(), ":")
	api, dir := childproc.FreeAddr(), t.TempDir()
	text := shellCommands(t, "docs/tutorial.md")
	for _, change := range []struct{ old, new string }{
		{"go build -o bin/ ./cmd/bulkaction", "mkdir " + dir + "/bin\nln -s " + proctest.Path(t, "bulkaction") + " " + dir + "/bin"},
		{"$PWD/bin:", dir + "/bin:"},
		{"~/bulkaction-tutorial", dir + "/tutorial"},
		{"6380", redisPort},
		{"127.0.0.1:8080", api},
	} {
		require.Contains(t, text, change.old)
		text = strings.ReplaceAll(text, change.old, change.new)
	}
	t.Cleanup(func() {
		if t.Failed() { // the script repeats a call until it works
			for _, log := range []string{"redis.log", "roles.log"} {
				b, err := os.ReadFile(filepath.Join(dir, "tutorial", log))
				t.Logf("%s: %.4000s %v", log, b, err)
			}
		}
	})
	said := runScript(t, text, repository, "BULKACTION_API=http://"+api, "BULKACTION_API_ADDR="+api)
	for _, want := range []string{
		"exit code 3",                     // submit --wait
		`"data":{"text":"Welcome, Zoe!"}`, // results
		"payload: email must contain @",   // failures
		"Waits for   paused",              // why
		"ok: 3 groups, 6 jobs",            // audit
	} {
		require.Contains(t, said, want)
	}
}

const repository = "../.."

// TestReadmeCommands runs the commands of the README in their order in one shell. It changes
// addresses and the size of the demo, waits until `bulkaction dev` answers, and uses the binary
// that all tests share instead of building one. The output must contain the texts listed below.
func TestReadmeCommands(t *testing.T) {
	t.Parallel()
	address := childproc.FreeAddr()
	redisURL, bin := redistest.Server(t).URL(), t.TempDir()

	script := shellCommands(t, "README.md")
	for _, change := range []struct{ old, new string }{
		{"go run ./cmd/bulkaction demo", proctest.Path(t, "bulkaction") + " demo"},
		{"go build -o bin/ ./cmd/...", "ln -s " + proctest.Path(t, "bulkaction") + " " + bin},
		{"$PWD/bin:", bin + ":"},
		{"bulkaction demo\n", "bulkaction demo --jobs 300\n"},
		{"bulkaction dev &\n", "bulkaction dev --redis-url " + redisURL + " &\n" +
			"until curl -s -o " + os.DevNull + " http://" + address + "/openapi.yaml; do sleep 0.1; done\n"},
		{"redis://127.0.0.1:6379/0", redisURL},
		{"http://127.0.0.1:8080", "http://" + address},
	} {
		require.Contains(t, script, change.old)
		script = strings.ReplaceAll(script, change.old, change.new)
	}

	said := runScript(t, script, repository, "BULKACTION_API="+address, "BULKACTION_API_ADDR="+address)
	for _, want := range []string{
		"300 of 300 e-mails done", "audit clean", // demo
		`"self":"/v1/groups/costs"`, // curl
		"cost        5",             // watch costs
		"20 of 20 ended (100%)",     // submit --file
		"ok: 3 groups, 23 jobs",     // audit
	} {
		require.Contains(t, said, want)
	}
}

// runScript runs a script in one bash in the folder dir, for at most 5 minutes, requires that it
// succeeds, and returns its stdout and stderr.
func runScript(t *testing.T, script, dir string, environ ...string) string {
	t.Helper()
	output, err := os.Create(filepath.Join(t.TempDir(), "output"))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euxo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), environ...)
	cmd.Stdout, cmd.Stderr = output, output // a file: the roles hold it open when the shell has ended
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }) // the roles in the background
	err = cmd.Wait()
	text, readErr := os.ReadFile(output.Name())
	require.NoError(t, readErr)
	require.NoError(t, err, "%s", text)
	require.NoError(t, output.Close())
	return string(text)
}

// TestCallbackCommands runs the commands of docs/callbacks.md in their order in one shell, in a folder of
// its own. It changes addresses, runs the receiver in the repository, and waits for its output.
func TestCallbackCommands(t *testing.T) {
	t.Parallel()
	api, hook := childproc.FreeAddr(), childproc.FreeAddr()
	root, err := filepath.Abs(repository)
	require.NoError(t, err)
	text := "ln -s " + proctest.Path(t, "bulkaction") + " .\nexport PATH=$PWD:$PATH\n" + shellCommands(t, "docs/callbacks.md")
	received := func(what string) string { return "until grep '" + what + "' received; do sleep 0.1; done\n" }
	for _, change := range []struct{ old, new string }{
		{"bulkaction dev &\n", "bulkaction dev &\nuntil curl -s -o " + os.DevNull + " http://" + api + "/openapi.yaml; do sleep 0.1; done\n"},
		{"go run ./examples/webhook-receiver -secret-file secret &\n",
			"go build -C " + root + " -o $PWD/ ./examples/webhook-receiver\n" +
				"webhook-receiver -addr " + hook + " -secret-file secret > received &\nuntil curl -s -o " + os.DevNull + " http://" + hook + "; do sleep 0.1; done\n"},
		{"bulkaction callback show acme", received("group.completed: spring of acme in round 1, 1 jobs done, 0 failed") +
			"until test $(wc -l < received) = 2; do sleep 0.1; done\nbulkaction callback show acme"},
		{"127.0.0.1:9090", hook},
	} {
		require.Contains(t, text, change.old)
		text = strings.ReplaceAll(text, change.old, change.new)
	}
	dir := t.TempDir()
	said := runScript(t, text, dir, "BULKACTION_API="+api, "BULKACTION_API_ADDR="+api)
	for _, want := range []string{"master.key has a new master key", "Pending          0", "No callbacks found.", "Sent again   0 callbacks"} {
		require.Contains(t, said, want)
	}
	info, err := os.Stat(filepath.Join(dir, "master.key"))
	require.NoError(t, err)
	require.Zero(t, info.Mode().Perm()&0o077)
}

// TestWaitingRoomCommands runs the commands of docs/waiting-room.md in their order in one shell, in
// a folder of its own. It changes addresses, runs the roles and the shop in the background, and
// reads the event stream for 5 s, in which the capacity becomes 3.
func TestWaitingRoomCommands(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile(filepath.Join(repository, "docs", "waiting-room.md"))
	require.NoError(t, err)
	var script strings.Builder
	for _, line := range regexp.MustCompile(`(?m)^    (\S.*)$`).FindAllStringSubmatch(string(doc), -1) {
		if !strings.Contains(line[1], " --> ") && !strings.HasPrefix(line[1], "direction ") { // the picture
			script.WriteString(line[1] + "\n")
		}
	}
	root, err := filepath.Abs(repository)
	require.NoError(t, err)
	api, room, shop := childproc.FreeAddr(), childproc.FreeAddr(), childproc.FreeAddr()
	until := "until curl -s -o " + os.DevNull + " http://"
	text := "ln -s " + proctest.Path(t, "bulkaction") + " .\nexport PATH=$PWD:$PATH\n" + script.String()
	stream := "curl -sN -c visitor.txt -b visitor.txt http://127.0.0.1:8090/events/demo/tickets/waiting\n"
	for _, change := range []struct{ old, new string }{
		{stream, "(sleep 2; bulkaction room recalibrate demo --capacity 3) & timeout 5 " + strings.TrimSpace(stream) + " || true\n"},
		{"bulkaction dev --rooms\n", "bulkaction dev --rooms &\n" + until + room + "/events/demo; do sleep 0.1; done\n"},
		{"go run ./examples/protected-shop\n", "(cd " + root + " && exec go run ./examples/protected-shop) &\n" +
			until + shop + "; do sleep 0.1; done\ncurl -s -w '%{redirect_url}\\n' -H 'Accept: text/html' http://" + shop + "/buy\n"},
		{"http://127.0.0.1:8090", "http://" + room},
	} {
		require.Contains(t, text, change.old)
		text = strings.ReplaceAll(text, change.old, change.new)
	}
	dir := t.TempDir()
	said := runScript(t, text, dir, "TMPDIR="+t.TempDir(), "BULKACTION_API="+api,
		"BULKACTION_API_ADDR="+api, "BULKACTION_BROKER_ADDR="+room, "SHOP_ADDR="+shop, "SHOP_BROKER_URL=http://"+room, "SHOP_API_URL=http://"+api)
	for _, want := range []string{
		"http://" + room + "/events/demo/wait", // from the shop
		`{"state":"READY"`,                     // POST …/ticket
		`{"token":"`,                           // POST …/ticket/token
		`"slots":{"capacity":3`,                // GET /events/demo, up to a second old
		"1 of 3 in use",                        // room show
		"event: position",                      // with capacity 0
		"event: admitted",                      // with capacity 3
		"on-close      release",                // room set
	} {
		require.Contains(t, said, want)
	}
	info, err := os.Stat(filepath.Join(dir, "token-keys.pem"))
	require.NoError(t, err)
	require.Zero(t, info.Mode().Perm()&0o077, "brokers refuse a file that others may read")
}
