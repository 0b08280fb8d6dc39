// Package redisproc runs a private redis-server: a real process on loopback with a folder of its
// own. It can be killed and started again on the same data, and on Linux ends at the latest when
// this process ends. The package hides the choice of a free port and the wait until the server
// answers.
package redisproc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// EnvBinary is the environment variable with the path of the redis-server to run instead of the one
// in PATH.
const EnvBinary = "BULKACTION_REDIS_SERVER"

const (
	startTimeout = 30 * time.Second // for each port attempt, even if ctx has a later deadline
	portAttempts = 20               // an attempt fails if another process has taken the port first
)

// ErrNoBinary means that no redis-server was found.
var ErrNoBinary = errors.New("no redis-server found: run `make deps`, or set " + EnvBinary + " to its path")

var errPortTaken = errors.New("port is taken")

// Options of a redis-server. The zero value means: persist nothing, and use a temporary folder.
type Options struct {
	Binary    string   // path of the redis-server; empty: that of EnvBinary, or of PATH
	Dir       string   // folder of the server's data and log; empty: a temporary folder that Close removes
	AOF       bool     // append-only file, fsync every second, so that data survives Kill
	MaxMemory int64    // in bytes, 0 for no limit; writes beyond it are refused
	Cluster   bool     // a node of a cluster; the caller joins the nodes
	Config    string   // content of a configuration file, which Sentinel needs
	TLS       *TLS     // also serve TLS, on a port of its own, and use it between servers; nil: no TLS
	Args      []string // more arguments; they override the options
}

// TLS names the PEM files of a server that serves TLS. The server demands a certificate of its
// clients, unless an argument of the server says otherwise.
type TLS struct{ CertFile, KeyFile, CAFile string }

// Server is a redis-server process. Its methods are safe for concurrent use; Kill, Restart and
// Close run one after the other.
type Server struct {
	opts    Options
	binary  string
	ownsDir bool
	port    int
	busPort int // port for the communication between cluster nodes
	tlsPort int
	log     *os.File

	lifecycle sync.Mutex // held by Kill, Restart and Close
	closed    bool

	mu    sync.Mutex
	child *childproc.Child
}

// Start starts a server on a free port of 127.0.0.1 and waits until it answers. If another process
// takes the port first, Start tries another port. It waits until ctx ends, and at most 30 seconds
// for each port. ctx bounds only the start: the server runs until Close. After an error no server
// runs; the error wraps ErrNoBinary if there is no redis-server.
func Start(ctx context.Context, opts Options) (_ *Server, err error) {
	s := &Server{opts: opts}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start redis-server: %w", errors.Join(err, s.Close()))
		}
	}()
	if s.binary, err = findBinary(opts.Binary); err != nil {
		return nil, err
	}
	if opts.Dir == "" {
		s.ownsDir = true
		if s.opts.Dir, err = os.MkdirTemp("", "bulkaction-redis-"); err != nil {
			return nil, err
		}
	}
	if s.log, err = os.OpenFile(filepath.Join(s.opts.Dir, "redis.log"),
		os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600); err != nil {
		return nil, err
	}
	if opts.Config != "" {
		if err = os.WriteFile(s.configFile(), []byte(opts.Config), 0o600); err != nil {
			return nil, err
		}
	}

	for range portAttempts {
		s.port, s.busPort, s.tlsPort = childproc.FreePort(), childproc.FreePort(), childproc.FreePort()
		if err = s.launch(ctx); !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func findBinary(name string) (string, error) {
	name = cmp.Or(name, os.Getenv(EnvBinary), "redis-server")
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w (%w)", ErrNoBinary, err)
	}
	return path, nil
}

