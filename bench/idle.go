package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Idle has the rate at which idle processes send commands to Redis.
type Idle struct {
	// commands a second of the process that sends the most
	IdleCommands float64            `json:"idle_commands_per_second"`
	IdleByRole   map[string]float64 `json:"idle_commands_per_second_by_role"`
	// commands a second, by role and by the command's name
	IdleByName  map[string]map[string]float64 `json:"idle_commands_by_name"`
	IdleSeconds float64                       `json:"idle_seconds"` // duration of the measurement
}

const (
	idleSettle = 3 * time.Second
	idleFor    = 10 * time.Second
)

func runIdle(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	x, err := startExperiment(ctx, o.Options, setup{})
	if err != nil {
		return nil, err
	}
	defer x.close()
	// A worker that has run jobs behaves differently while idle than one that never has, so some
	// jobs run first.
	if _, err := x.runOneByOne(ctx, "idle", []group{x.smallGroup("warm", 0, "warm")}); err != nil {
		return nil, err
	}
	if err := redisx.Sleep(ctx, idleSettle); err != nil {
		return nil, err
	}
	x.progress("idle", 1, 2)
	names := map[string]string{}
	if err := clientNames(ctx, x.fleet.Conn, names); err != nil {
		return nil, err
	}
	counts, took, err := countCommands(ctx, x.fleet.URL, idleFor)
	if err != nil {
		return nil, fmt.Errorf("count commands: %w", err)
	}
	// connections that were opened while the commands were counted
	if err := clientNames(ctx, x.fleet.Conn, names); err != nil {
		return nil, err
	}
	out.Idle = &Idle{
		IdleByRole:  map[string]float64{},
		IdleByName:  map[string]map[string]float64{},
		IdleSeconds: round2(took.Seconds()),
	}
	for _, p := range x.fleet.procs { // one process of each role
		n, byName := 0, map[string]int{}
		for c, count := range counts {
			if strings.Contains(names[c.addr], fmt.Sprintf("-%d-", p.PID())) {
				n += count
				byName[c.name] += count
			}
		}
		out.IdleByName[p.role] = map[string]float64{}
		for name, count := range byName {
			out.IdleByName[p.role][name] = round2(float64(count) / took.Seconds())
		}
		out.IdleByRole[p.role] = round2(float64(n) / took.Seconds())
		out.IdleCommands = max(out.IdleCommands, out.IdleByRole[p.role])
	}
	if out.IdleCommands == 0 {
		return nil, errors.New("count commands: no process sent any")
	}
	if _, _, err := x.finish(ctx, "idle"); err != nil {
		return nil, err
	}
	return x.overrides, nil
}

// clientNames adds the name of each connected client to names, by its address.
func clientNames(ctx context.Context, conn *redisx.Conn, names map[string]string) error {
	var mu sync.Mutex
	return conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		list, err := shard.ClientList(ctx).Result()
		if err != nil {
			return fmt.Errorf("list clients: %w", err)
		}
		mu.Lock()
		defer mu.Unlock()
		for line := range strings.Lines(list) {
			var addr, name string
			for field := range strings.FieldsSeq(line) {
				if v, ok := strings.CutPrefix(field, "addr="); ok {
					addr = v
				}
				if v, ok := strings.CutPrefix(field, "name="); ok {
					name = v
				}
			}
			names[addr] = name
		}
		return nil
	})
}

// clientCommand is a command by its name, and the address of the client that sent it.
type clientCommand struct{ addr, name string }

// countCommands counts for this time the commands that clients send. It does not count commands
// that scripts call. It returns how long it counted. The URL must name a single Redis.
func countCommands(ctx context.Context, url string, lasts time.Duration) (map[clientCommand]int, time.Duration, error) {
	opt, err := redis.ParseURL(url)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: this part needs a single Redis", err)
	}
	conn, err := redis.NewDialer(opt)(ctx, "tcp", opt.Addr)
	if err != nil {
		return nil, 0, err
	}
	defer conn.Close()
	if opt.Password != "" {
		if _, err := fmt.Fprintf(conn, "AUTH %s %s\r\n", defaultUser(opt.Username), opt.Password); err != nil {
			return nil, 0, err
		}
	}
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		return nil, 0, err
	}
	began := time.Now()
	if err := conn.SetReadDeadline(began.Add(lasts)); err != nil {
		return nil, 0, err
	}
	counts := map[clientCommand]int{}
	lines := bufio.NewReaderSize(conn, 1<<20)
	for {
		line, err := lines.ReadString('\n')
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return counts, time.Since(began), ctx.Err()
		}
		if err != nil {
			return nil, 0, err
		}
		if strings.HasPrefix(line, "-") {
			return nil, 0, errors.New(strings.TrimSpace(line))
		}
		if c := parseMonitorLine(line); c.addr != "" {
			counts[c]++
		}
	}
}

func defaultUser(name string) string {
	if name == "" {
		return "default"
	}
	return name
}

// parseMonitorLine reads a line that Redis's MONITOR prints for a command, such as
//
//	+1700000000.123456 [0 127.0.0.1:54321] "ping"
//
// The address is empty if a script called the command, and for other lines.
func parseMonitorLine(line string) clientCommand {
	_, rest, ok := strings.Cut(line, " [")
	source, text, closed := strings.Cut(rest, "] ")
	_, addr, spaced := strings.Cut(source, " ")
	if !ok || !closed || !spaced || addr == "lua" {
		return clientCommand{}
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(text, `"`), `"`)
	return clientCommand{addr, strings.ToLower(name)}
}
