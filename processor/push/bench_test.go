package push

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

// serviceVariable is the environment variable that makes the test binary run as a push service for
// a benchmark (see runService).
const serviceVariable = "PUSH_BENCHMARK_SERVICE"

// runService is a push service for benchmarks: it prints its URL, and accepts all pushes until its
// standard input ends.
func runService() {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasPrefix(r.URL.Path, "/v1/") {
			_, _ = io.WriteString(w, `{"name":"projects/shop/messages/1"}`)
		}
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	fmt.Println(s.URL)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startService runs runService in a process of its own, so that its CPU time is not counted as that
// of the benchmark. stop ends the process and returns its CPU time.
func startService(b *testing.B) (url string, stop func() time.Duration) {
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), serviceVariable+"=1")
	input, err := command.StdinPipe()
	require.NoError(b, err)
	output, err := command.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, command.Start())
	url, err = bufio.NewReader(output).ReadString('\n')
	require.NoError(b, err)
	return strings.TrimSpace(url), func() time.Duration {
		require.NoError(b, input.Close())
		require.NoError(b, command.Wait())
		return command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	}
}

// usedCPU returns the CPU time that this process has used.
func usedCPU(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkProcess sends pushes to a service in another process, from 100 times GOMAXPROCS
// goroutines. Besides their rate it shows the CPU time of a push in the process that sends it and
// in the service.
func BenchmarkProcess(b *testing.B) {
	for _, platform := range []string{FCM, APNs, WebPush} {
		b.Run("platform="+platform, func(b *testing.B) {
			url, stop := startService(b)
			google := serve(b, newToken)
			f := newFolder(b)
			f.fcmKey(b, "fcm.json", "shop", google.URL)
			p := start(b, config(b, f, fcmYAML(url)+apnsYAML(url)+webPushYAML))
			payload := map[string]string{FCM: toFCM, APNs: toApple, WebPush: toWeb(url)}[platform]
			_, err := processor.Run(b.Context(), p, job(0, payload)) // connects
			require.NoError(b, err)

			var ordinal atomic.Int64
			before := usedCPU(b)
			b.ReportAllocs()
			b.SetParallelism(100)
			b.ResetTimer()
			b.RunParallel(func(all *testing.PB) {
				for all.Next() {
					if _, err := processor.Run(b.Context(), p, job(ordinal.Add(1), payload)); err != nil {
						b.Error(err)
					}
				}
			})
			b.StopTimer()
			perPush := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 / float64(b.N) }
			b.ReportMetric(perPush(usedCPU(b)-before), "client-µs/push")
			b.ReportMetric(perPush(stop()), "service-µs/push")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pushes/s")
		})
	}
}

func BenchmarkParsePayload(b *testing.B) {
	for platform, payload := range map[string]string{FCM: toFCM, APNs: toApple, WebPush: toWeb("https://push.example.org/x")} {
		b.Run("platform="+platform, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := parsePayload([]byte(payload)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
