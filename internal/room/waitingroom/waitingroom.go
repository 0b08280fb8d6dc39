// Package waitingroom owns the layout of the waiting room in Redis: events, their users and their
// slots. Each transition is one Lua script in lua/room and one typed method here. A script decides
// by Redis's clock. docs/waiting-room.md describes the words and the promises.
//
// After an error a caller does not know whether the script ran, so it may repeat any call with the
// same arguments. The line "Twice:" of a method says what the repeated call answers or does. Errors
// that are not listed are those of Redis and of the network.
package waitingroom

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
	"github.com/bulkaction/bulkaction/lua"
)

// Layout is the layout of the events and their users; see lua/room/README.md.
var Layout = layout.Part{Name: layout.Rooms, Oldest: 1, Newest: 1}

// MostUsers is the largest number of users, or for Snapshot of events, in one call of a script.
const MostUsers = 200

var (
	// ErrUnknown means that there is no such event.
	ErrUnknown = errors.New("there is no such event")
	// ErrRev means that a change was refused because the event has another rev than the caller has
	// seen.
	ErrRev = errors.New("the event was changed by someone else")
)

// Rooms calls the scripts. It may be used by several goroutines.
type Rooms struct {
	rdb      redis.UniversalClient
	blocking redis.UniversalClient // for reads that wait
	space    keyspace.Space
	observe  func(script string, took time.Duration)
}

// New returns the Rooms of a key space. observe is called after each script with the script's name
// and duration; nil: nothing is called.
func New(conn *redisx.Conn, space keyspace.Space, observe func(script string, took time.Duration)) *Rooms {
	return &Rooms{rdb: conn.Cmd, blocking: conn.Block, space: space, observe: observe}
}

// Settings are the settings of an event with all defaults filled in. Package
// internal/room/roomadmin has their bounds and defaults.
type Settings struct {
	Capacity     int64
	Stock        *int64  // seats to sell in all; nil: no stock
	Rate         float64 // admissions a second; 0: no limit
	Burst        int64   // admissions that the token bucket holds; at least 1 if Rate > 0
	MaxWaiting   int64
	TokenTTL     time.Duration
	Leeway       time.Duration
	MaxSession   time.Duration // 0: none
	Ready        time.Duration
	Grace        time.Duration
	OnClose      string // keep or release
	NoShow       string // wait or release
	Mode         string // an api.Mode constant; "" for Declare: as it is
	ReturnURL    string
	Retention    time.Duration
	SeatsPending bool // the capacity is to come from the seat service, which has not answered yet
}

// Visitor is a user's id and the conn of the user's stream. Without a Conn, the user polls.
type Visitor struct{ User, Conn string }

// Mode says what Enter does with a user.
type Mode string

// Modes of Enter.
const (
	EnterNew   Mode = "new"   // an unknown user gets a number
	EnterKnown Mode = "known" // an unknown user gets Code None
	EnterAgain Mode = "again" // only a record with this conn is used: re-entry of a broker's streams
)

// Code is what a script answers for one user.
type Code string

// Codes of Enter.
const (
	Entered    Code = "ENTERED"     // the user has a new number and waits
	Back       Code = "BACK"        // the user had a number and waits
	Ready      Code = "READY"       // the user holds a slot; call Claim
	InProgress Code = "IN_PROGRESS" // the user has a token
	None       Code = "NONE"        // the user is unknown, or the token is not valid any more
	Stale      Code = "STALE"       // the record has another conn
	Full       Code = "FULL"        // the queue is as long as it may be
	Closed     Code = "CLOSED"
	SoldOut    Code = "SOLD_OUT"
	Unknown    Code = "UNKNOWN" // there is no such event
)

// Codes that Disconnect, Claim and Renew return, in addition to None and Stale.
const (
	Away    Code = "AWAY"    // the user keeps the place for the grace period
	Noted   Code = "NOTED"   // nothing changed: the slot runs to its end, or the user is away already
	Gone    Code = "GONE"    // the user has no record any more
	NoShow  Code = "NO_SHOW" // as Gone: the user was promoted and did not fetch the token
	Claimed Code = "CLAIMED"
	Renewed Code = "RENEWED"
	Over    Code = "OVER" // max_session is reached
)

// Entry is the answer of Enter for one user. Number is 0 if the user has no record, and with None
// and Stale. Fence and Expires are set for READY (when the slot ends) and IN_PROGRESS (when the
// token expires). Replaced is the conn that the visitor's conn has replaced, "" if none.
type Entry struct {
	Code     Code
	Number   int64
	Fence    string
	Expires  time.Time
	Replaced string
	New      bool // this call has given the number
}

// EnterReply is the answer of Enter. Change is the change number of the event after the call.
type EnterReply struct {
	Change  int64
	Entries []Entry
}

// Claim is the answer of Claim, Renew and Verify for one user: the token's fence and expiry.
type Claim struct {
	Code    Code
	Fence   string
	Expires time.Time
}

// Progress is the answer of Promote and Expire: how many users the call promoted or removed, and
// how long nothing is due in the event. At is Redis's time of the call.
type Progress struct {
	N       int
	NoShows int           // those of N who were promoted and did not fetch the token
	Wait    time.Duration // until something is due; negative: for ever
	Mode    string        // "" if the event is unknown
	At      time.Time
}

// Snapshot is the state of an event at one instant.
type Snapshot struct {
	Event    string
	Rev      int64
	Settings Settings
	Left     *int64 // seats that are left; nil: no stock
	Tail     int64  // the last number that was given
	Change   int64  // the event's change number: that of its latest entry in moves
	Waiting  int64
	Away     int64 // users who are away; not those who poll
	Used     int64 // slots in use
	Free     int64 // slots that nobody holds
	Counters map[string]int64
}

// The Lua scripts of the package. The header of each Lua file describes its arguments and replies.
var (
	declareScript    = script("declare_room")
	enterScript      = script("enter")
	disconnectScript = script("disconnect")
	leaveScript      = script("leave")
	promoteScript    = script("promote_users")
	claimScript      = script("claim")
	renewScript      = script("renew_token")
	completeScript   = script("complete")
	expireScript     = script("expire_users")
	sweepScript      = script("sweep_room")
	forgetScript     = script("forget")
	auditScript      = script("audit_room")
	snapshotScript   = call.NewScript("snapshot", lua.Source("parts/base", "room/snapshot"))
)

// script returns the script room/name of package lua.
func script(name string) *call.Script {
	source := lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/"+name)
	return call.NewScript(name, source)
}

func (r *Rooms) run(ctx context.Context, s *call.Script, p keyspace.Partition, args ...any) *call.Reply {
	began := time.Now()
	reply, err := s.Run(ctx, r.rdb, p.Keys(), args)
	if r.observe != nil {
		r.observe(s.Name(), time.Since(began))
	}
	if err != nil {
		return call.Failed(fmt.Errorf("partition %d: %w", p.Index(), err))
	}
	return s.Reply(reply)
}
