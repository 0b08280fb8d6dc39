package ledger

import "github.com/bulkaction/bulkaction/internal/redisx/layout"

// Layout is the layout of jobs, groups, tenants and limits, which this file and those of the
// transitions describe. A change that an earlier version can't read raises Newest and adds the steps
// that convert the data; keyspace.Space.Layout says which layout is to be written.
var Layout = layout.Part{Name: layout.Jobs, Oldest: 2, Newest: 3}

// This file names the fields of the hashes that hold groups, tenants, types and limits. Scripts in
// package lua use the same names: a test finds no field in Redis that the tables below do not list.

// Group is the hash group:GROUP: what was asked for, the status and the counts.
//
//	field              unit  written by           meaning
//	id                       append               the group's own id
//	tenant                   append               the tenant that the group belongs to
//	type                     append               the type of jobs that name none
//	hash                     append               digest of the submission, by which a repetition
//	                                              is recognized
//	name                     append               what the producer calls the group; absent: it
//	                                              has no name
//	tags                     append               its tags, sorted, as KEY=VALUE on a line each;
//	                                              absent: it has none
//	lane                     append               high, normal or low
//	base_priority            append               the group's part of its priority, with
//	                                              FAIR_QUEUE_POLICY=priority; absent: 0
//	max_retries              append               most retries of a job; absent: the worker's
//	                                              default
//	job_timeout        ms    append               how long a job may run; absent: the worker's
//	                                              default
//	run_at             ms    append               no job starts before; absent: at once
//	failure_threshold        append               part of the jobs (0 to 1): if as many or more
//	                                              have failed, the group is FAILED; absent: 1
//	aggregate                append               the aggregates that were asked for, as JSON;
//	                                              absent: none
//	total              jobs  append, seal         announced number of jobs; absent: none was
//	                                              announced
//	status                   append, start,       CREATED … COMPLETED, FAILED or CANCELLED
//	                         reduce, advance,
//	                         cancel, reopen
//	round                    append, reopen       number of the present round, from 1
//	at:STATUS          ms    like status          when the group entered a status of this round,
//	                                              in lower case
//	started            ms    start, reopen        when the round's first job started; absent: none
//	                                              has
//	sealed             1     append, seal, cancel no more jobs come; absent: some may
//	submitted          1     append               the submission's last piece is stored
//	pieces                   append               how many pieces of the submission are stored
//	types                    append               the types of its jobs, divided by bars
//	paused             1     pause, reduce,       no job starts; absent: jobs may. reduce, advance
//	                         advance, cancel      and cancel delete it when the group ends
//	accepted           jobs  append               all jobs that the group has got
//	waiting            jobs  the transitions      its jobs in this state. The next six are alike;
//	                                              the sum of the seven is accepted. repair
//	                                              corrects them, accepted and reduced
//	non_ready          jobs  the transitions
//	ready              jobs  the transitions
//	in_flight          jobs  the transitions
//	done               jobs  the transitions
//	failed             jobs  the transitions
//	cancelled          jobs  the transitions
//	reduced            jobs  reduce               the part of done that is reduced
//	throttles                admit                times that one of its jobs became a marker, for
//	                                              want of a permit
//	retries                  outcome              times that one of its jobs was retried, in all
//	                                              rounds
//	callback_url             append               is told of the group's end; absent: the endpoint of
//	                                              the tenant is, if there is one
//	submitted_by             append               id of the API key with which it was submitted;
//	                                              absent: not known
//	unique_keys        1     append               no two jobs have the same key; absent: they may
//	sweep                    cancel, sweep,       of a cancelled group: ordinal of the first job
//	                         repair               that sweep has not looked at; absent: sweep has
//	                                              completed
//	sweep_non_ready          sweep                cursor of sweep among the tenant's non-ready and
//	                                              suspended jobs
//	requeue                  reopen, requeue,     cursor of requeue among the failed jobs of a
//	                         cancel               reopened group; absent: requeue has completed
//	reopened                 reopen               id of the request that opened the round
//	retry                    reopen               which failed jobs the round runs, as JSON;
//	                                              absent: all
//	reduce_failures    1     append               an aggregate covers failed jobs; absent: none
//	failures_reduced   jobs  reduce_failures,     how many failed jobs are in that aggregate;
//	                         reopen               reopen deletes it
//	results_expired    1     expire               the result lines were deleted, past their
//	                                              retention
//	repaired                 repair               version of the counts: how often they were
//	                                              repaired
const (
	groupID               = "id"
	groupTenant           = "tenant"
	groupType             = "type"
	groupName             = "name"
	groupTags             = "tags"
	groupLane             = "lane"
	groupBasePriority     = "base_priority"
	groupMaxRetries       = "max_retries"
	groupJobTimeout       = "job_timeout"
	groupRunAt            = "run_at"
	groupFailureThreshold = "failure_threshold"
	groupAggregate        = "aggregate"
	groupTotal            = "total"
	groupStatus           = "status"
	groupRound            = "round"
	groupAt               = "at:" // a prefix
	groupStarted          = "started"
	groupSealed           = "sealed"
	groupSubmitted        = "submitted"
	groupTypes            = "types"
	groupPaused           = "paused"
	groupAccepted         = "accepted"
	groupWaiting          = "waiting"
	groupNonReady         = "non_ready"
	groupReady            = "ready"
	groupInFlight         = "in_flight"
	groupDone             = "done"
	groupFailed           = "failed"
	groupCancelled        = "cancelled"
	groupReduced          = "reduced"
	groupThrottles        = "throttles"
	groupRetries          = "retries"
	groupSweep            = "sweep"
	groupRequeue          = "requeue"
	groupReopened         = "reopened"
	groupReduceFailures   = "reduce_failures"
	groupFailuresReduced  = "failures_reduced"
	groupResultsExpired   = "results_expired"
	groupRepaired         = "repaired"
	groupUniqueKeys       = "unique_keys"
	groupCallbackURL      = "callback_url"
	groupSubmittedBy      = "submitted_by"
)

