package ledger_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestCreate(t *testing.T) {
	both(t, func(w *world) {
		a := ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "high", "name": "Spring"}}
		status, err := ledger.Create(w.Context(), w.c, w.p, a)
		require.NoError(w, err)
		require.Equal(w, api.StatusCreated, status)

		group := w.c.HGetAll(w.Context(), w.p.Group("g")).Val()
		at := group["at:created"]
		require.Equal(w, map[string]string{
			"id": "g", "tenant": "acme", "type": "T", "hash": "h", "status": "CREATED", "round": "1", "lane": "high", "name": "Spring", "at:created": at,
		}, group)
		for _, index := range []string{w.p.Groups(), w.p.GroupsOf("acme"), w.p.Open()} {
			require.Equal(w, float64(number(at)), w.c.ZScore(w.Context(), index, "g").Val(), index)
		}
		require.Equal(w, []event{{"g", "CREATED", 1}}, w.events())
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("watcher")).Val())

		// A second Create with the same arguments changes nothing and answers CREATED; one with
		// another hash is refused as a conflict.
		w.unchanged(func() {
			status, err := ledger.Create(w.Context(), w.c, w.p, a)
			require.NoError(w, err)
			require.Equal(w, api.StatusCreated, status)
			a.Hash = "other"
			_, err = ledger.Create(w.Context(), w.c, w.p, a)
			require.ErrorIs(w, err, api.ErrConflict)
		})
	})
}

func TestCreateAgainTellsTheStatus(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		w.advance("g")
		w.unchanged(func() {
			status, err := ledger.Create(w.Context(), w.c, w.p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h"})
			require.NoError(w, err)
			require.Equal(w, api.StatusCompleted, status)
		})
	})
}

// event is an event in the outbox.
type event struct {
	group, status string
	round         int64
}

// events returns all events of the outbox in order. It checks that the snapshot in each has the
// event's group, status and round.
func (w *world) events() []event {
	w.Helper()
	var all []event
	for _, m := range w.c.XRange(w.Context(), w.p.Outbox(), "-", "+").Val() {
		text := func(field string) string { return m.Values[field].(string) }
		var flat []string
		require.NoError(w, json.Unmarshal([]byte(text("snapshot")), &flat))
		snapshot := map[string]string{}
		for i := 0; i < len(flat); i += 2 {
			snapshot[flat[i]] = flat[i+1]
		}
		e := event{text("group"), text("status"), number(text("round"))}
		require.Equal(w, e, event{snapshot["id"], snapshot["status"], number(snapshot["round"])})
		require.NotZero(w, number(text("at")))
		all = append(all, e)
	}
	return all
}
