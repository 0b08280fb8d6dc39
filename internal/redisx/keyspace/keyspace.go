// Package keyspace returns the names of all keys and streams. It hides how tenants are divided
// among partitions, and how a hash tag keeps the keys of a partition in one slot of a Redis
// Cluster. It contains only pure functions.
//
// Ids are parts of keys and are not escaped. Callers must have validated them with api.ValidID, so
// that no id contains a brace or a colon; tags with api.ValidTag (see Tagged).
package keyspace

import (
	"fmt"
	"hash/crc32"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
)

// Names of the consumer groups.
const (
	GroupIngest     = "ingest"
	GroupRouter     = "router"
	GroupWorkers    = "workers"
	GroupAggregator = "aggregator"
)

// Space has the functions that name the keys of one installation, which has a key prefix and a
// number of partitions.
type Space struct {
	prefix     string
	partitions int
	layout     *atomic.Int32 // of jobs, that this process writes now; its partitions share it

	RecordKeys
}

// RecordKeys are the keys of the records that cover the whole installation: activity log and
// history.
type RecordKeys struct{ prefix string }

// Activity is a stream: who changed what (package activity).
func (k RecordKeys) Activity() string { return k.prefix + "activity" }

// History is a list: samples of the installation's figures, newest first (history).
func (k RecordKeys) History() string { return k.prefix + "history" }

// PrefixRule says in words which prefixes ValidPrefix accepts.
const PrefixRule = "1 to 64 letters, digits, dots, underscores, dashes or colons"

// ValidPrefix reports whether text may be the prefix of an installation's keys.
func ValidPrefix(text string) bool { return validPrefix.MatchString(text) }

