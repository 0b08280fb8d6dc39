package bench

import (
	"bufio"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

const (
	brokerRole = "broker"
	// userHeader is the HTTP header with the user's id. The brokers trust it because it comes from
	// loopback.
	userHeader = "X-Bench-User"
)

// roomFleet is a Redis, the brokers on it, ingest for the calls of a shop, and child processes that
// act as users.
type roomFleet struct {
	*fleet
	options   RoomOptions
	overrides map[string]string
	dir       string // of the token key
	publicURL string // of the brokers
	brokers   []string
	api       string // base URL of ingest; "": not started yet
	loaders   []*loader
}

// startRoom starts Redis, the brokers, and the child processes that act as users.
func startRoom(ctx context.Context, o RoomOptions) (_ *roomFleet, err error) {
	f := &roomFleet{options: o}
	if f.dir, err = os.MkdirTemp("", "bulkaction-room-"); err != nil {
		return nil, fmt.Errorf("make a folder for the token key: %w", err)
	}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	keys, err := writeTokenKey(f.dir)
	if err != nil {
		return nil, err
	}
	first := childproc.FreeAddr()
	f.publicURL = "http://" + first
	f.overrides = o.overrides(
		"BULKACTION_BROKER_IDENTITY=header", "BULKACTION_BROKER_IDENTITY_HEADER="+userHeader,
		"BULKACTION_BROKER_TRUSTED_PROXIES=127.0.0.1/32", "BULKACTION_BROKER_MAX_CONNECTIONS_PER_IP=1000000",
		"BULKACTION_BROKER_ENTER_RATE_PER_IP=1000000", "BULKACTION_BROKER_TOKEN_KEYS_FILE="+keys,
		"BULKACTION_BROKER_PUBLIC_URL="+f.publicURL, "BULKACTION_BROKER_DRAIN=0s")
	if f.fleet, err = startRedis(ctx, o.Options, 20); err != nil {
		return nil, err
	}
	for i := range o.Brokers {
		addr := first
		if i > 0 {
			addr = childproc.FreeAddr()
		}
		if err := f.startBroker(ctx, i, addr); err != nil {
			return nil, err
		}
	}
	return f, f.startUsers(ctx)
}

// writeTokenKey makes a key that signs entry tokens, writes it to a file in a folder, and returns
// the file's name.
func writeTokenKey(dir string) (string, error) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "token-keys.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := os.WriteFile(name, block, 0o600); err != nil {
		return "", fmt.Errorf("write a token key: %w", err)
	}
	return name, nil
}

// usersOfProcess is the largest number of users with a stream each that one process of the load
// generator simulates.
const usersOfProcess = 5000

// startUsers starts the child processes that act as users. They are killed when ctx ends.
func (f *roomFleet) startUsers(ctx context.Context) error {
	for range max(1, (f.options.Users+usersOfProcess-1)/usersOfProcess) {
		l, err := startLoader(f.options.Role[0], roomload.Command)
		if err != nil {
			return err
		}
		f.loaders = append(f.loaders, l)
		context.AfterFunc(ctx, l.Kill) // so that no read of an answer blocks any more
	}
	return nil
}

// startBroker starts the i-th broker and waits until it answers.
func (f *roomFleet) startBroker(ctx context.Context, i int, addr string) error {
	env := maps.Clone(f.overrides)
	env["BULKACTION_BROKER_ADDR"] = addr
	if err := f.startRole(f.options.Options, brokerRole, i, env, ""); err != nil {
		return err
	}
	f.brokers = append(f.brokers, addr)
	return f.awaitHTTP(ctx, "a broker", keysURL(addr))
}

func keysURL(broker string) string { return "http://" + broker + "/.well-known/jwks.json" }

// startAPI starts ingest unless it runs already. Ingest serves the calls by which a shop gives
// slots back.
func (f *roomFleet) startAPI(ctx context.Context) (err error) {
	if f.api != "" {
		return nil
	}
	addr := childproc.FreeAddr()
	env := maps.Clone(f.overrides)
	env["BULKACTION_API_ADDR"] = addr
	if err := f.startRole(f.options.Options, "ingest", 0, env, ""); err != nil {
		return err
	}
	f.api = "http://" + addr
	return f.awaitAPI(ctx, addr)
}

// killBroker kills the first broker that runs and removes it from the fleet. It returns the time
// just before the kill.
func (f *roomFleet) killBroker() (at time.Time) {
	i := slices.IndexFunc(f.procs, func(p process) bool { return p.role == brokerRole })
	victim := f.procs[i]
	f.procs = slices.Delete(f.procs, i, i+1)
	f.brokers = f.brokers[1:]
	at = time.Now()
	victim.Kill()
	return at
}

func (f *roomFleet) close() {
	for _, l := range f.loaders {
		l.Kill()
		_ = l.out.Close()
	}
	if f.fleet != nil {
		_ = f.fleet.close() // the figures are computed, or an error was returned
	}
	_ = os.RemoveAll(f.dir)
}

// clientCommands returns the number of commands that clients send to Redis during the time d,
// without those in scripts. It reads MONITOR, because INFO counts commands in scripts too.
func (f *roomFleet) clientCommands(ctx context.Context, d time.Duration) (n int, err error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", f.servers[0].Addr())
	if err != nil {
		return 0, fmt.Errorf("watch the commands of Redis: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		return 0, fmt.Errorf("watch the commands of Redis: %w", err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(d)); err != nil {
		return 0, err
	}
	// A line of MONITOR is +OK, or +1339518083.107412 [0 127.0.0.1:60866] "get" "x". For a command
	// in a script it has [0 lua].
	for lines := bufio.NewScanner(conn); ; {
		if !lines.Scan() {
			if err := lines.Err(); !errors.Is(err, os.ErrDeadlineExceeded) {
				return n, fmt.Errorf("watch the commands of Redis: %w", cmp.Or(err, io.EOF))
			}
			return n, nil
		}
		if by, rest, ok := strings.Cut(lines.Text(), "] "); ok && rest != "" && !strings.HasSuffix(by, " lua") {
			n++
		}
	}
}

// residentKiB returns the resident memory of each broker.
func (f *roomFleet) residentKiB() (all []float64, err error) {
	for _, p := range f.procs {
		if p.role != brokerRole {
			continue
		}
		kb, err := measure.ResidentKB(p.PID())
		if err != nil {
			return nil, err
		}
		all = append(all, kb)
	}
	return all, nil
}
