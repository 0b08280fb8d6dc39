// Package call runs Lua scripts and tells callers what an error of Redis means. It imports only
// go-redis and the tracing API, so that a small package can use it without the rest of the project.
package call

import (
	"errors"
	"io"
	"net"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"
)

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
