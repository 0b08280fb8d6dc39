package waitingroom

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Enter finds the place of each visitor, or with EnterNew gives a new visitor a number. poll is the
// longest time until a visitor without a conn calls again. It returns ErrUnknown if there is no
// such event.
//
// Twice: the same answer, with Back instead of Entered, New false and no Replaced.
func (r *Rooms) Enter(
	ctx context.Context, event string, mode Mode, poll time.Duration, visitors ...Visitor,
) (EnterReply, error) {
	args := append(make([]any, 0, 3+2*len(visitors)), event, string(mode), poll.Milliseconds())
	reply := r.run(ctx, enterScript, r.space.OfEvent(event), withVisitors(args, visitors)...)
	if reply.Code("OK", string(Unknown)) == string(Unknown) {
		return EnterReply{}, ErrUnknown
	}
	e := EnterReply{Change: reply.Number(), Entries: make([]Entry, len(visitors))}
	for i := range e.Entries {
		e.Entries[i] = Entry{
			Code: Code(reply.Text()), Number: reply.Number(), Fence: reply.Text(), Expires: reply.Time(),
			Replaced: reply.Text(), New: reply.Flag(),
		}
	}
	return call.Done(reply, e)
}

func withVisitors(args []any, visitors []Visitor) []any {
	for _, v := range visitors {
		args = append(args, v.User, v.Conn)
	}
	return args
}

// Disconnect tells Redis that the streams of these visitors have ended. By the event's settings, a
// user goes away, is removed (Gone, NoShow), or stays (Noted). Stale: the event or the user is
// unknown, or the user has another conn or polls. Noted and Stale change nothing.
//
// Twice: Noted or Stale.
func (r *Rooms) Disconnect(ctx context.Context, event string, visitors ...Visitor) ([]Code, error) {
	reply := r.run(ctx, disconnectScript, r.space.OfEvent(event), withVisitors([]any{event}, visitors)...)
	codes := make([]Code, len(visitors))
	for i := range codes {
		codes[i] = Code(reply.Text())
	}
	return call.Done(reply, codes)
}

// Leave removes a user in any state. It returns whether the user had a record, and the conn of the
// user's last stream, "" if there is none: the caller has to tell the conn's broker to end the
// stream, which may have ended before.
//
// Twice: left is false.
func (r *Rooms) Leave(ctx context.Context, event, user string) (conn string, left bool, err error) {
	reply := r.run(ctx, leaveScript, r.space.OfEvent(event), event, user)
	left = reply.Code("LEFT", string(None)) == "LEFT"
	conn = reply.Text()
	return conn, left, reply.Err()
}

// Promote gives free slots of an open event, as far as its rate allows, to the users with the
// lowest numbers who are present, 200 at most.
//
// Twice: promotes the next users.
func (r *Rooms) Promote(ctx context.Context, event string) (Progress, error) {
	reply := r.run(ctx, promoteScript, r.space.OfEvent(event), event, MostUsers)
	return call.Done(reply, progress(reply))
}

// Expire removes the users of an event whose time has ended, 200 at most: away users after their
// grace, users who poll no more, no-shows, and users whose token and its leeway have ended. During
// a hold it removes only the last. It also stores in the partition when it ran: a gap of more than
// 5 s starts a hold. With event "" it removes nobody.
//
// Twice: removes the next users.
func (r *Rooms) Expire(ctx context.Context, p keyspace.Partition, event string) (Progress, error) {
	reply := r.run(ctx, expireScript, p, event)
	done := progress(reply)
	done.NoShows = int(reply.Number())
	return call.Done(reply, done)
}

func progress(reply *call.Reply) Progress {
	return Progress{N: int(reply.Number()), Wait: reply.Duration(), At: reply.Time(), Mode: reply.Text()}
}

// Claim makes promoted visitors IN_PROGRESS: their tokens begin. The answer for each is Claimed;
// None if the user holds no slot or the token has expired; or Stale if the user has another conn. A
// visitor without a conn is never Stale.
//
// Twice: the same fence and expiry.
func (r *Rooms) Claim(ctx context.Context, event string, visitors ...Visitor) ([]Claim, error) {
	reply := r.run(ctx, claimScript, r.space.OfEvent(event), withVisitors([]any{event}, visitors)...)
	claims := make([]Claim, len(visitors))
	for i := range claims {
		claims[i] = Claim{Code: Code(reply.Text()), Fence: reply.Text(), Expires: reply.Time()}
	}
	return call.Done(reply, claims)
}

