package integration

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const repository = "../.."

// readmeBlocks returns the fenced blocks of README.md in a language.
func readmeBlocks(t *testing.T, language string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "README.md"))
	require.NoError(t, err)
	var blocks []string
	for _, match := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, match[1])
	}
	require.NotEmpty(t, blocks)
	return blocks
}

// TestReadmeSnippets requires that each Go snippet of the README is part of an example.
func TestReadmeSnippets(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(repository, "examples", "*", "*.go"))
	require.NoError(t, err)
	var examples strings.Builder
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		examples.Write(text)
	}
	for _, snippet := range readmeBlocks(t, "go") {
		require.Contains(t, examples.String(), snippet, "the README must show what the example does")
	}
}

// TestReadmeCommands runs the commands of the README in their order in one shell. It changes only
// addresses, the folder of the binaries, and the size of the demo.
func TestReadmeCommands(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())
	redisURL, bin := redistest.Server(t).URL(), t.TempDir()

	script := strings.Join(readmeBlocks(t, "sh"), "")
	for _, change := range []struct{ old, new string }{
		{"-o bin/ ./cmd/...", "-o " + bin + "/ ./cmd/bulkaction"},
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

	output, err := os.Create(filepath.Join(t.TempDir(), "output"))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euxo", "pipefail", "-c", script)
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "BULKACTION_API="+address, "BULKACTION_API_ADDR="+address)
	cmd.Stdout, cmd.Stderr = output, output // a file: the roles hold it open when the shell has ended
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }) // the roles in the background
	err = cmd.Wait()
	text, readErr := os.ReadFile(output.Name())
	require.NoError(t, readErr)
	require.NoError(t, err, "%s", text)
	require.NoError(t, output.Close())

	said := string(text)
	for _, want := range []string{
		"300 of 300 e-mails done", "audit clean", // demo
		"20 of 20 ended (100%)",                 // submit --file
		`"self":"/v1/groups/costs"`,             // curl
		"cost        5",                         // watch costs
		`{"ordinal":1,`,                         // results costs
		"Waits for         scheduled",           // why promo-7 0
		"Waits for   paused",                    // why promo-7
		"WINDOW OF 1000 MS   USED   OF\ntenant", // tenant set and show
		"words       6",                         // the example's processor
		"ok: 6 groups, 27 jobs",                 // audit
	} {
		require.Contains(t, said, want)
	}
}
