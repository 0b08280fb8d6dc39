package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// percentile returns the p-th percentile by the nearest-rank method: the smallest value that at
// least p percent of the values do not exceed. Without values it is 0.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median returns the middle value, or the mean of the two middle values. There must be a value.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// ratio returns a/b, rounded to four decimals; 0 if b is 0.
func ratio[T, U int | int64 | float64](a T, b U) float64 {
	if b == 0 {
		return 0
	}
	return round4(float64(a) / float64(b))
}

func round2(x float64) float64 { return math.Round(x*1e2) / 1e2 }

func round4(x float64) float64 { return math.Round(x*1e4) / 1e4 }

func perJob(d time.Duration, jobs int) float64 {
	return round2(float64(d.Nanoseconds()) / 1e3 / float64(jobs))
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Quantiles has quantiles of waiting times.
type Quantiles struct {
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

func quantilesOf(ms []float64) Quantiles {
	p := func(p float64) float64 { return round2(percentile(ms, p)) }
	return Quantiles{p(50), p(99), p(100)}
}

func sharesOf(counts []int64) (shares []float64, sum int64) {
	for _, n := range counts {
		sum += n
	}
	for _, n := range counts {
		shares = append(shares, ratio(n, sum))
	}
	return shares, sum
}

// worstDeviation compares each count with the part of the sum that its weight gives it. It returns
// the largest relative deviation: |count - part| / part.
func worstDeviation(counts []int64, weights []float64) float64 {
	var sum, weight float64
	for i := range counts {
		sum, weight = sum+float64(counts[i]), weight+weights[i]
	}
	worst := 0.0
	for i := range counts {
		due := sum * weights[i] / weight
		worst = max(worst, math.Abs(float64(counts[i])-due)/max(due, 1))
	}
	return round4(worst)
}

// cpuOf returns the CPU time that a process has used so far. /proc, which only Linux has, counts it
// in ticks of 10 ms.
func cpuOf(pid int) time.Duration {
	b := must(os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)))
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	user, sys := must(strconv.ParseInt(fields[11], 10, 64)), must(strconv.ParseInt(fields[12], 10, 64))
	return time.Duration(user+sys) * 10 * time.Millisecond
}

// memoryOf returns a value in kB from /proc/PID/status: VmHWM: is the peak of the resident memory,
// VmRSS: the resident memory at present.
func memoryOf(pid int, name string) float64 {
	_, rest, found := strings.Cut(string(must(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))), name)
	if !found {
		failf("read memory of process %d: no %s", pid, name)
	}
	return must(strconv.ParseFloat(strings.Fields(rest)[0], 64))
}

// redisUse is what one redis-server has used since it started, or between two measurements.
type redisUse struct {
	cpu      time.Duration
	commands int64 // commands that scripts call are included
	memory   int64 // bytes in use; between two measurements: bytes added
	byName   map[string]commandUse
}

// commandUse is how often a Redis command was called, and how many µs all its calls took together.
type commandUse struct{ calls, us int64 }

// readInfo parses the answer of Redis's INFO. A command's line there looks like this:
// cmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,…
func readInfo(info string) redisUse {
	m := redisUse{byName: map[string]commandUse{}}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case name == "used_cpu_user", name == "used_cpu_sys":
			s, _ := strconv.ParseFloat(value, 64)
			m.cpu += seconds(s)
		case name == "total_commands_processed":
			m.commands, _ = strconv.ParseInt(value, 10, 64)
		case name == "used_memory":
			m.memory, _ = strconv.ParseInt(value, 10, 64)
		case strings.HasPrefix(name, "cmdstat_"):
			var k commandUse
			_, _ = fmt.Sscanf(value, "calls=%d,usec=%d", &k.calls, &k.us)
			m.byName[strings.TrimPrefix(name, "cmdstat_")] = k
		}
	}
	return m
}

// add returns m plus n if sign is 1, m minus n if it is -1. A difference leaves out commands that
// were called equally often in both.
func (m redisUse) add(n redisUse, sign int64) redisUse {
	m.cpu += time.Duration(sign) * n.cpu
	m.commands, m.memory = m.commands+sign*n.commands, m.memory+sign*n.memory
	byName := map[string]commandUse{}
	for _, names := range []map[string]commandUse{m.byName, n.byName} {
		for name := range names {
			a, b := m.byName[name], n.byName[name]
			if calls := a.calls + sign*b.calls; calls > 0 {
				byName[name] = commandUse{calls, a.us + sign*b.us}
			}
		}
	}
	m.byName = byName
	return m
}

// table returns a table of Redis commands with their calls and time (µs), also per call and per
// job. The command with the most time comes first. A command that a script calls is counted twice:
// by itself, and in the time of the script.
func (m redisUse) table(jobs int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-24s %12s %12s %10s %10s\n", "command", "calls", "µs", "µs/call", "µs/job")
	names := slices.SortedFunc(maps.Keys(m.byName), func(a, c string) int {
		return cmp.Or(-cmp.Compare(m.byName[a].us, m.byName[c].us), cmp.Compare(a, c))
	})
	for _, name := range names {
		k := m.byName[name]
		fmt.Fprintf(&b, "%-24s %12d %12d %10.2f %10.3f\n",
			name, k.calls, k.us, float64(k.us)/float64(k.calls), float64(k.us)/float64(jobs))
	}
	fmt.Fprintf(&b, "CPU of Redis in all: %.2f µs/job\n", perJob(m.cpu, jobs))
	return b.String()
}

// clientCommand is the name of a Redis command and the address of the client that sent it.
type clientCommand struct{ addr, name string }

// countCommands counts the commands that clients send to Redis in the time d, without those that
// scripts call: INFO would count them. The URL must name a single Redis.
func countCommands(ctx context.Context, url string, d time.Duration) map[clientCommand]int {
	opt := must(redis.ParseURL(url))
	conn := must(redis.NewDialer(opt)(ctx, "tcp", opt.Addr))
	defer conn.Close()
	if opt.Password != "" {
		must(fmt.Fprintf(conn, "AUTH %s %s\r\n", cmp.Or(opt.Username, "default"), opt.Password))
	}
	must(io.WriteString(conn, "MONITOR\r\n"))
	check(conn.SetReadDeadline(time.Now().Add(d)))
	counts := map[clientCommand]int{}
	for lines := bufio.NewReaderSize(conn, 1<<20); ; {
		line, err := lines.ReadString('\n')
		var timeout net.Error
		switch {
		case errors.As(err, &timeout) && timeout.Timeout():
			check(ctx.Err())
			return counts
		case err != nil || strings.HasPrefix(line, "-"):
			failf("watch the commands of Redis: %w: %s", err, line)
		}
		if c := parseMonitorLine(line); c.addr != "" {
			counts[c]++
		}
	}
}

// parseMonitorLine reads a line that Redis's MONITOR prints for a command, such as
//
//	+1700000000.123456 [0 127.0.0.1:54321] "ping"
//
// The address is empty if a script called the command, and for other lines.
func parseMonitorLine(line string) clientCommand {
	_, rest, _ := strings.Cut(line, " [")
	source, text, closed := strings.Cut(rest, "] ")
	_, addr, spaced := strings.Cut(source, " ")
	if !closed || !spaced || addr == "lua" {
		return clientCommand{}
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(text, `"`), `"`)
	return clientCommand{addr, strings.ToLower(name)}
}
