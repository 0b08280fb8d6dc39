// Package keyspace returns the names of all keys and streams. It hides how tenants are divided
// among partitions, and how a hash tag keeps the keys of a partition in one slot of a Redis
// Cluster. It contains only pure functions.
//
// Ids are parts of keys and are not escaped. Callers must have validated them against
// ^[A-Za-z0-9._-]{1,128}$, so that no id contains a brace or a colon.
package keyspace

import (
	"fmt"
	"hash/crc32"
	"strconv"
)

// Names of the consumer groups.
const (
	GroupIngest     = "ingest"
	GroupWorkers    = "workers"
	GroupAggregator = "aggregator"
)

// Space is the keys of one installation: a prefix and a number of partitions.
type Space struct {
	prefix     string
	partitions int
}

// New returns the keys of an installation. prefix must not contain a brace; partitions must be at
// least 1.
func New(prefix string, partitions int) (Space, error) {
	for _, r := range prefix {
		if r == '{' || r == '}' {
			return Space{}, fmt.Errorf("key prefix %q: must not hold a brace, which would change the hash tag", prefix)
		}
	}
	if partitions < 1 {
		return Space{}, fmt.Errorf("partitions %d: must be at least 1", partitions)
	}
	return Space{prefix: prefix, partitions: partitions}, nil
}

// Partitions returns the number of partitions.
func (s Space) Partitions() int { return s.partitions }

// Ingest is the stream to which producers write messages.
func (s Space) Ingest() string { return s.prefix + "ingest" }

// Rejected is the stream of messages that ingest has refused, each with the reason.
func (s Space) Rejected() string { return s.prefix + "ingest:rejected" }

// Events is the stream of events, which any program may read.
func (s Space) Events() string { return s.prefix + "events" }

// PartitionCount is a string: the number of partitions of the stored data.
func (s Space) PartitionCount() string { return s.prefix + "partitions" }

// Workers is a hash: worker process → its status as JSON.
func (s Space) Workers() string { return s.prefix + "workers" }

// Stages is a hash: process of another role → its status as JSON.
func (s Space) Stages() string { return s.prefix + "stages" }

// Idempotency is the first request with an Idempotency-Key; hash is the hash of that key.
func (s Space) Idempotency(hash string) string { return s.prefix + "idempotency:" + hash }

// OfTenant returns the partition of all keys of a tenant.
func (s Space) OfTenant(tenant string) Partition { return s.Partition(s.index(tenant)) }

// OfGroup returns the partition of the key Owner of a group.
func (s Space) OfGroup(group string) Partition { return s.Partition(s.index(group)) }

func (s Space) index(id string) int {
	return int(crc32.ChecksumIEEE([]byte(id)) % uint32(s.partitions))
}

// Partition returns partition i, counted from 0.
func (s Space) Partition(i int) Partition {
	return Partition{index: i, base: s.prefix + "{" + strconv.Itoa(i) + "}:"}
}

// All returns every partition.
func (s Space) All() []Partition {
	all := make([]Partition, s.partitions)
	for i := range all {
		all[i] = s.Partition(i)
	}
	return all
}

// Partition is one shard of tenants. Its keys have the same hash tag.
type Partition struct {
	index int
	base  string
}

// Index returns the partition's number, from 0.
func (p Partition) Index() int { return p.index }

// Base is the beginning of each key of the partition. Scripts get it as their first key: it selects
// the partition's slot, and scripts build the other keys from it.
func (p Partition) Base() string { return p.base }

// Keys returns the keys that a script of the partition declares: the base, and a key that never
// exists. While a slot is being moved, Redis Cluster refuses a command with several keys if one of
// them is missing, so no script runs on half of its data.
func (p Partition) Keys() []string { return []string{p.base, p.base + "-"} }

// Waited is written before the process asks the master which of its writes the replicas have.
func (p Partition) Waited() string { return p.base + "waited" }

// Owner is a string: the tenant of a group. It is in the partition of the group's id.
func (p Partition) Owner(group string) string { return p.base + "owner:" + group }

// Group is a hash: the group's request, state and counts.
func (p Partition) Group(group string) string { return p.base + "group:" + group }

// States is a string: two bytes for each job, its state letter and its attempt mark.
func (p Partition) States(group string) string { return p.base + "states:" + group }

// Queue is a list: the waiting jobs of a group and type, oldest first.
func (p Partition) Queue(group, typ string) string { return p.base + "queue:" + group + ":" + typ }

// Payloads is a hash: ordinal → a payload that is too large for the job's blob.
func (p Partition) Payloads(group string) string { return p.base + "payloads:" + group }

// Results is a list: chunks of result lines, in the order in which they were reduced.
func (p Partition) Results(group string) string { return p.base + "results:" + group }

// Aggregate is a hash: the partial aggregates and their versions.
func (p Partition) Aggregate(group string) string { return p.base + "aggregate:" + group }

// Failures is a hash: ordinal → the error, and the job itself, so that a later round can run it.
func (p Partition) Failures(group string) string { return p.base + "failures:" + group }

// Errors is a hash: ordinal → the latest error of a job that will be retried.
func (p Partition) Errors(group string) string { return p.base + "errors:" + group }

// Codes is a hash: error code → number of failed jobs.
func (p Partition) Codes(group string) string { return p.base + "codes:" + group }

// Fair is a hash: the virtual times of a type's lanes.
func (p Partition) Fair(typ string) string { return p.base + "fair:" + typ }