var validPrefix = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,64}$`)

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
	layout := &atomic.Int32{}
	layout.Store(1)
	return Space{prefix: prefix, partitions: partitions, layout: layout, RecordKeys: RecordKeys{prefix}}, nil
}

// Prefix returns the prefix of all keys.
func (s Space) Prefix() string { return s.prefix }

// Partitions returns the number of partitions.
func (s Space) Partitions() int { return s.partitions }

// Ingest is a stream: submissions, which producers write.
func (s Space) Ingest() string { return s.prefix + "ingest" }

// MaxIngestName is how many characters a name of IngestOf has at most.
const MaxIngestName = 64

// FitsIngestOf reports whether an id is a name for IngestOf: it is short, and not "rejected".
func FitsIngestOf(id string) bool { return len(id) <= MaxIngestName && id != "rejected" }

// IngestOf is a further ingest stream: submissions of one tenant, which producers write that may
// not write to Ingest. name is that of the stream, not of the tenant; it must not be "rejected".
// prefix is that of the space.
func IngestOf(prefix, name string) string { return prefix + "ingest:" + name }

// Rejected is a stream: messages of the ingest streams that ingest could not accept, with the
// reason.
func (s Space) Rejected() string { return s.prefix + "ingest:rejected" }

// Events is a stream: the transitions of groups, for any reader. The watcher writes it from the
// outboxes.
func (s Space) Events() string { return s.prefix + "events" }

// PartitionCount is a string: the number of partitions that the data was written with.
func (s Space) PartitionCount() string { return s.prefix + "partitions" }

// Layouts is a hash: jobs and rooms → the number of the layout of this data (package layout).
func (s Space) Layouts() string { return s.prefix + "layout" }

// GuardLayout is a hash: guards → the number of the layout of this prefix's guards.
func GuardLayout(prefix string) string { return prefix + "guard:layout" }

// Layout returns the layout of jobs that this process writes now. It changes while a process runs.
func (s Space) Layout() int { return int(s.layout.Load()) }

// SetLayout sets what Layout returns for all copies of the space and their partitions.
func (s Space) SetLayout(n int) { s.layout.Store(int32(n)) }

// Limits is a hash: the limits that were set while processes run, their revision, and the one that is
// in effect (set_limits, the leader of the limits); and how permits are counted.
func (s Space) Limits() string { return s.prefix + "limits" }

// Workers is a hash: worker process → its status as JSON (heartbeat).
func (s Space) Workers() string { return s.prefix + "workers" }

// Stages is a hash: process of another role → its status as JSON (heartbeat).
func (s Space) Stages() string { return s.prefix + "stages" }

// PoolSize is a string: how many slots an operator wants a worker process to have. It expires
// (package presence).
func (s Space) PoolSize(worker string) string { return s.prefix + "pool-size:" + worker }

// Idempotency is a string: what ingest remembers of the first request with an Idempotency-Key, by
// the hash of that key.
func (s Space) Idempotency(hash string) string { return s.prefix + "idempotency:" + hash }

// AuthKeys is a hash: auth.Hash of a token → the record of its key (package apikey).
func (s Space) AuthKeys() string { return s.prefix + "auth:keys" }

// AuthSession is a string: the record of a login to the console, by the auth.Hash of the session's
// token (package session). It expires.
func AuthSession(prefix, hash string) string { return prefix + "auth:session:" + hash }

// OfTenant returns the partition that holds all keys of a tenant.
func (s Space) OfTenant(tenant string) Partition { return s.Partition(s.index(tenant)) }

// OfGroup returns the partition that holds a group's Owner key. The group's other keys are in the
// partition of its tenant (OfTenant), which may be another one.
func (s Space) OfGroup(group string) Partition { return s.Partition(s.index(group)) }

func (s Space) index(id string) int {
	return int(crc32.ChecksumIEEE([]byte(id)) % uint32(s.partitions))
}

// Partition returns partition i, counted from 0.
func (s Space) Partition(i int) Partition {
	base := s.prefix + "{" + strconv.Itoa(i) + "}:"
	return Partition{
		index: i, base: base, GroupKeys: GroupKeys(base), FairKeys: FairKeys(base), TenantKeys: TenantKeys(base),
		JobKeys: JobKeys(base), WatchKeys: WatchKeys(base), OperationKeys: OperationKeys(base),
		CallbackKeys: CallbackKeys(base), RoomKeys: RoomKeys(base),
	}
}

// All returns every partition.
func (s Space) All() []Partition {
	all := make([]Partition, s.partitions)
	for i := range all {
		all[i] = s.Partition(i)
	}
	return all
}

// Partition is one shard of tenants. Its keys have the same hash tag. The comment of a key names in
// parentheses the scripts that write it. They leave out expire, which deletes all keys of a group;
// repairs are the scripts repair, repair_counter and repair_misplaced.
type Partition struct {
	index int
	base  string

	GroupKeys
	FairKeys
	TenantKeys
	JobKeys
	WatchKeys
	OperationKeys
	CallbackKeys
	RoomKeys
}

// Index returns the number of the partition, counted from 0.
func (p Partition) Index() int { return p.index }

// Base is the prefix of all keys of the partition. It is the first key of a script: it routes the
// script to the partition's slot, and the script builds the other keys from it.
func (p Partition) Base() string { return p.base }

// Keys returns the keys that a script of the partition declares: the base, and a key that never
// exists. While their slot is being moved, Redis Cluster refuses a command that names several keys
// of which one is missing. So no script runs while some of its data is on another node.
func (p Partition) Keys() []string { return []string{p.base, p.base + "-"} }

// GroupKeys are the keys of the groups' data.
type GroupKeys string

// Owner is a string: the tenant that a group belongs to. It is in the partition of the group's id
// (OfGroup). Ingest writes it, and the watcher deletes it some time after the group.
func (k GroupKeys) Owner(group string) string { return string(k) + "owner:" + group }

// Group is a hash: a group's settings, status and counts (all scripts that move its jobs).
func (k GroupKeys) Group(group string) string { return string(k) + "group:" + group }

// States is a string: two bytes for each job, its state letter and attempt mark (append, the
// scripts that move jobs).
func (k GroupKeys) States(group string) string { return string(k) + "states:" + group }

// Queue is a list: the waiting jobs of a group and type, oldest first (append, admit, requeue,
// cancel, repairs).
func (k GroupKeys) Queue(group, typ string) string { return string(k) + "queue:" + group + ":" + typ }

// Cancelled is a list: the waiting jobs of a cancelled group and type until sweep removes them
// (cancel, sweep, expire).
func (k GroupKeys) Cancelled(group, typ string) string {
	return string(k) + "cancelled:" + group + ":" + typ
}

// Payloads is a hash: ordinal → a payload that is too large for the blob (append, outcome, lose,
// sweep).
func (k GroupKeys) Payloads(group string) string { return string(k) + "payloads:" + group }

// Results is a list: batches of result lines (reduce).
func (k GroupKeys) Results(group string) string { return string(k) + "results:" + group }

// Aggregate is a hash: partial aggregates and their versions (reduce, reduce_failures, reopen).
func (k GroupKeys) Aggregate(group string) string { return string(k) + "aggregate:" + group }

// Failures is a hash: ordinal → the error, and the job, so that a later round can run it (outcome,
// reclaim, lose, requeue, repairs).
func (k GroupKeys) Failures(group string) string { return string(k) + "failures:" + group }

// Errors is a hash: ordinal → the last errors of a job that is retried, or was before it failed
// (outcome, reclaim, lose, requeue, sweep).
func (k GroupKeys) Errors(group string) string { return string(k) + "errors:" + group }

// Codes is a hash: error code → number of failed jobs (outcome, reclaim, lose, requeue, repairs).
func (k GroupKeys) Codes(group string) string { return string(k) + "codes:" + group }

// KeyIndex is a hash of a group with unique keys: key of a job → its ordinal (append). The field
// "\x1f" + request id lists the jobs that append refused in this request because their keys were
// taken.
func (k GroupKeys) KeyIndex(group string) string { return string(k) + "keys:" + group }

// FairKeys are the keys of the fair queue and of job types.
type FairKeys string

// Fair is a hash: start tags and virtual times of a type's lanes (admit, retire).
func (k FairKeys) Fair(typ string) string { return string(k) + "fair:" + typ }

// FairLane is a sorted set: tenants with waiting jobs of a type and lane that are neither borrowing
// (see FairOver) nor rate-limited, by start tag (admit, retire, and the scripts that enqueue or
// withdraw groups: append, requeue, schedule, pause, cancel, lose).
func (k FairKeys) FairLane(typ, lane string) string { return string(k) + "fair:" + typ + ":" + lane }

// FairOver is a sorted set: tenants of a lane that have spent their share and may borrow, by start
// tag (admit, and the scripts that withdraw groups).
func (k FairKeys) FairOver(typ, lane string) string { return string(k) + "over:" + typ + ":" + lane }

// FairTenant is a sorted set: a tenant's groups with waiting jobs of a type and lane, except for
// scheduled and paused ones, by age and work left (admit, and the scripts that enqueue or withdraw
// groups).
func (k FairKeys) FairTenant(typ, lane, tenant string) string {
	return string(k) + "fair:" + typ + ":" + lane + ":" + tenant
}

// FairPriority is a sorted set: groups with waiting jobs of a type and lane by priority, the
// highest next, with FAIR_QUEUE_POLICY=priority (policy, admit, retire, the scripts that enqueue or
// withdraw groups, and those that rank them again: outcome, reclaim, setting). admit removes groups
// of rate-limited and paused tenants when it finds them there.
func (k FairKeys) FairPriority(typ, lane string) string {
	return string(k) + "priority:" + typ + ":" + lane
}

// RateLimited is a sorted set: tenants that are rate-limited for a type, by the time (ms) at which
// admit returns them to the fair queue, normally that of their next permit (admit, setting,
// retire).
func (k FairKeys) RateLimited(typ string) string { return string(k) + "rate-limited:" + typ }

// Policy is a string: ALPHA, if the priority formula chooses the next jobs; otherwise it does not
// exist (policy).
func (k FairKeys) Policy() string { return string(k) + "policy" }

// Types is a sorted set: job types, by the time (ms) when a live worker last served them, or of
// their first job (append, requeue, retire, and the watcher).
func (k FairKeys) Types() string { return string(k) + "types" }

// Load is a hash: the counters of a type, and what admit has to know of it (the scripts that move
// jobs, renew, retire, repairs).
func (k FairKeys) Load(typ string) string { return string(k) + "load:" + typ }

// TenantKeys are the keys of tenants and limits.
type TenantKeys string

// Tenant is a hash: a tenant's settings, counters and rate limit (setting, pause, the scripts that
// move jobs, repairs).
func (k TenantKeys) Tenant(tenant string) string { return string(k) + "tenant:" + tenant }

// Tenants is a sorted set: every tenant that has groups or settings or is paused, all with score 0,
// so that they are ordered by name (create, setting, pause, repairs; expire deletes).
func (k TenantKeys) Tenants() string { return string(k) + "tenants" }

// GroupsOf is a sorted set: a tenant's groups by time of creation (ms) (create, repairs).
func (k TenantKeys) GroupsOf(tenant string) string { return string(k) + "groups:" + tenant }

// Tags is a set: the tags of a tenant's groups, as KEY=VALUE (append, repair).
func (k TenantKeys) Tags(tenant string) string { return string(k) + "tags:" + tenant }

// Tagged is a sorted set: a tenant's groups with a tag, by time of creation (ms) (append, repair).
// The tag is one that api.ValidTag accepts: it may have braces and colons, but they are behind the
// hash tag, and neither the tenant nor the tag's key has a colon.
func (k TenantKeys) Tagged(tenant, tag string) string {
	return string(k) + "tagged:" + tenant + ":" + tag
}

// Congestion is a hash: statistics of the waits of a tenant's jobs (outcome, admit). It expires;
// advance and sweep delete it when the tenant has no unfinished jobs.
func (k TenantKeys) Congestion(tenant string) string { return string(k) + "congestion:" + tenant }

// Active is a set: active tenants (append, admit, promote and others that change what wants a
// permit, repairs).
func (k TenantKeys) Active() string { return string(k) + "active" }

// Top is a string: the active tenants with the most unfinished jobs, as the watcher has found them
// last, as JSON (the watcher).
func (k TenantKeys) Top() string { return string(k) + "top" }

// TopHistory is a list: figures of the busiest tenants at earlier times, the newest first (the watcher).
func (k TenantKeys) TopHistory() string { return string(k) + "top-history" }

// Rate is a hash: the limit of all tenants, and the quota of the partition (admit, promote, quota,
// policy, pause, and the scripts that write Active).
func (k TenantKeys) Rate() string { return string(k) + "rate" }

// RateOf is a hash: the rate of a type in the partition (quota, admit, promote).
func (k TenantKeys) RateOf(typ string) string { return string(k) + "rate:" + typ }

// Rebalance is a hash: the process that rebalances the quotas of all partitions, the end of its
// lease, and its fencing number (lead). It is in partition 0.
func (k TenantKeys) Rebalance() string { return string(k) + "rebalance" }

// Pauses is a hash: paused tenants and types, as t:TENANT or y:TYPE (pause). A tenant's pause is
// also in the tenant's hash; a group's pause is in the group's hash only.
func (k TenantKeys) Pauses() string { return string(k) + "pauses" }

// JobKeys are the keys of jobs outside of the fair queue.
type JobKeys string

// NonReady is a sorted set: tenants with non-ready jobs, by the time (ms) when promote looks at
// them next: when their first such job is due, or later if promote could not promote it. A paused
// tenant gets a time that is never reached (the scripts of NonReadyOf, pause, lose).
func (k JobKeys) NonReady() string { return string(k) + "non-ready" }

// NonReadyOf is a sorted set: the moving blobs of a tenant's non-ready jobs, by due time (ms)
// (append, admit, outcome, reclaim, promote, sweep, repairs).
func (k JobKeys) NonReadyOf(tenant string) string { return string(k) + "non-ready:" + tenant }

// Suspended is a set: tenants with jobs in SuspendedOf (promote, start, sweep).
func (k JobKeys) Suspended() string { return string(k) + "suspended" }

// SuspendedOf is a sorted set: a tenant's suspended jobs that were due or ready, by the time (ms)
// of their suspension. A job that another pause keeps suspended gets a time behind the resumption,
// so that promote does not read it twice (promote, start, sweep, repairs).
func (k JobKeys) SuspendedOf(tenant string) string { return string(k) + "suspended:" + tenant }

// Resuming is a set: tenants whose suspended jobs promote makes non-ready again (pause, promote,
// sweep).
func (k JobKeys) Resuming() string { return string(k) + "resuming" }

// Scheduled is a sorted set: groups that may not start yet, by their run_at (ms) (append, schedule,
// cancel).
func (k JobKeys) Scheduled() string { return string(k) + "scheduled" }

// Ready is a stream: the ready jobs of a type, and those in flight (admit, promote, outcome, start,
// reclaim, renew, retire, repairs).
func (k JobKeys) Ready(typ string) string { return string(k) + "ready:" + typ }

// ResultStream is a stream: results that are not reduced yet (outcome, reduce, repairs).
func (k JobKeys) ResultStream() string { return string(k) + "results" }

// DeadLetters is a stream: failed jobs (outcome, reclaim, lose, requeue).
func (k JobKeys) DeadLetters() string { return string(k) + "dead-letters" }

// Quarantine is a list: entries that can't be read as a job or message, and misplaced jobs, the
// newest 1,000, newest first (admit, promote, reclaim, requeue, repairs, and the worker, aggregator
// and watcher).
func (k JobKeys) Quarantine() string { return string(k) + "quarantine" }

// WatchKeys are the keys of lists of groups, request ids, the outbox, the leader and wake tokens.
type WatchKeys string

// Groups is a sorted set: every group by its time of creation (ms) (create, repairs).
func (k WatchKeys) Groups() string { return string(k) + "groups" }

// Open is a sorted set: groups that have not ended, and cancelled ones that sweep has not
// completed, by the time (ms) when they were created or reopened (create, reopen, advance, sweep,
// repairs).
func (k WatchKeys) Open() string { return string(k) + "open" }

// Ended is a sorted set: groups that have ended, by the time (ms) of their end; cancelled ones by
// the time when sweep has completed (advance, sweep, reopen, repairs).
func (k WatchKeys) Ended() string { return string(k) + "ended" }

// Failed is a sorted set: groups whose status is FAILED, by the time (ms) of their end (advance,
// reopen, repairs).
func (k WatchKeys) Failed() string { return string(k) + "failed" }

// Dirty is a set: groups that the watcher has to look at, because they may advance (each script
// that may let a group advance; advance removes the group).
func (k WatchKeys) Dirty() string { return string(k) + "dirty" }

// Outbox is a stream: transitions of groups that are not in the stream events yet (create, advance,
// cancel, reopen). The watcher deletes entries that it has published.
func (k WatchKeys) Outbox() string { return string(k) + "outbox" }

// Messages is a sorted set: ids of requests that were applied, by time (ms) (append).
func (k WatchKeys) Messages() string { return string(k) + "messages" }

// Entries is a sorted set: entries of the ingest stream that were applied and may still be pending,
// by their time (ms) (append).
func (k WatchKeys) Entries() string { return string(k) + "entries" }

// Waited is a string. Ingest writes it before WAIT, so that WAIT has a write to wait for.
func (k WatchKeys) Waited() string { return string(k) + "waited" }

// Watch is a hash: the leader of the partition, the end of its lease, its fencing number, marks for
// the watcher, and the totals of retired types (lead, reclaim, retire, and the watcher).
func (k WatchKeys) Watch() string { return string(k) + "watch" }

// Audit is a string: what the watcher knows of its audits, as JSON: when they were, and the open
// violations (the watcher).
func (k WatchKeys) Audit() string { return string(k) + "audit" }

// Wake is a list, with one token while there may be work for the idle processes of a role (each
// script that adds such work). An idle process takes the token.
func (k WatchKeys) Wake(role string) string { return string(k) + "wake:" + role }

// OperationKeys are the keys of operations on many groups. They are in partition 0.
type OperationKeys string

// Operation is a hash: what an operation does, where it is and what it has counted (enlist, plan,
// count, direct, and the watcher, which deletes it).
func (k OperationKeys) Operation(id string) string { return string(k) + "operation:" + id }

// Operations is a sorted set: operations by the time (ms) of their start (enlist, and the watcher).
func (k OperationKeys) Operations() string { return string(k) + "operations" }

// OpenOperations is a sorted set: those that have not ended (enlist, plan, count, direct).
func (k OperationKeys) OpenOperations() string { return string(k) + "operations:open" }

// CallbackKeys are the keys of callbacks. A queue has the callbacks of one endpoint: it is named like
// the tenant whose endpoint it is, or TENANT|ORIGIN for the URLs of groups.
type CallbackKeys string

// Endpoints is a hash: tenant → its callback endpoint as JSON (set_endpoint).
func (k CallbackKeys) Endpoints() string { return string(k) + "endpoints" }

// Callback is a hash: what is sent, to whom, and how often it was tried (the scripts of callbacks).
func (k CallbackKeys) Callback(id string) string { return string(k) + "callback:" + id }

// Callbacks is a sorted set: queues that are not empty, by the time (ms) at which one of their
// callbacks is due, or later, by when it had its last turn (the scripts of callbacks).
func (k CallbackKeys) Callbacks() string { return string(k) + "callbacks" }

// CallbackQueue is a sorted set: callbacks of a queue by the time (ms) of their next try.
func (k CallbackKeys) CallbackQueue(queue string) string { return string(k) + "callbacks:due:" + queue }

// CallbackAges is a sorted set: the same callbacks by the time (ms) at which they were added.
func (k CallbackKeys) CallbackAges(queue string) string { return string(k) + "callbacks:age:" + queue }

// CallbackBytes is a hash: queue → the bytes of its bodies.
func (k CallbackKeys) CallbackBytes() string { return string(k) + "callbacks:bytes" }

// DeadCallbacks is a sorted set: callbacks that are not tried again, by the time (ms) of their end.
func (k CallbackKeys) DeadCallbacks() string { return string(k) + "callbacks:dead" }

// GuardBase is the prefix of all keys of a guard of package guard. Its braces are the hash tag. The
// kind is pool, breaker, lock, semaphore, limiter or key.
func GuardBase(prefix, kind, name string) string {
	return prefix + "guard:{" + kind + "/" + name + "}:"
}

// GuardPattern returns a pattern for SCAN that matches the hash of each guard of a kind, or of all
// kinds if kind is "".
func GuardPattern(prefix, kind string) string {
	if kind != "" {
		kind += "/"
	}
	return escapePattern(prefix) + "guard:{" + kind + "*}:guard"
}

// escapePattern returns a SCAN pattern that matches the text and nothing else.
func escapePattern(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(text)
}

// Limiter is a hash: the state of one key of a limiter of package guard.
func Limiter(prefix, name, key string) string { return prefix + "limit:{" + name + "/" + key + "}" }

// LimiterPattern returns a pattern for SCAN that matches the hash of each key of a limiter.
func LimiterPattern(prefix, name string) string {
	return escapePattern(prefix) + "limit:{" + name + "/*}"
}

// GuardWake is a channel on which a client of guards hears the ids of its calls that got a grant.
func GuardWake(prefix, client string) string { return prefix + "guard:wake:" + client }

// RoomKeys are the keys of the waiting room (package waitingroom). Their scripts are in lua/room.
type RoomKeys string

// Room is a hash: the settings of an event, its last number, its change number, the state of its
// limiter and its counters (all scripts of the event).
func (k RoomKeys) Room(event string) string { return string(k) + "room:" + event }

// RoomWaiting is a sorted set: the users of an event who are waiting, by number.
func (k RoomKeys) RoomWaiting(event string) string { return k.Room(event) + ":waiting" }

// RoomAway is a sorted set: users who are away, and waiting users who poll, by the time (ms) until
// which their places are kept.
func (k RoomKeys) RoomAway(event string) string { return k.Room(event) + ":away" }

// RoomSlots is a sorted set: the users who hold a slot, by the time (ms) until which they hold it.
func (k RoomKeys) RoomSlots(event string) string { return k.Room(event) + ":slots" }

// RoomUsers is a hash: user → record. lua/room/README.md describes records.
func (k RoomKeys) RoomUsers(event string) string { return k.Room(event) + ":users" }

// Rooms is a sorted set: events by the time (ms) when something is due there.
func (k RoomKeys) Rooms() string { return string(k) + "rooms" }

// RoomCleanup is a hash: when the script expire_users last ran, the end of a hold of places, which
// begins when it did not run for a while, and how often the clock has stepped back.
func (k RoomKeys) RoomCleanup() string { return string(k) + "cleanup" }

// RoomSweep is a string: the broker process that runs the room sweep now, which moves the waiting
// users of dead brokers to away.
func (k RoomKeys) RoomSweep() string { return string(k) + "sweep" }

// Entry is a stream: the messages entry.promoted, which the router hands to the brokers.
func (k RoomKeys) Entry() string { return string(k) + "entry" }

// Moves is a stream: the numbers that have left the queues of events.
func (k RoomKeys) Moves() string { return string(k) + "moves" }

// OfEvent returns the partition that holds all keys of an event.
func (s Space) OfEvent(event string) Partition { return s.Partition(s.index(event)) }

// Dispatch is a stream: messages for the broker process of an instance.
func (s Space) Dispatch(instance string) string { return s.prefix + "dispatch:" + instance }

// Brokers is a hash: the statuses of broker processes, by instance.
func (s Space) Brokers() string { return s.prefix + "brokers" }

// InstanceOf returns the instance of the broker that made a conn, "" for a conn of another form.
func InstanceOf(conn string) string {
	i := strings.LastIndexByte(conn, '.')
	if i < 0 {
		return ""
	}
	return conn[:i]
}
