package bench

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Idle has the number of commands a second that idle role processes send to Redis.
type Idle struct {
	// commands a second of the process that sends the most
	IdleCommands float64            `json:"idle_commands_per_second"`
	IdleByRole   map[string]float64 `json:"idle_commands_per_second_by_role"`
	// commands a second, by role and by the command's name
	IdleByName  map[string]map[string]float64 `json:"idle_commands_by_name" text:"-"`
	IdleSeconds float64                       `json:"idle_seconds"` // duration of the measurement
}

const (
	idleSettle = 3 * time.Second
	idleFor    = 10 * time.Second
)

func runIdle(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	idle := &Idle{IdleByRole: map[string]float64{}, IdleByName: map[string]map[string]float64{}}
	x, err := o.experiment(ctx, "idle", func(x *run) error {
		// One small group runs first: a worker that has run jobs behaves differently while idle
		// than one that never has.
		if _, err := x.runOneByOne(ctx, "idle", x.smallGroup("warm", 0, "warm")); err != nil {
			return err
		}
		if err := redisx.Sleep(ctx, idleSettle); err != nil {
			return err
		}
		o.progress("idle", 1, 2)
		names := map[string]string{}
		if err := clientNames(ctx, x.conn, names); err != nil {
			return err
		}
		counts, took, err := countCommands(ctx, x.url, idleFor)
		if err != nil {
			return fmt.Errorf("count commands: %w", err)
		}
		// The names of clients are read a second time, for connections that were opened while the
		// commands were counted.
		if err := clientNames(ctx, x.conn, names); err != nil {
			return err
		}
		idle.IdleSeconds = measure.Round2(took.Seconds())
		for _, p := range x.procs { // one process of each role
			n, byName := 0, map[string]float64{}
			for c, count := range counts {
				if strings.Contains(names[c.addr], fmt.Sprintf("-%d-", p.PID())) {
					n += count
					byName[c.name] += float64(count)
				}
			}
			for name, count := range byName {
				byName[name] = measure.Round2(count / took.Seconds())
			}
			idle.IdleByName[p.role], idle.IdleByRole[p.role] = byName, measure.Round2(float64(n)/took.Seconds())
			idle.IdleCommands = max(idle.IdleCommands, idle.IdleByRole[p.role])
		}
		if idle.IdleCommands == 0 {
			return errors.New("count commands: no process sent any")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	out.Idle = idle
	return x.overrides, nil
}

// clientNames reads the list of Redis's clients, and adds to names the name of each, by its
// address.
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

// clientCommand is the name of a Redis command and the address of the client that sent it.
type clientCommand struct{ addr, name string }

// countCommands counts the commands that clients send to Redis in the time `lasts`, without those
// that scripts call. It also returns how long it really counted. The URL must name a single Redis.
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
		if _, err := fmt.Fprintf(conn, "AUTH %s %s\r\n", cmp.Or(opt.Username, "default"), opt.Password); err != nil {
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
