// Package call runs Lua scripts and tells callers what an error of Redis means. It imports only
// go-redis and the tracing API, so that a small package can use it without the rest of the project.
package call

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// Script is a Lua script. Redis caches scripts and runs them by their hash.
type Script struct {
	name string
	src  string
	sha  string
}

// NewScript returns the script with the source src. Errors and spans show its name. Call it only to
// initialize package variables: it also registers the script for [Named], for ever.
func NewScript(name, src string) *Script {
	sum := sha1.Sum([]byte(src))
	s := &Script{name: name, src: src, sha: hex.EncodeToString(sum[:])}
	known.Lock()
	defer known.Unlock()
	known.byName[name] = append(known.byName[name], s)
	return s
}

// known registers all scripts of the program by name. Package acl reads from their sources which
// commands they call.
var known = struct {
	sync.Mutex
	byName map[string][]*Script
}{byName: map[string][]*Script{}}

// Named returns the scripts of the program with this name. Scripts of different packages may share
// a name.
func Named(name string) []*Script {
	known.Lock()
	defer known.Unlock()
	return slices.Clone(known.byName[name])
}

// Name returns the name that NewScript got: for a script of package lua, its file name without
// folder and ending.
func (s *Script) Name() string { return s.name }

// Source returns the text of the script, as it is sent.
func (s *Script) Source() string { return s.src }

// SHA returns the hash by which Redis knows the script.
func (s *Script) SHA() string { return s.sha }

// Run executes the script with keys, which choose the hash slot, and args. Redis loses its script
// cache on restart and failover: Run sends the full text of a script that Redis does not know. It
// retries nothing else, because only the caller knows what a lost reply means. A nil reply is no
// error: Run returns nil for it. If ctx has a recording span, Run adds a child span.
func (s *Script) Run(ctx context.Context, c redis.Cmdable, keys []string, args []any) (any, error) {
	parent := trace.SpanFromContext(ctx)
	if parent.IsRecording() {
		var span trace.Span
		ctx, span = parent.TracerProvider().Tracer("redisx").Start(ctx, "redis "+s.name,
			trace.WithSpanKind(trace.SpanKindClient))
		defer span.End()
		reply, err := s.run(ctx, c, keys, args)
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		return reply, err
	}
	return s.run(ctx, c, keys, args)
}

func (s *Script) run(ctx context.Context, c redis.Cmdable, keys []string, args []any) (any, error) {
	reply, err := c.EvalSha(ctx, s.sha, keys, args...).Result()
	if err != nil && IsNoScript(err) {
		reply, err = c.Eval(ctx, s.src, keys, args...).Result()
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("script %s: %w", s.name, err)
	}
	return reply, nil
}

// Reply reads the list that a script replied, one value after the other. Each method expects the
// next value to be there and to have its type. The first value that is not fails the reply, and all
// methods return zero from then on. So a caller asks for the error only once, when it has read
// everything: see Done.
type Reply struct {
	values []any
	*reading
}

// reading is shared by a reply and the lists inside it.
type reading struct {
	script string
	unread int // values, of the reply and of those lists that were read
	err    error
}

// Answer is an error of Redis that a script has met and passes on in its reply.
type Answer string

func (a Answer) Error() string { return string(a) }

// RedisError makes Answer a redis.Error.
func (Answer) RedisError() {}

// Read executes the script as Run does and returns its reply, which after an error of Run has
// failed with that error. A reply that is no list is read as a list of one value.
func (s *Script) Read(ctx context.Context, c redis.Cmdable, keys []string, args []any) *Reply {
	reply, err := s.Run(ctx, c, keys, args)
	if err != nil {
		return Failed(err)
	}
	return s.Reply(reply)
}

// Reply returns a reply that Run has returned, to be read.
func (s *Script) Reply(reply any) *Reply {
	values, ok := reply.([]any)
	if !ok {
		values = []any{reply}
	}
	return &Reply{values, &reading{script: s.name, unread: len(values)}}
}

// Failed returns a reply that has failed with err.
func Failed(err error) *Reply { return &Reply{nil, &reading{err: err}} }

