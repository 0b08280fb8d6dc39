package waitingroom

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

// modelBase is the prefix of the keys of the partition that the model test uses.
const modelBase = "t:{0}:"

// clockKey is the key from which the changed scripts read the time on a real Redis, in µs.
const clockKey = "clock"

// dumpKeys is a Lua script that returns the name, the type and the content of every key.
const dumpKeys = `
local out = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, content = redis.call('TYPE', key), {}
  if type(kind) == 'table' then kind = kind.ok end
  if kind == 'hash' then
    content = redis.call('HGETALL', key)
  elseif kind == 'zset' then
    content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'list' then
    content = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'stream' then
    for i, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do content[i] = table.concat(entry[2], ' ') end
  end
  out[#out + 1] = { key, kind, content }
end
return out
`

// scripted runs the scripts of the package on a Redis, or miniredis, whose time the test sets.
type scripted struct {
	c       *redis.Client
	scripts map[string]*call.Script
	setTime func(pipe redis.Pipeliner, micros int64)
}

// filesOf returns the names of the Lua files that make up a script, in the order in which the
// package loads them.
func filesOf(name string) []string {
	if name == "snapshot" {
		return []string{"parts/base", "room/" + name}
	}
	return []string{"parts/base", "parts/limiters", "parts/signals", "parts/room", "room/" + name}
}

var allScripts = []*call.Script{
	declareScript, enterScript, disconnectScript, leaveScript, promoteScript, claimScript, renewScript,
	completeScript, expireScript, sweepScript, forgetScript, snapshotScript, auditScript,
}

// newScripted loads the scripts. With setTime == nil (a real Redis), it changes them so that they
// read the time from the key clock.
func newScripted(t testing.TB, opts *redis.Options, setTime func(time.Time)) *scripted {
	t.Helper()
	opts.DisableIdentity, opts.Protocol = true, 2
	opts.MaxRetries, opts.ReadTimeout = -1, time.Minute // a script that is repeated is a second call
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	s := &scripted{c: c, scripts: map[string]*call.Script{"dump": call.NewScript("dump", dumpKeys)}}
	for _, script := range allScripts {
		text := lua.Source(filesOf(script.Name())...)
		require.Equal(t, script.SHA(), call.NewScript("", text).SHA(), "the files of %s", script.Name())
		if setTime == nil {
			const now = "  local t = call('TIME')\n  return t[1] * 1000000 + t[2]\n"
			require.Equal(t, 1, strings.Count(text, now))
			text = strings.Replace(text, now, "  return tonumber(call('GET', '"+clockKey+"'))\n", 1)
		}
		s.scripts[script.Name()] = call.NewScript(script.Name(), text)
		require.NoError(t, c.ScriptLoad(t.Context(), text).Err())
	}
	require.NoError(t, c.ScriptLoad(t.Context(), dumpKeys).Err())
	s.setTime = func(pipe redis.Pipeliner, micros int64) {
		if setTime != nil {
			setTime(time.UnixMicro(micros))
		} else {
			pipe.Set(context.Background(), clockKey, micros, 0)
		}
	}
	return s
}

// run calls a script at the given time, and returns its reply and all data in Redis after it.
func (s *scripted) run(micros int64, script string, args []any) (any, *stored, error) {
	ctx := context.Background()
	pipe := s.c.Pipeline()
	s.setTime(pipe, micros)
	reply := pipe.EvalSha(ctx, s.scripts[script].SHA(), []string{modelBase, modelBase + "absent"}, args...)
	dump := pipe.EvalSha(ctx, s.scripts["dump"].SHA(), nil)
	_, _ = pipe.Exec(ctx)
	if err := errors.Join(reply.Err(), dump.Err()); err != nil {
		return nil, nil, err
	}
	state, err := readStored(dump.Val())
	return reply.Val(), state, err
}

// storedEvent is an event in Redis.
type storedEvent struct {
	hash                 map[string]string
	waiting, away, slots map[string]int64
	users                map[string]string
}

