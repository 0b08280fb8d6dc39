package waitingroom

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestModelOfManyUsers: 450 users. Calls of promote_users, expire_users, sweep_room and forget
// handle at most 200 of them each. The test compares replies and states with the reference.
func TestModelOfManyUsers(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	redistest.Server(t, redistest.Args("--unixsocket", socket))
	m := newCalls(t, newScripted(t, &redis.Options{Network: "unix", Addr: socket}, nil))
	settings := [][2]string{
		{"capacity", "0"}, {"max_waiting", "1000"}, {"token_ttl", "5000"}, {"leeway", "1000"}, {"max_session", "0"},
		{"ready", "3000"}, {"grace", "2000"}, {"on_close", "keep"}, {"no_show", "wait"}, {"retention", "0"},
	}
	m.declare(declareCall{"e", "put", 0, settings})
	var all []Visitor
	for i := range 450 {
		v := Visitor{User: fmt.Sprintf("u%03d", i*7%450), Conn: fmt.Sprintf("0000000%d.%d", 1+i%2, i)}
		if i%45 == 0 {
			v.Conn = ""
		}
		all = append(all, v)
	}
	batches := func(call func(list []Visitor)) {
		for from := 0; from < len(all); from += 200 {
			call(all[from:min(from+200, len(all))])
		}
	}
	enter := func() {
		batches(func(list []Visitor) {
			m.do(oneCall{
				"enter", append([]any{"e", "new", 20_000}, visitorArgs(list)...),
				func(p *refRooms) []any { return p.enter("e", "new", 20_000, list) }, namesOf(list),
			})
		})
	}
	change := func(field, value string) { m.declare(declareCall{"e", "change", 0, [][2]string{{field, value}}}) }
	number := func(reply any, i int) string { return fmt.Sprint(reply.([]any)[i]) }
	until := func(last string, script string, byRef func(p *refRooms) []any, args ...any) (calls int) {
		for n := ""; n != last; calls++ {
			require.Less(t, calls, 10)
			n = number(m.run(oneCall{script, args, byRef, nil}), 0)
		}
		return calls
	}
	promote := func(p *refRooms) []any { return p.promote("e", 200) }
	expire := func(p *refRooms) []any { return p.expire("e") }
	forget := func(p *refRooms) []any { return p.forget("e") }
	sweep := func() (calls int) {
		for from := int64(0); from != 0 || calls == 0; calls++ {
			reply := m.run(oneCall{
				"sweep_room", []any{"e", from, "00000002"},
				func(p *refRooms) []any { return p.sweep("e", from, []string{"00000002"}) }, nil,
			})
			_, err := fmt.Sscan(number(reply, 0), &from)
			require.NoError(t, err)
		}
		return calls
	}

	m.run(oneCall{"expire_users", []any{"e"}, expire, nil})
	enter()
	change("capacity", "1000")
	require.Equal(t, 4, until("0", "promote_users", promote, "e", 200))
	batches(func(list []Visitor) {
		m.do(oneCall{
			"claim", append([]any{"e"}, visitorArgs(list[:100*len(list)/200])...),
			func(p *refRooms) []any { return p.claim("e", list[:100*len(list)/200]) }, nil,
		})
	})
	m.micros += 3_500_000 // the others are no-shows
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))
	m.micros += 4_000_000
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))

	change("capacity", "0")
	enter()
	m.micros += 4_900_000
	m.run(oneCall{"expire_users", []any{""}, func(p *refRooms) []any { return p.expire("") }, nil})
	m.micros += 4_900_000
	m.run(oneCall{"expire_users", []any{""}, func(p *refRooms) []any { return p.expire("") }, nil})
	m.micros += 500_000
	require.Equal(t, 2, sweep()) // half of the users are away
	batches(func(list []Visitor) {
		m.do(oneCall{
			"disconnect", append([]any{"e"}, visitorArgs(list)...),
			func(p *refRooms) []any { return p.disconnect("e", list) }, nil,
		})
	})
	m.micros += 4_000_000
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))
	enter()
	m.do(oneCall{
		"disconnect", append([]any{"e"}, visitorArgs(all[200:400])...),
		func(p *refRooms) []any { return p.disconnect("e", all[200:400]) }, nil,
	})
	change("mode", "closed")
	require.Equal(t, 3, until("0", "forget", forget, "e"))
	m.run(oneCall{"forget", []any{"e"}, forget, nil})
	require.Empty(t, m.view.rooms)
}
