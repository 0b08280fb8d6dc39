// Package call runs Lua scripts and tells what an error from Redis means for the caller. It imports
// only go-redis and the tracing API, so that a small package can use it without the rest of
// the engine.
package call

import (
	"errors"
	"io"
	"net"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"
)

// unavailable are the replies of a server that can't serve now and may later.
var unavailable = map[string]bool{
	"LOADING": true, "CLUSTERDOWN": true, "TRYAGAIN": true, "MASTERDOWN": true, "READONLY": true,
	// these where nobody followed them to the end
	"NOREPLICAS": true, "MISCONF": true, "BUSY": true, "MOVED": true, "ASK": true,
}

// IsUnavailable says whether Redis is away or can't serve now, so that the same call may succeed
// later: the network, a timeout, an exhausted pool, or a server that is loading, failing over or
// resharding. Whether the command was executed is IsAmbiguous's question.
func IsUnavailable(err error) bool {
	if err == nil {
		return false
	}
	if code, ok := reply(err); ok {
		return unavailable[code] || strings.Contains(err.Error(), "max number of clients reached")
	}
	return isNetwork(err) ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) ||
		strings.Contains(err.Error(), "redis: cluster has no nodes")
}

// IsAmbiguous says whether the command may have been executed although it failed: its reply was
// lost, or did not come in time. Only what is idempotent may be repeated then.
func IsAmbiguous(err error) bool {
	if _, ok := reply(err); ok || err == nil {
		return false
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return false
	}
	return isNetwork(err)
}

// IsOOM says whether Redis refused a write for want of memory.
func IsOOM(err error) bool { return hasCode(err, "OOM") }

// IsNoGroup says whether a stream or its consumer group does not exist, or vanished during a
// blocked read.
func IsNoGroup(err error) bool { return hasCode(err, "NOGROUP") || hasCode(err, "UNBLOCKED") }

// IsBusyGroup says whether the consumer group that was to be created exists already.
func IsBusyGroup(err error) bool { return hasCode(err, "BUSYGROUP") }

// IsNoScript says whether Redis does not know a script by its hash.
func IsNoScript(err error) bool { return hasCode(err, "NOSCRIPT") }

// IsMoved says whether a node of a cluster has sent the caller to another one.
func IsMoved(err error) bool { return hasCode(err, "MOVED") }

// IsWrongType says whether a key holds another type than its command expects.
func IsWrongType(err error) bool { return hasCode(err, "WRONGTYPE") }

// codePattern finds the code that begins an error reply. Redis 6 and miniredis put their own words
// before what a command in a script replied.
var codePattern = regexp.MustCompile(`^(?:ERR Error [^:]*: .*?\d+: -?)?([A-Z]+)\b`)

// reply returns the code of what Redis answered, if err is an answer of Redis.
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

func isNetwork(err error) bool {
	var netErr net.Error // also context.DeadlineExceeded
	return errors.As(err, &netErr) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