// stored is the state of a partition in Redis.
type stored struct {
	events       map[string]*storedEvent
	rooms        map[string]int64
	cleanup      map[string]string
	entry, moves []string
	wake         int
}

func (s *stored) event(id string) *storedEvent {
	if s.events[id] == nil {
		s.events[id] = &storedEvent{}
	}
	return s.events[id]
}

// readStored parses the answer of dumpKeys, the content of all keys. It returns an error for a key
// that is not in the design.
func readStored(dump any) (*stored, error) {
	s := &stored{events: map[string]*storedEvent{}}
	var failed error
	for _, row := range dump.([]any) {
		f := row.([]any)
		name, content := f[0].(string), make([]string, 0, len(f[2].([]any)))
		for _, v := range f[2].([]any) {
			content = append(content, v.(string))
		}
		if name == clockKey {
			continue
		}
		key := strings.TrimPrefix(name, modelBase)
		scores := func() map[string]int64 {
			out := map[string]int64{}
			for member, score := range pairs(content) {
				n, err := strconv.ParseFloat(score, 64)
				failed = errors.Join(failed, err)
				out[member] = int64(n)
			}
			return out
		}
		switch kind, rest, _ := strings.Cut(key, ":"); {
		case key == "rooms":
			s.rooms = scores()
		case key == "cleanup":
			s.cleanup = pairs(content)
		case key == "entry":
			s.entry = content
		case key == "moves":
			s.moves = content
		case key == "wake:promoter":
			s.wake = len(content)
		case kind == "room":
			id, part, _ := strings.Cut(rest, ":")
			switch part {
			case "":
				s.event(id).hash = pairs(content)
			case "users":
				s.event(id).users = pairs(content)
			case "waiting":
				s.event(id).waiting = scores()
			case "away":
				s.event(id).away = scores()
			case "slots":
				s.event(id).slots = scores()
			default:
				failed = fmt.Errorf("no key of the design: %s", name)
			}
		default:
			failed = fmt.Errorf("no key of the design: %s", name)
		}
	}
	return s, failed
}

func pairs(list []string) map[string]string {
	out := make(map[string]string, len(list)/2)
	for i := 0; i+1 < len(list); i += 2 {
		out[list[i]] = list[i+1]
	}
	return out
}

// ofState lists the fields of an event's hash that are neither settings nor counters.
var ofState = []string{"rev", "tail", "change", "fence", "t", "closed", "steps"}

// String shows the state as refRooms.String does.
func (s *stored) String() string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for id, e := range s.events {
		for name, value := range e.hash {
			switch {
			case name == "t":
				value = strings.TrimSuffix(value, ".00")
				add("%s state t=%s", id, value)
			case slices.Contains(ofState, name):
				if value != "0" {
					add("%s state %s=%s", id, name, value)
				}
			case slices.Contains(counters, name):
				add("%s count %s=%s", id, name, value)
			default:
				add("%s setting %s=%s", id, name, value)
			}
		}
		for user, record := range e.users {
			add("%s user %s=%s", id, user, record)
		}
		for key, set := range map[string]map[string]int64{"waiting": e.waiting, "away": e.away, "slots": e.slots} {
			for user, score := range set {
				add("%s %s %s=%d", id, key, user, score)
			}
		}
	}
	for id, at := range s.rooms {
		add("rooms %s=%d", id, at)
	}
	if c := s.cleanup; c != nil {
		add("cleanup last_run=%s hold_until=%s steps=%s", c["last_run"], c["hold_until"], c["steps"])
	}
	add("woken %v", s.wake == 1)
	for i, m := range s.moves {
		f := strings.Split(m, " ") // event E change N gone …
		add("moves %03d %s", i, strings.Join(append([]string{f[1], f[3]}, f[5:]...), " "))
	}
	for i, m := range s.entry {
		add("entry %03d %s", i, strings.NewReplacer("type ", "", " data ", " ").Replace(m))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// eventIDs returns the events in order.
func (s *stored) eventIDs() []string { return slices.Sorted(maps.Keys(s.events)) }