// These divide the types, and the tags, of a group.
const (
	typesSeparator = "|"
	tagsSeparator  = "\n"
)

// Aggregate is the hash aggregate:GROUP: the partial aggregates.
//
//	field              unit  written by           meaning
//	partial:PARTIAL          reduce               the partial aggregate, encoded by its reducers
//	version:PARTIAL    µs    reduce               when it was written
//	partial:failed           reduce_failures      the partial aggregate of the failed jobs
//
// PARTIAL is a number below partials.
const (
	aggregatePartial = "partial:" // a prefix
	aggregateVersion = "version:" // a prefix
	aggregateFailed  = aggregatePartial + "failed"
	partials         = 16
)

// Other hashes of a group have the ordinal of a job or an error code for a field:
//
//	key              field     written by             value
//	payloads:GROUP   ordinal   append                 the payload, where it is large
//	failures:GROUP   ordinal   outcome, reclaim,      the error as JSON, a newline, the job's
//	                           lose                   moving blob
//	errors:GROUP     ordinal   outcome, reclaim       the last errors with which attempts of this
//	                                                  round have ended and the job has gone on:
//	                                                  lines of JSON, the newest first. A done job
//	                                                  has none
//	keys:GROUP       key       append                 with unique_keys: the ordinal of the job
//	                                                  with the key; the jobs that a request has
//	                                                  left out, in the field ^_REQUEST (byte 31)
//	codes:GROUP      code      outcome, reclaim,      how many failed jobs have this code
//	                           lose, requeue,
//	                           repair
const (
	recordSeparator = "\n" // between the parts of a record of failures:GROUP or errors:GROUP
)