// launch starts the process on s.port and waits for up to startTimeout until it answers. If it does
// not, launch kills it; the error wraps errPortTaken if another process has the port.
func (s *Server) launch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()

	logged := s.logSize()
	cmd := exec.Command(s.binary, s.args()...) // not CommandContext: the server must outlive the ctx of Start
	cmd.Dir = s.opts.Dir
	cmd.Stdout, cmd.Stderr = s.log, s.log
	child, err := childproc.Start(cmd)
	if err != nil {
		return err
	}
	s.setChild(child)

	if err := awaitReady(ctx, s.Addr(), child); err != nil {
		child.Kill()
		said := strings.TrimSpace(s.logFrom(logged))
		if strings.Contains(said, "Address already in use") {
			err = errPortTaken
		}
		return fmt.Errorf("%w; its log:\n%s", err, said)
	}
	return nil
}

func (s *Server) args() []string {
	var args []string
	if s.opts.Config != "" {
		args = append(args, s.configFile())
	}
	args = append(args, "--bind", "127.0.0.1", "--port", strconv.Itoa(s.port), "--dir", s.opts.Dir, "--save", "")
	if s.opts.AOF {
		args = append(args, "--appendonly", "yes", "--appendfsync", "everysec")
	}
	if s.opts.MaxMemory > 0 {
		args = append(args, "--maxmemory", strconv.FormatInt(s.opts.MaxMemory, 10), "--maxmemory-policy", "noeviction")
	}
	if s.opts.Cluster {
		args = append(args, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(s.busPort))
	}
	if tls := s.opts.TLS; tls != nil {
		args = append(args, "--tls-port", strconv.Itoa(s.tlsPort), "--tls-cert-file", tls.CertFile,
			"--tls-key-file", tls.KeyFile, "--tls-ca-cert-file", tls.CAFile,
			"--tls-replication", "yes", "--tls-cluster", "yes")
	}
	return append(args, s.opts.Args...)
}

// TLSAddr returns the host:port at which a server with Options.TLS serves TLS.
func (s *Server) TLSAddr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.tlsPort)) }

// Addr returns the server's host:port, which stays the same after each Restart.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// URL returns the server's address in the form of BULKACTION_REDIS_URL.
func (s *Server) URL() string { return "redis://" + s.Addr() + "/0" }

// Dir returns the folder of the server's data and log.
func (s *Server) Dir() string { return s.opts.Dir }

// PID returns the id of the process that was started last.
func (s *Server) PID() int { return s.current().PID() }

// Running says whether the process runs.
func (s *Server) Running() bool { return s.current().Running() }

// Signal sends sig to the server's process, and to no other.
func (s *Server) Signal(sig os.Signal) error { return s.current().Signal(sig) }

// Suspend stops the server's process with SIGSTOP and waits until it has stopped.
func (s *Server) Suspend() error { return s.current().Suspend() }

// Kill ends the process like a crash, and waits for its end.
func (s *Server) Kill() {
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	s.current().Kill()
}

// Restart starts the server again at the same address with its persisted data, and waits until it
// answers, for 30 seconds at most. A running server is killed first. After an error no server runs.
// After Close, the error wraps os.ErrClosed.
func (s *Server) Restart(ctx context.Context) error {
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	if s.closed {
		return fmt.Errorf("restart redis-server at %s: %w", s.Addr(), os.ErrClosed)
	}
	s.current().Kill()
	if err := s.launch(ctx); err != nil {
		return fmt.Errorf("restart redis-server at %s: %w", s.Addr(), err)
	}
	return nil
}

// Close kills the process, waits for its end, and removes the folder, unless it was given in
// Options. Closing again does nothing and returns nil.
func (s *Server) Close() error {
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if child := s.current(); child != nil {
		child.Kill()
	}
	var errs []error
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	if s.ownsDir {
		errs = append(errs, os.RemoveAll(s.opts.Dir))
	}
	return errors.Join(errs...)
}

func (s *Server) current() *childproc.Child {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.child
}

func (s *Server) setChild(c *childproc.Child) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.child = c
}

func (s *Server) configFile() string { return filepath.Join(s.opts.Dir, "redis.conf") }