// Done returns v, which was read from the reply or from a list inside it. If the reply has failed,
// or has values that were not read, it returns the error and a zero v instead.
func Done[T any](r *Reply, v T) (T, error) {
	if err := r.Err(); err != nil {
		var zero T
		return zero, err
	}
	return v, nil
}

// Err returns the error that Done returns.
func (r *Reply) Err() error {
	if r.unread > 0 {
		r.fail("%d values too many", r.unread)
	}
	return r.err
}

func (r *reading) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("script %s: unexpected reply: %s", r.script, fmt.Sprintf(format, args...))
	}
}

// Len returns how many values are left; 0 if the reply has failed.
func (r *Reply) Len() int {
	if r.err != nil {
		return 0
	}
	return len(r.values)
}

// More says whether values are left; false if the reply has failed.
func (r *Reply) More() bool { return r.Len() > 0 }

// Peek returns the next value without reading it; nil if there is none.
func (r *Reply) Peek() any {
	if !r.More() {
		return nil
	}
	return r.values[0]
}

func (r *Reply) next() any {
	if !r.More() {
		r.fail("too short")
		return nil
	}
	v := r.values[0]
	r.values = r.values[1:]
	r.unread--
	return v
}

// Text reads a text. A number is read as its decimal digits.
func (r *Reply) Text() string {
	switch v := r.next().(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	default:
		r.fail("%T instead of a text", v)
		return ""
	}
}

// Code reads a text that is one of the codes.
func (r *Reply) Code(codes ...string) string {
	code := r.Text()
	if !slices.Contains(codes, code) {
		r.fail("%.100q instead of %s", code, strings.Join(codes, " or "))
		return ""
	}
	return code
}

// Number reads a whole number. It may be written as a text, also with an exponent, as Redis writes
// the score of a sorted set.
func (r *Reply) Number() int64 {
	switch v := r.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err == nil {
			return n
		}
		f, err := strconv.ParseFloat(v, 64)
		if err != nil {
			r.fail("%.100q instead of a number", v)
		}
		return int64(f)
	default:
		r.fail("%T instead of a number", v)
		return 0
	}
}

// Flag reads the number 1 as true and any other number as false.
func (r *Reply) Flag() bool { return r.Number() == 1 }

// Duration reads a number of ms; it may be negative.
func (r *Reply) Duration() time.Duration { return time.Duration(r.Number()) * time.Millisecond }

// Time reads a time in ms since 1970. For 0 and for what is no such time it returns the zero time.
func (r *Reply) Time() time.Time {
	if ms := r.Number(); 0 < ms && ms < 1<<53 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// List reads a list, whose values are then read by themselves.
func (r *Reply) List() *Reply { return &Reply{r.list(), r.reading} }

func (r *Reply) list() []any {
	v := r.next()
	values, ok := v.([]any)
	if !ok {
		r.fail("%T instead of a list", v)
	}
	r.unread += len(values)
	return values
}

// Skip leaves out all values that are left.
func (r *Reply) Skip() {
	r.unread -= len(r.values)
	r.values = nil
}

// Texts reads all values that are left.
func (r *Reply) Texts() []string {
	texts := make([]string, 0, len(r.values))
	for r.More() {
		texts = append(texts, r.Text())
	}
	return texts
}

// Numbers reads all values that are left.
func (r *Reply) Numbers() []int64 {
	numbers := make([]int64, 0, len(r.values))
	for r.More() {
		numbers = append(numbers, r.Number())
	}
	return numbers
}

// unavailable holds the error codes of a server that can't serve the command now but may serve it
// later.
var unavailable = map[string]bool{
	"LOADING": true, "CLUSTERDOWN": true, "TRYAGAIN": true, "MASTERDOWN": true, "READONLY": true,
	// MOVED and ASK are here because the client follows redirects itself: it returns them to the
	// caller only after it has given up.
	"NOREPLICAS": true, "MISCONF": true, "BUSY": true, "MOVED": true, "ASK": true,
}

// IsUnavailable reports whether the same call may succeed later: the error is a network error, a
// timeout (also of the caller's context), an exhausted pool, or a reply of a server that can't
// serve the command now, for example because it is loading, failing over or migrating slots. The
// command may have been executed all the same, if only its reply was lost: repeat only idempotent
// commands.
func IsUnavailable(err error) bool {
	if err == nil {
		return false
	}
	if code, ok := reply(err); ok {
		return unavailable[code] || strings.Contains(err.Error(), "max number of clients reached")
	}
	var netErr net.Error // context.DeadlineExceeded is a net.Error too
	return errors.As(err, &netErr) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) ||
		strings.Contains(err.Error(), "redis: cluster has no nodes")
}