// Tenant is the hash tenant:TENANT: settings, counters, and the state of the fair queue and
// limiter.
//
//	field              unit  written by           meaning
//	rps                1/s   setting              a limit of its own; absent: it shares the common
//	                                              one
//	weight                   setting              its weight among tenants; absent: 1
//	base_priority            setting              its part of the priority, with
//	                                              FAIR_QUEUE_POLICY=priority
//	paused             1     pause                none of its jobs starts; absent: jobs may. pause
//	                                              also writes t:TENANT in the hash pauses
//	unfinished         jobs  append and the       its jobs that have not ended, in all groups
//	                         scripts that end or
//	                         requeue jobs
//	active             jobs  append, admit,       its jobs that want a permit: waiting ones of
//	                         promote …            groups that are not scheduled or paused, and
//	                                              markers. The set active names the tenants that
//	                                              have such jobs and are not paused
//	congested          jobs  outcome, admit,      its non-ready jobs without the scheduled, the
//	                         promote …            suspended and the deferred ones: they were
//	                                              retried, throttled, released or reclaimed, or
//	                                              are the marker
//	marker                   admit, promote,      type of its marker, '' after a resumption;
//	                         sweep, lose          absent: it has none
//	in_flight          jobs  setting              most entries of its jobs in ready streams; absent:
//	                                              no bound
//	places             jobs  admit, promote,      with a bound: how many entries they have
//	                         outcome …
//	held                     admit, promote       where the tenant is at its bound: types, * for its
//	                                              due jobs; absent: nowhere
//	look                     promote              number of its due jobs that the next promote
//	                                              skips; absent: none
//	w, n, s, t               admit, promote       the state of its limiter, as in the hash rate
//	rs, rd             ms    admit                since when, and when last, it was denied a
//	                                              permit of its own limit or share
//	est:TYPE           ms    outcome              mean run time of its jobs of a type
//	owe:TYPE           ms    outcome, admit       run time of ended jobs that its start tag was
//	                                              not charged for yet; may be negative
//	tag:TYPE:LANE            admit and others     its start tag when it left a lane, behind the
//	                                              type's generation and a space
//	ended              jobs  outcome              how many of its jobs were reported done or
//	                                              failed, ever
//	pace                     outcome              two marks of time (ms) and ended, for its
//	                                              present speed
const (
	tenantRPS          = "rps"
	tenantWeight       = "weight"
	tenantBasePriority = "base_priority"
	tenantInFlight     = "in_flight"
	tenantPaused       = "paused"
	tenantUnfinished   = "unfinished"
	tenantActive       = "active"
	tenantCongested    = "congested"
)

// Load is the hash load:TYPE: the counters of a type. They begin at 0 again after retire has
// deleted the type.
//
//	field              unit  written by           meaning
//	waiting            jobs  the transitions      the type's waiting jobs
//	non_ready          jobs  the transitions      the type's non-ready jobs, suspended ones too
//	accepted           jobs  append               jobs that were accepted. This and the next five
//	                                              only grow
//	started                  start                times that a job was started
//	done               jobs  outcome              jobs that were done
//	failed             jobs  outcome, reclaim,    times that a job failed
//	                         lose
//	retried                  outcome              times that a job was retried
//	throttled                admit                times that a job became a marker, for want of a
//	                                              permit
//	stale                    outcome              stale outcomes of jobs whose group is neither
//	                                              cancelled nor deleted
//	lost                     renew                lost leases that the worker did not know of
//	full                     admit, start,        UNDELIVERED ENTRIES SINCE: the ready stream is
//	                         outcome, reclaim     full since then (ms), until it has no more
//	                                              undelivered and no more entries than these;
//	                                              absent: it is not full
//	due                      promote              when (ms) due jobs last found the ready stream
//	                                              full, and how many
//	yield              1     admit, promote       if the ready stream has free capacity for one
//	                                              job only, the next one is for a due job
//	est                ms    outcome              mean run time of the type's jobs
//	quick, quick_at    ms    outcome              mean run time of the jobs of the tenant with the
//	                                              quickest ones, and when that was
const (
	loadAccepted  = "accepted"
	loadStarted   = "started"
	loadDone      = "done"
	loadFailed    = "failed"
	loadRetried   = "retried"
	loadThrottled = "throttled"

	loadWaiting  = "waiting"
	loadNonReady = "non_ready"
	loadStale    = "stale"
	loadLost     = "lost"
	loadMeanRun  = "est"
)

