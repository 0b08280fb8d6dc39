package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