// NeverSent reports whether the command that caused err certainly did not reach Redis, because
// there was no connection to send it on. It is right only for a client that sends no command twice.
func NeverSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial" ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted)
}

// IsOOM reports whether Redis refused a write because its memory is full.
func IsOOM(err error) bool { return hasCode(err, "OOM") }

// IsNoPermission reports whether Redis refused a command because its Redis user has no right to it,
// or to a key or channel of it (ACL). If a script called the command, the script's earlier writes
// remain.
func IsNoPermission(err error) bool { return hasCode(err, "NOPERM") }

// IsNoGroup reports whether a stream or its consumer group does not exist, or was deleted during a
// blocking read.
func IsNoGroup(err error) bool { return hasCode(err, "NOGROUP") || hasCode(err, "UNBLOCKED") }

// IsBusyGroup reports whether the consumer group to be created exists already.
func IsBusyGroup(err error) bool { return hasCode(err, "BUSYGROUP") }

// IsNoScript reports whether Redis does not know a script by its hash.
func IsNoScript(err error) bool { return hasCode(err, "NOSCRIPT") }

// IsMigrating reports whether Redis Cluster refused the command because the hash slot of its keys
// is being moved to another node. The same call succeeds after the move; see IsUnavailable.
func IsMigrating(err error) bool { return hasCode(err, "TRYAGAIN") || hasCode(err, "ASK") }

// IsMoved reports whether err is the reply MOVED of a cluster node: the key belongs to another
// node. For ASK see IsMigrating.
func IsMoved(err error) bool { return hasCode(err, "MOVED") }

// codePattern finds the code at the beginning of an error reply. For errors of commands inside
// scripts, Redis 6 and miniredis put a text of their own before the code.
var codePattern = regexp.MustCompile(`^(?:ERR Error [^:]*: .*?\d+: -?)?([A-Z]+)\b`)

// reply returns the code of an error reply, "" if the reply has none; ok is false if err is not a
// reply of Redis.
func reply(err error) (code string, ok bool) {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return "", false
	}
	if found := codePattern.FindStringSubmatch(answer.Error()); found != nil {
		code = found[1]
	}
	return code, true
}

func hasCode(err error, code string) bool {
	got, ok := reply(err)
	return ok && got == code
}

// ServerVersion returns the version of Redis that a server reports, such as 7.0.15. It returns ""
// for a server that does not report it, such as an embedded one, and for a user who may not ask. An
// error means that the server did not answer.
func ServerVersion(ctx context.Context, server redis.Cmdable) (string, error) {
	info, err := server.Info(ctx, "server").Result()
	if IsUnavailable(err) {
		return "", err
	}
	_, rest, found := strings.Cut(info, "redis_version:")
	if !found {
		return "", nil
	}
	version, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(version), nil
}

// EvictionPolicy returns what a server does when its memory is full, e.g. noeviction. It returns ""
// for a server that does not report it, such as an embedded one, and for a user who may not ask.
// An error means that the server did not answer.
func EvictionPolicy(ctx context.Context, server redis.Cmdable) (string, error) {
	info, err := server.Info(ctx, "memory").Result()
	if IsUnavailable(err) {
		return "", err
	}
	_, rest, _ := strings.Cut(info, "maxmemory_policy:")
	policy, _, _ := strings.Cut(rest, "\r\n")
	return policy, nil
}