// Renew extends the life of the token with this fence. The answers are Renewed, Over (the event's
// max_session has passed) and None (the token is not valid any more).
//
// Twice: the same expiry or a later one.
func (r *Rooms) Renew(ctx context.Context, event, user, fence string) (Claim, error) {
	reply := r.run(ctx, renewScript, r.space.OfEvent(event), event, user, fence)
	return call.Done(reply, Claim{Code: Code(reply.Text()), Fence: fence, Expires: reply.Time()})
}

// Verify returns whether a token is valid now: the code InProgress with the expiry after its latest
// renewal, or None. It also returns Redis's time. It changes nothing.
func (r *Rooms) Verify(ctx context.Context, event, user, fence string) (Claim, time.Time, error) {
	p := r.space.OfEvent(event)
	pipe := r.rdb.Pipeline()
	fields, clock := pipe.HMGet(ctx, p.RoomUsers(event), user), pipe.Time(ctx)
	_, err := pipe.Exec(ctx)
	rec, err := readRecord(p, fields, err)
	now := clock.Val()
	if err != nil || rec.letter != 'P' || rec.fence != fence || !rec.expires.After(now) {
		return Claim{Code: None}, now, err
	}
	return Claim{Code: InProgress, Fence: fence, Expires: rec.expires}, now, nil
}

// State returns the code of a user's state: Entered (waiting), Away, Ready (holds a slot),
// InProgress (has a token) or None (no record). It changes nothing.
func (r *Rooms) State(ctx context.Context, event, user string) (Code, error) {
	p := r.space.OfEvent(event)
	fields := r.rdb.HMGet(ctx, p.RoomUsers(event), user)
	rec, err := readRecord(p, fields, fields.Err())
	return map[byte]Code{0: None, 'W': Entered, 'A': Away, 'R': Ready, 'P': InProgress}[rec.letter], err
}

// readRecord returns the record in a reply of HMGET. Without a readable record, it is empty.
func readRecord(p keyspace.Partition, fields *redis.SliceCmd, err error) (record, error) {
	if err != nil {
		return record{}, fmt.Errorf("partition %d: read the record of a user: %w", p.Index(), err)
	}
	text, _ := fields.Val()[0].(string)
	rec, _ := parseRecord(text)
	return rec, nil
}

// Complete removes a user who has a token, because the protected service is done with the user, and
// gives the slot back. With sold, it also takes a seat from the stock, if there is one. It returns
// false if the user has no record, or one with another fence or without a token. The token may have
// expired shortly before.
//
// Twice: false, and no second seat is sold.
func (r *Rooms) Complete(ctx context.Context, event, user, fence string, sold bool) (bool, error) {
	n := 0
	if sold {
		n = 1
	}
	reply := r.run(ctx, completeScript, r.space.OfEvent(event), event, user, fence, n)
	return call.Done(reply, reply.Code("DONE", string(None)) == "DONE")
}

// Sweep makes away each waiting user whose conn belongs to none of the live brokers and is older
// than 10 s. It looks at up to 1,000 users with numbers above from, and stops after 200 such users.
// It returns the number to continue from (0: done), how many users it made away, and how long a
// hold still forbids to sweep.
//
// Twice: makes away only users whom the first call has left.
func (r *Rooms) Sweep(
	ctx context.Context, event string, from int64, alive []string,
) (next int64, n int, hold time.Duration, err error) {
	args := append(make([]any, 0, 2+len(alive)), event, from)
	for _, instance := range alive {
		args = append(args, instance)
	}
	reply := r.run(ctx, sweepScript, r.space.OfEvent(event), args...)
	next, n, hold = reply.Number(), int(reply.Number()), reply.Duration()
	return next, n, hold, reply.Err()
}

// record has those fields of a user's record that this package needs. lua/room/README.md describes
// all.
type record struct {
	letter  byte // W waiting, A away, R READY, P IN_PROGRESS
	number  int64
	conn    string
	fence   string
	expires time.Time
}

// parseRecord parses the text of a record, letter|number|conn|since|fence|expires|first. It returns
// false if the text is no record.
func parseRecord(text string) (record, bool) {
	parts := strings.Split(text, "|")
	if len(parts) != 7 || len(parts[0]) != 1 || !strings.Contains("WARP", parts[0]) {
		return record{}, false
	}
	number, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil {
		return record{}, false
	}
	rec := record{letter: parts[0][0], number: number, conn: parts[2], fence: parts[4]}
	if ms, err := strconv.ParseInt(parts[5], 10, 64); err == nil {
		rec.expires = time.UnixMilli(ms)
	}
	return rec, true
}
