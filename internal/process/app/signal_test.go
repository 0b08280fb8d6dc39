package app

import (
	"bufio"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func child(t *testing.T, manners string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+manners, "BULKACTION_ADMIN_ADDR=127.0.0.1:0")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	said := bufio.NewScanner(stdout)
	require.True(t, said.Scan())
	require.Equal(t, "running", said.Text())
	return cmd, said
}

func TestSignalStopsTheProcess(t *testing.T) {
	for _, signal := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		cmd, said := child(t, "polite")
		require.NoError(t, cmd.Process.Signal(signal))
		require.True(t, said.Scan())
		require.Equal(t, "told", said.Text())
		require.NoError(t, cmd.Wait(), "exit code 0")
	}
}

func TestSecondSignalEndsTheProcessAtOnce(t *testing.T) {
	cmd, said := child(t, "stubborn")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.True(t, said.Scan())
	require.Equal(t, "told", said.Text())
	gone := make(chan error, 1)
	go func() { gone <- cmd.Wait() }()
	again := time.NewTicker(10 * time.Millisecond) // a signal that arrives together with the first one counts as the first
	defer again.Stop()
	for {
		select {
		case err := <-gone:
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal())
			return
		case <-again.C:
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}
}
