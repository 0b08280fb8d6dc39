package watcher

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// entries is an installation with the group g, an ingest stream whose entries stand for one job of
// g each, and the maintenance that forgets the ids of entries.
type entries struct {
	*stagetest.World
	maintenance maintenance
}

func newEntries(t *testing.T) *entries {
	w := stagetest.Shared(t)
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"}, groups.Origin{})
	require.NoError(t, err)
	part := &partition{Watcher: New(stagetest.Process(w, "w"), Config{}, w.Store, nil), Partition: w.P}
	return &entries{World: w, maintenance: maintenance{partition: part}}
}

// add adds an entry with this age to the stream, and delivers it to the consumer c.
func (e *entries) add(age time.Duration) (id string) {
	e.T.Helper()
	ctx := e.T.Context()
	id, err := e.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{
		Stream: e.Space.Ingest(), ID: stagetest.EntryID(time.Now().Add(-age)), Values: []string{"x", "y"},
	}).Result()
	require.NoError(e.T, err)
	_ = e.Conn.Cmd.XGroupCreate(ctx, e.Space.Ingest(), keyspace.GroupIngest, "0").Err()
	require.NoError(e.T, e.Conn.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: keyspace.GroupIngest, Consumer: "c", Streams: []string{e.Space.Ingest(), ">"},
	}).Err())
	return id
}

// apply stores the job of an entry, as an ingest process that has the entry does.
func (e *entries) apply(id string) {
	e.T.Helper()
	ctx := context.WithoutCancel(stagetest.Trusted(e.T))
	errs := e.Store.AppendEntries(ctx, "g", []groups.EntryJobs{{Entry: id, Jobs: stagetest.Numbered(1)}})
	require.NoError(e.T, errs[0])
}

func (e *entries) acknowledge(id string) {
	e.T.Helper()
	require.EqualValues(e.T, 1, e.Conn.Cmd.XAck(e.T.Context(), e.Space.Ingest(), keyspace.GroupIngest, id).Val())
	require.EqualValues(e.T, 1, e.Conn.Cmd.XDel(e.T.Context(), e.Space.Ingest(), id).Val())
}

// trim trims the ids twice, with the time `later` in between.
func (e *entries) trim(later time.Duration) {
	e.T.Helper()
	for range 2 {
		_, err := e.maintenance.trimEntryIDs(e.T.Context())
		require.NoError(e.T, err)
		for i := range e.maintenance.oldest {
			e.maintenance.oldest[i].at = e.maintenance.oldest[i].at.Add(-later)
		}
	}
}

// TestTrimsIDsOfEntriesThatCannotBeDeliveredAgain: of four applied entries, the first and the third
// were acknowledged. Only the id of the first is forgotten: an id is kept while its entry or an
// older one is in the stream.
func TestTrimsIDsOfEntriesThatCannotBeDeliveredAgain(t *testing.T) {
	t.Parallel()
	e := newEntries(t)
	var ids []string
	for i := range 4 {
		ids = append(ids, e.add(time.Hour-time.Duration(i)*time.Second))
		e.apply(ids[i])
	}
	e.acknowledge(ids[0])
	e.acknowledge(ids[2])
	e.trim(maxIngestFreeze)
	kept := e.Conn.Cmd.ZRange(t.Context(), e.P.Entries(), 0, -1).Val()
	require.Len(t, kept, 3)
	require.Equal(t, ledger.EntryRequest(ids[1])+"#0", kept[0])
}

// TestKeepsTheIDOfAnEntryThatAFrozenProcessHolds: an entry that is an hour old is applied and
// acknowledged. A frozen process applies it again a minute before maxIngestFreeze has passed. The
// job is stored once.
func TestKeepsTheIDOfAnEntryThatAFrozenProcessHolds(t *testing.T) {
	t.Parallel()
	e := newEntries(t)
	id := e.add(time.Hour)
	e.apply(id)
	e.acknowledge(id)
	e.acknowledge(e.add(time.Minute))
	e.trim(maxIngestFreeze - time.Minute)
	e.apply(id)
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, e.Counts("g"))
}

// TestKeepsTheIDOfAnEntryWithoutAnOwner: the oldest entry was applied and not acknowledged, and its
// consumer is deleted. It is applied again after maxIngestFreeze. The job is stored once.
func TestKeepsTheIDOfAnEntryWithoutAnOwner(t *testing.T) {
	t.Parallel()
	e := newEntries(t)
	ids := []string{e.add(2 * time.Hour), e.add(time.Hour)}
	e.apply(ids[0])
	e.acknowledge(ids[1])
	require.NoError(t, e.Conn.Cmd.XGroupDelConsumer(t.Context(), e.Space.Ingest(), keyspace.GroupIngest, "c").Err())
	e.trim(maxIngestFreeze)
	e.apply(ids[0])
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, e.Counts("g"))
}
