package rapidtest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// clockKey is the key from which the scripts read the time, in µs, on a real Redis.
const clockKey = "clock"

// dumpKeys is a Lua script that returns the name, the Redis type, the time to live and the content
// of every key.
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
  out[#out + 1] = { key, kind, redis.call('PTTL', key), content }
end
return out
`

// Scripts runs Lua scripts on a Redis or miniredis whose time the test sets.
type Scripts struct {
	*redis.Client
	shas    map[string]string // by the script's name
	setTime func(time.Time)   // nil: the scripts read clockKey
}

// Key is a key in Redis: its type, its time to live in ms (-1: none) and its content.
type Key struct {
	Kind    string
	TTL     int64
	Content []string
}

// Hash returns the content of a hash, or the scores of a sorted set.
func (k Key) Hash() map[string]string {
	h := make(map[string]string, len(k.Content)/2)
	for i := 0; i+1 < len(k.Content); i += 2 {
		h[k.Content[i]] = k.Content[i+1]
	}
	return h
}

// NewScripts loads scripts. With setTime nil, for a real Redis, they are changed to read the time
// from a key.
func NewScripts(t testing.TB, opts *redis.Options, setTime func(time.Time), scripts ...*call.Script) *Scripts {
	t.Helper()
	opts.DisableIdentity, opts.Protocol = true, 2
	opts.MaxRetries, opts.ReadTimeout = -1, time.Minute // a script that is repeated is a second call
	s := &Scripts{Client: redis.NewClient(opts), shas: map[string]string{}, setTime: setTime}
	t.Cleanup(func() { _ = s.Close() })
	load := func(name, text string) {
		sha, err := s.ScriptLoad(t.Context(), text).Result()
		require.NoError(t, err)
		s.shas[name] = sha
	}
	load("dump", dumpKeys)
	for _, script := range scripts {
		text := script.Source()
		if setTime == nil {
			const now = "  local t = call('TIME')\n  return t[1] * 1000000 + t[2]\n"
			require.Equal(t, 1, strings.Count(text, now))
			text = strings.Replace(text, now, "  return tonumber(call('GET', '"+clockKey+"'))\n", 1)
		}
		load(script.Name(), text)
	}
	return s
}

// SetTime sets the time that the scripts see, in µs.
func (s *Scripts) SetTime(c redis.Cmdable, micros int64) {
	if s.setTime != nil {
		s.setTime(time.UnixMicro(micros))
	} else {
		c.Set(context.Background(), clockKey, micros, 0)
	}
}

// Call calls a script at the time that was set last.
func (s *Scripts) Call(c redis.Cmdable, script string, keys []string, args ...any) *redis.Cmd {
	return c.EvalSha(context.Background(), s.shas[script], keys, args...)
}

// Run calls a script at the given time, and returns its reply and all keys as they are afterwards.
func (s *Scripts) Run(micros int64, script string, keys []string, args []any) (any, map[string]Key, error) {
	pipe := s.Pipeline()
	s.SetTime(pipe, micros)
	reply, dump := s.Call(pipe, script, keys, args...), s.Call(pipe, "dump", nil)
	_, _ = pipe.Exec(context.Background())
	if err := reply.Err(); err != nil && !errors.Is(err, redis.Nil) {
		return nil, nil, err
	}
	all, err := dumped(dump)
	return reply.Val(), all, err
}

// All returns all keys but the clock.
func (s *Scripts) All() (map[string]Key, error) { return dumped(s.Call(s, "dump", nil)) }

func dumped(dump *redis.Cmd) (map[string]Key, error) {
	rows, err := dump.Slice()
	all := make(map[string]Key, len(rows))
	for _, row := range rows {
		f := row.([]any)
		k := Key{Kind: f[1].(string), TTL: f[2].(int64)}
		for _, v := range f[3].([]any) {
			k.Content = append(k.Content, v.(string))
		}
		if f[0] != clockKey {
			all[f[0].(string)] = k
		}
	}
	return all, err
}

// Model checks a property of scripts in two parallel subtests: as OnRedis does with these rounds,
// and with few sequences on miniredis.
func Model(t *testing.T, rounds int, scripts []*call.Script, property func(*rapid.T, *Scripts)) {
	t.Helper()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		OnRedis(t, rounds, func(o *redis.Options) *Scripts { return NewScripts(t, o, nil, scripts...) }, property)
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		mini := miniredis.RunT(t) // its keys don't expire by themselves
		s := NewScripts(t, &redis.Options{Addr: mini.Addr()}, mini.SetTime, scripts...)
		CheckFew(t, func(rt *rapid.T) { property(rt, s) })
	})
}