// Rate is the hash rate: the limit of all tenants, the partition's quota, and partition-wide marks.
//
//	field              unit  written by           meaning
//	w, n               ms    admit, promote       limiter fixed: the window and the permits that
//	                                              were spent in it
//	s, n               µs    admit, promote       limiter sliding: a log of spent permits and
//	                                              their sum
//	t                  µs    admit, promote,      limiter token: the theoretical arrival time
//	                         quota
//	xw                       append, admit,       the sum of (weight − 1) over the active tenants,
//	                         promote …            in thousandths
//	rs, rd             ms    admit                since when, and when last, a tenant was denied a
//	                                              permit of the global limit
//	total          permits   quota                the limit of all partitions, in a window; 0: none;
//	                                              absent: the partition knows no limits
//	q, q2, qf                quota                effective quota, the next one, and from when (µs)
//	share                    quota                policy for unused shares: static or elastic
//	rev                      quota                revision of the limits that were set
//	types                    quota                the types with limits of their own, divided by bars
//	type:TYPE                quota                whether a type has a rate (0 or 1), and its places
//	                                              in this partition (-: no bound)
//	places:TYPE              quota                the places of all partitions
//	idle, idle_xw            quota                number of active tenants whose jobs all are held up
//	                                              by limits of their types, and their part of xw
//	qx, qs                   quota                fencing number and number of the last call
//	qt                       quota                name of the limit, for processes of layout 2
//	ranked                   policy               the ALPHA by which groups are ranked; '' or
//	                                              absent: the fair queue; ?: policy has not
//	                                              completed
//	resumed            ms    pause                when something was resumed last
const (
	rateRanked = "ranked"
)

// TypeRate is the hash rate:TYPE: the rate of a type. Its fields w, n, s, t, rs, rd, total, q, q2 and qf
// are as in the hash rate.

// Congestion is the hash congestion:TENANT: statistics that expire.
//
//	field              unit  written by           meaning
//	throttles                admit                times that one of the tenant's jobs became a
//	                                              marker, for want of a permit
//	returns                  outcome              times that one of its jobs was retried or
//	                                              throttled
//	waited, longest    ms    outcome              the sum and the largest of the waits that these
//	                                              retries and throttles set
//	last               ms    admit, outcome       time of the last of these events

// Pauses is the hash pauses. Its fields are what is paused: a tenant or a type. A tenant's pause is
// also the field paused of its hash, which admit and promote read; start and why read this hash.
// The script pause writes both. A group's pause is in its own hash only.
//
//	field              unit  written by           meaning
//	t:TENANT           1     pause                the tenant is paused
//	y:TYPE             1     pause                the type is paused
const (
	pauseOfType   = "y:" // a prefix
	pauseOfTenant = "t:" // likewise
)

// Fair is the hash fair:TYPE: virtual times of a type's lanes.
//
//	field              unit  written by           meaning
//	v                        admit                virtual time among lanes
//	t:LANE                   admit                a lane's own start tag
//	v:LANE                   admit                virtual time within a lane
//	gen                      admit                the type's generation: tags of an earlier one
//	                                              mean nothing

