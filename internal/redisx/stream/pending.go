package stream

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// renewScript sets the idle time of entries that this consumer still owns. XCLAIM alone would steal
// back the entries that another consumer has claimed meanwhile.
//
// KEYS: stream. ARGV: group, consumer, idle ms, ids (at most 200). Reply: the ids that another
// consumer owns.
var renewScript = call.NewScript("renew-pending", `
local stream, group, consumer, idle = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local claim, lost = {'XCLAIM', stream, group, consumer, 0}, {}
for i = 4, #ARGV do
  local entry = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if entry and entry[2] == consumer then
    claim[#claim + 1] = ARGV[i]
  elseif entry then
    lost[#lost + 1] = ARGV[i]
  end
end
if #claim > 5 then
  claim[#claim + 1], claim[#claim + 2], claim[#claim + 3] = 'IDLE', idle, 'JUSTID'
  redis.call(unpack(claim))
end
return lost
`)

// forgetScript deletes consumers that have no pending entries and were idle for longer than a given
// time. Redis drops the pending entries of a deleted consumer, and then nobody could claim them. So
// the script checks and deletes in one step.
//
// KEYS: stream. ARGV: group, idle ms. Reply: the number of deleted consumers.
var forgetScript = call.NewScript("forget-dead-consumers", `
local stream, group, idle = KEYS[1], ARGV[1], tonumber(ARGV[2])
if redis.call('EXISTS', stream) == 0 then return 0 end
local dead = {}
for _, pairs in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local consumer = {}
  for i = 1, #pairs, 2 do consumer[pairs[i]] = pairs[i + 1] end
  if consumer.pending == 0 and consumer.idle > idle then dead[#dead + 1] = consumer.name end
end
for _, name in ipairs(dead) do redis.call('XGROUP', 'DELCONSUMER', stream, group, name) end
return #dead
`)

const renewBatch = 200

// Renew sets the idle time of those of the entries ids that this consumer still owns to idle: 0
// keeps them, a full lease gives them up. It returns the ids that another consumer owns now. It
// ignores ids that are not pending any more, and a missing group.
func (r *Reader) Renew(
	ctx context.Context, stream string, ids []string, idle time.Duration,
) (lost []string, err error) {
	for batch := range slices.Chunk(ids, renewBatch) {
		args := make([]any, 0, 3+len(batch))
		args = append(args, r.group, r.consumer, idle.Milliseconds())
		for _, id := range batch {
			args = append(args, id)
		}
		reply := renewScript.Read(ctx, r.conn.Cmd, []string{stream}, args)
		taken := reply.Texts()
		if err := reply.Err(); call.IsNoGroup(err) {
			return nil, nil // the next read creates the group again
		} else if err != nil {
			return lost, fmt.Errorf("renew entries of stream %s: %w", stream, err)
		}
		lost = append(lost, taken...)
	}
	return lost, nil
}

// ForgetDead deletes the group's consumers that have no pending entries and were idle for longer
// than age. It returns their number; 0 if the group is missing.
func (r *Reader) ForgetDead(ctx context.Context, stream string, age time.Duration) (int64, error) {
	reply := forgetScript.Read(ctx, r.conn.Cmd, []string{stream}, []any{r.group, age.Milliseconds()})
	n, err := call.Done(reply, reply.Number())
	if err != nil && !call.IsNoGroup(err) {
		return 0, fmt.Errorf("forget dead consumers of stream %s: %w", stream, err)
	}
	return n, nil
}
