package audittest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Whole returns the text by which Summary names a violation of law that is about a group as a
// whole: "LAW GROUP"; "LAW" if group is empty.
func Whole(law, group string) string { return strings.TrimSpace(law + " " + group) }

// Of returns the text "LAW GROUP ORDINAL" of a violation that is about a job.
func Of(law, group string, ordinal int64) string { return fmt.Sprintf("%s %s %d", law, group, ordinal) }

// Summary converts violations to the texts of Whole and Of, sorted and without duplicates.
func Summary(violations []api.Violation) []string {
	var all []string
	for _, v := range violations {
		s := Whole(v.Law, v.Group)
		if v.Ordinal != nil {
			s = Of(v.Law, v.Group, *v.Ordinal)
		}
		all = append(all, s)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func (b *base) All() keyspace.Partition { return b.Part("all") }

// Incr adds n to a field of a hash.
func (d *data) Incr(key, field string, n int64) { d.OK(d.C.HIncrBy(d.Context(), key, field, n).Err()) }

// setState overwrites one byte of a job's state: byte 0 is the state letter, byte 1 the attempt
// mark.
func (d *data) setState(group string, ordinal int64, at int, to byte) {
	d.OK(d.C.SetRange(d.Context(), d.Part(group).States(group), 2*ordinal+int64(at), string(to)).Err())
}

// attemptMark returns the second byte of the state of a job with this attempt.
func attemptMark(attempt int) byte { return byte(33 + attempt%90) }

// Entry returns the entry that holds a job in the ready stream of a type, in the partition of the
// group "all". Without such an entry the test fails.
func (d *data) Entry(typ, group string, ordinal int64) redis.XMessage {
	for _, m := range d.C.XRange(d.Context(), d.All().Ready(typ), "-", "+").Val() {
		j, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		if err == nil && j.Group == group && j.Ordinal == ordinal {
			return m
		}
	}
	require.Fail(d, "no such entry")
	return redis.XMessage{}
}

func (d *data) addEntry(stream string, fields ...any) {
	d.OK(d.C.XAdd(d.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
}

// nonReady finds a job of the group "all" that is non-ready for a retry. It returns the job's
// member in the tenant's sorted set, and its ordinal.
func (d *data) nonReady() (blob string, ordinal int64) {
	for _, blob := range d.C.ZRange(d.Context(), d.All().NonReadyOf("acme"), 0, -1).Val() {
		if j, err := ledger.ParseJob(blob); err == nil && j.Group == "all" && j.Reason == ledger.ReasonError {
			return blob, j.Ordinal
		}
	}
	require.Fail(d, "no job is non-ready")
	return "", 0
}

// AddNonReady adds a member to a tenant's non-ready set.
func (d *data) AddNonReady(p keyspace.Partition, tenant, blob string) {
	d.OK(d.C.ZAdd(d.Context(), p.NonReadyOf(tenant), redis.Z{Score: 1e15, Member: blob}).Err())
}

// Moving returns the moving blob of a job.
func Moving(group, typ string, attempt, ordinal int) string {
	return fmt.Sprintf("%s|%s|%d|0|0|0|0|0|0|1|E|%d|1||{}", group, typ, attempt, ordinal)
}

// chunk returns the lines of the first chunk of a group's list of result lines, and a function that
// overwrites this chunk.
func (d *data) chunk(group string) (lines []string, set func([]string)) {
	key := d.Part(group).Results(group)
	return strings.Split(d.C.LIndex(d.Context(), key, 0).Val(), "\n"), func(lines []string) {
		d.OK(d.C.LSet(d.Context(), key, 0, strings.Join(lines, "\n")).Err())
	}
}

func resultLine(ordinal int64) string { return fmt.Sprintf(`{"ordinal":%d,"data":1}`, ordinal) }