// Watch is the hash watch: the leader of the partition, and counters. The hash rebalance has the
// fields owner, until and fence for the quota rebalancer.
//
//	field              unit  written by           meaning
//	owner                    lead                 the process that is the leader, or was last
//	until              ms    lead                 the end of its lease
//	fence                    lead                 its fencing number
//	renewals                 the watcher          how often the lease was renewed, by whichever
//	                                              process
//	accepted, started        retire               what retired types had counted in these fields
//	                                              of load:TYPE, as in the next two lines
//	done, failed, retried    retire
//	throttled                retire
//	suspicious               reclaim, the audit   number of pending entries that another program
//	                         loop                 has deleted from ready streams; absent: none
//	                                              since the audit loop has deleted the field
const (
	watchOwner      = "owner"
	watchUntil      = "until"
	watchRenewals   = "renewals"
	watchSuspicious = "suspicious"
)

// OperationHash is the hash operation:ID: an operation on many groups.
//
//	field              unit  written by           meaning
//	do, filter               enlist               what it does, and with which groups
//	dry_run            1     enlist               it only counts
//	tenant, by               enlist               the API key that has started it, and its tenant
//	created, ended     ms    enlist, plan,        when it began and ended
//	                         count, direct
//	total                    enlist               how many groups it will examine, about
//	state                    enlist, plan,        RUNNING, PAUSED, CANCELLING, COMPLETED, CANCELLED
//	                         count, direct        or FAILED
//	cursor                   plan                 where its next page begins
//	seq                      plan                 the number of the page
//	examined                 plan                 how many were compared with the filter
//	page                     plan                 what it does now, as JSON; count deletes it
//	planned                  plan, count          how many of the page match
//	last               1     plan                 the page is the last one
//	matched                  count                how many match on the pages that are counted: the
//	                                              sum of the next two
//	changed, skipped         count                how many were changed, and skipped
//	skipped:REASON           count                how many were skipped for this reason
//	examples:REASON          count                the ids of some of them
//	error                    direct               why it was set aside
const (
	opDo         = "do"
	opFilter     = "filter"
	opDryRun     = "dry_run"
	opTenant     = "tenant"
	opBy         = "by"
	opCreated    = "created"
	opEnded      = "ended"
	opTotal      = "total"
	opState      = "state"
	opCursor     = "cursor"
	opSeq        = "seq"
	opExamined   = "examined"
	opPage       = "page"
	opLast       = "last"
	opMatched    = "matched"
	opChanged    = "changed"
	opSkipped    = "skipped"
	opSkippedFor = "skipped:"  // a prefix
	opExamples   = "examples:" // likewise
	opError      = "error"
)

// CallbackHash is the hash callback:ID: a callback that is pending or dead. ID is that of the event.
//
//	field              unit  written by           meaning
//	queue                    add_callbacks        the queue that it is in while it is pending
//	tenant, group            add_callbacks        whose group it is, and the group
//	type                     add_callbacks        of the event
//	at                 ms    add_callbacks        when the group entered the status
//	url                      add_callbacks        where it is sent; '': to the tenant's endpoint
//	state                    all of them          pending or dead
//	body                     add_callbacks        what is sent; absent: it is dead, or was: it is made
//	                                              from the group when it is sent
//	size            bytes    add_callbacks        of the body; 0: there is none
//	attempt                  claim_callbacks,     the number of the last attempt; a higher one: it has
//	                         settle_callback,     ended, and nobody may settle it
//	                         redeliver
//	tries                    settle_callback,     how many tries have failed since it was added or
//	                         redeliver            redelivered
//	next               ms    settle_callback,     when it is due, but while it is being sent; absent:
//	                         redeliver            it is dead
//	died               ms    add_callbacks,       when it died; absent: it is pending
//	                         settle_callback
//	error, answer            settle_callback,     why the last try has failed, or why it died, and the
//	                         add_callbacks        beginning of the answer

// Other hashes of callbacks:
//
//	key              field     written by             value
//	endpoints        tenant    set_endpoint           the tenant's endpoint as JSON: see [Endpoint]
//	callbacks:bytes  queue     add_callbacks,         the bytes of the bodies of its callbacks; absent:
//	                           settle_callback,       it is empty
//	                           repair_counter