// FairLane is a sorted set: tenants with waiting jobs of a type and lane, by start tag.
func (p Partition) FairLane(typ, lane string) string { return p.base + "fair:" + typ + ":" + lane }

// FairTenant is a sorted set: a tenant's groups with waiting jobs of a type and lane. The group
// with the least work is first.
func (p Partition) FairTenant(typ, lane, tenant string) string {
	return p.base + "fair:" + typ + ":" + lane + ":" + tenant
}

// RateLimited is a sorted set: rate-limited tenants, by the time (ms) of their next permit.
func (p Partition) RateLimited(typ string) string { return p.base + "rate-limited:" + typ }

// Types is a sorted set: job types, by the time (ms) when a live worker last served them.
func (p Partition) Types() string { return p.base + "types" }

// Load is a hash: the type counters.
func (p Partition) Load(typ string) string { return p.base + "load:" + typ }

// Tenant is a hash: a tenant's counters and its rate limit window.
func (p Partition) Tenant(tenant string) string { return p.base + "tenant:" + tenant }

// Tenants is a sorted set: all tenants that have groups or settings. All scores are 0, so the set
// is ordered by name.
func (p Partition) Tenants() string { return p.base + "tenants" }

// Pauses is a hash: the paused tenants and types, as t:TENANT or y:TYPE. The hash of a group says
// whether that group is paused.
func (p Partition) Pauses() string { return p.base + "pauses" }

// SuspendedOf is a sorted set: a tenant's suspended jobs that were due or ready, by due time (ms).
func (p Partition) SuspendedOf(tenant string) string { return p.base + "suspended:" + tenant }

// Suspended is a set: tenants with jobs in SuspendedOf.
func (p Partition) Suspended() string { return p.base + "suspended" }

// Resuming is a set: tenants whose suspended jobs are being restored.
func (p Partition) Resuming() string { return p.base + "resuming" }

// FairOver is a sorted set: tenants of a lane that have used their own share of a window and may
// borrow, by start tag.
func (p Partition) FairOver(typ, lane string) string { return p.base + "over:" + typ + ":" + lane }

// FairPriority is a sorted set: groups with waiting jobs of a type by priority, with
// FAIR_QUEUE_POLICY=priority.
func (p Partition) FairPriority(typ string) string { return p.base + "priority:" + typ }

// Congestion is a hash: statistics of how long a tenant's jobs have waited, kept for a limited
// time.
func (p Partition) Congestion(tenant string) string { return p.base + "congestion:" + tenant }

// Policy is a string: ALPHA, while the priority formula chooses the next jobs.
func (p Partition) Policy() string { return p.base + "policy" }

// Rebalance is a hash: the process that rebalances the quotas of all partitions, the end of its
// lease, and its fencing number. It is in partition 0.
func (p Partition) Rebalance() string { return p.base + "rebalance" }

// Active is a set: the active tenants.
func (p Partition) Active() string { return p.base + "active" }

// Rate is a hash: the rate limit window of the partition.
func (p Partition) Rate() string { return p.base + "rate" }

// NonReady is a sorted set: tenants by the earliest time (ms) at which one of their
// non-ready jobs is due.
func (p Partition) NonReady() string { return p.base + "non-ready" }

// NonReadyOf is a sorted set: a tenant's non-ready jobs by due time (ms).
func (p Partition) NonReadyOf(tenant string) string { return p.base + "non-ready:" + tenant }

// Scheduled is a sorted set: groups that may not start yet, by their start time (ms).
func (p Partition) Scheduled() string { return p.base + "scheduled" }

// Ready is the ready stream of a type.
func (p Partition) Ready(typ string) string { return p.base + "ready:" + typ }

// ResultStream is the stream of results that are not reduced yet.
func (p Partition) ResultStream() string { return p.base + "results" }

// DeadLetters is the stream of jobs that failed: after their last retry or with a permanent error.
func (p Partition) DeadLetters() string { return p.base + "dead-letters" }

// Dirty is a set: groups that the watcher has to look at, because they may advance.
func (p Partition) Dirty() string { return p.base + "dirty" }

// Outbox is the stream of events that are not published yet.
func (p Partition) Outbox() string { return p.base + "outbox" }

// Messages is a sorted set: ids of messages that were applied, by time (ms).
func (p Partition) Messages() string { return p.base + "messages" }

// Entries is a sorted set: entries of the ingest stream that were applied and may still be pending,
// by their time (ms).
func (p Partition) Entries() string { return p.base + "entries" }

// Groups is a sorted set: every group by its time of creation (ms).
func (p Partition) Groups() string { return p.base + "groups" }

// GroupsOf is a sorted set: a tenant's groups by time of creation (ms).
func (p Partition) GroupsOf(tenant string) string { return p.base + "groups:" + tenant }

// Open is a sorted set: groups that have not ended, by time of creation (ms).
func (p Partition) Open() string { return p.base + "open" }

// Ended is a sorted set: groups that have ended, by the time of their end (ms).
func (p Partition) Ended() string { return p.base + "ended" }

// Watch is a hash: the watcher that leads the partition, the end of its lease, and its fencing
// number.
func (p Partition) Watch() string { return p.base + "watch" }

// Quarantine is a list: entries that can't be read as a job or message, newest first. Its length is
// bounded.
func (p Partition) Quarantine() string { return p.base + "quarantine" }

// Wake is a list that holds a token while there may be work for an idle role.
func (p Partition) Wake(role string) string { return p.base + "wake:" + role }
