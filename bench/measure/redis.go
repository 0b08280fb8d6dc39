package measure

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Redis is what one redis-server has used since it started, or between two measurements.
type Redis struct {
	Addr     string
	CPU      time.Duration
	Commands int64 // commands that scripts call are included
	Memory   int64 // bytes in use; between two measurements: bytes added
	ByName   map[string]Command
}

// Command is how often a Redis command was called, and how many µs all its calls took together.
type Command struct{ Calls, US int64 }

// ReadInfo parses the answer of Redis's INFO. A command's line there looks like this:
// cmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,…
func ReadInfo(info string) Redis {
	m := Redis{ByName: map[string]Command{}}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case name == "used_cpu_user", name == "used_cpu_sys":
			s, _ := strconv.ParseFloat(value, 64)
			m.CPU += time.Duration(s * float64(time.Second))
		case name == "total_commands_processed":
			m.Commands, _ = strconv.ParseInt(value, 10, 64)
		case name == "used_memory":
			m.Memory, _ = strconv.ParseInt(value, 10, 64)
		case strings.HasPrefix(name, "cmdstat_"):
			var k Command
			_, _ = fmt.Sscanf(value, "calls=%d,usec=%d", &k.Calls, &k.US)
			m.ByName[strings.TrimPrefix(name, "cmdstat_")] = k
		}
	}
	return m
}

// Add returns m plus n if sign is 1, m minus n if it is -1. A difference leaves out commands that
// were called equally often in both.
func (m Redis) Add(n Redis, sign int64) Redis {
	m.CPU += time.Duration(sign) * n.CPU
	m.Commands, m.Memory = m.Commands+sign*n.Commands, m.Memory+sign*n.Memory
	byName := map[string]Command{}
	for _, names := range []map[string]Command{m.ByName, n.ByName} {
		for name := range names {
			a, b := m.ByName[name], n.ByName[name]
			if calls := a.Calls + sign*b.Calls; calls > 0 {
				byName[name] = Command{calls, a.US + sign*b.US}
			}
		}
	}
	m.ByName = byName
	return m
}

// Table returns a table of Redis commands with their calls and time (µs), also per call and per
// job. The command with the most time comes first. A command that a script calls is counted twice:
// by itself, and in the time of the script.
func (m Redis) Table(jobs int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-24s %12s %12s %10s %10s\n", "command", "calls", "µs", "µs/call", "µs/job")
	names := slices.SortedFunc(maps.Keys(m.ByName), func(a, c string) int {
		return cmp.Or(-cmp.Compare(m.ByName[a].US, m.ByName[c].US), cmp.Compare(a, c))
	})
	for _, name := range names {
		k := m.ByName[name]
		fmt.Fprintf(&b, "%-24s %12d %12d %10.2f %10.3f\n",
			name, k.Calls, k.US, float64(k.US)/float64(k.Calls), float64(k.US)/float64(jobs))
	}
	fmt.Fprintf(&b, "CPU of Redis in all: %.2f µs/job\n", PerJob(m.CPU, jobs))
	return b.String()
}
