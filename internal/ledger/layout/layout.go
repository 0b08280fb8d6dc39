// Package layout names the fields of the hashes that hold groups, tenants, types and limits. Only
// package ledger, which owns this layout, the audit, which recounts for itself, and package tamper
// of the testkit import it; a linter rule holds that. Scripts in package lua use the same names: a
// test finds no field in Redis that the tables below do not list.
package layout

// Group is the hash group:GROUP: what was asked for, the status and the counts.
//
//	field              unit  written by           meaning
//	id                       create               the group's own id
//	tenant                   create               the tenant that the group belongs to
//	type                     create               the type of jobs that name none
//	hash                     create               digest of the submission, by which a repetition
//	                                              is recognized
//	name                     create               what the producer calls the group
//	lane                     create               high, normal or low
//	base_priority            create               the group's part of its priority, with
//	                                              FAIR_QUEUE_POLICY=priority
//	max_retries              create               most retries of a job; absent: the worker's
//	                                              default
//	job_timeout        ms    create               how long a job may run; absent: the worker's
//	                                              default
//	run_at             ms    create               no job starts before; absent: at once
//	failure_threshold        create               share of failed jobs from which on the group is
//	                                              FAILED; absent: 1
//	aggregate                create               the aggregates that were asked for, as JSON;
//	                                              absent: none
//	total              jobs  create, seal         announced number of jobs; absent: none was
//	                                              announced
//	status                   create, advance,     CREATED … COMPLETED, FAILED or CANCELLED
//	                         cancel, reopen
//	round                    create, reopen       number of the present round, from 1
//	at:STATUS          ms    create, advance,     when the group entered a status of this round,
//	                         cancel, reopen       in lower case
//	started            ms    start                when the round's first job started; absent: none
//	                                              has
//	sealed             1     append, seal, cancel no more jobs come; absent: some may
//	submitted          1     append               the submission's last piece is stored
//	pieces                   append               how many pieces of the submission are stored
//	types                    append               the types of its jobs, divided by bars
//	paused             1     pause                no job starts; absent: jobs may
//	accepted           jobs  append               all jobs
//	waiting            jobs  the transitions      jobs in this state, as are the next six; their
//	                                              sum is accepted
//	non_ready          jobs  the transitions
//	ready              jobs  the transitions
//	in_flight          jobs  the transitions
//	done               jobs  the transitions
//	failed             jobs  the transitions
//	cancelled          jobs  the transitions
//	reduced            jobs  reduce               the part of done that is reduced
//	throttles                admit                times that a job became non-ready for want of a
//	                                              permit
//	retries                  outcome              times that a job was retried
//	sweep                    cancel, sweep        ordinal from which on a cancelled group is to be
//	                                              settled; absent: it is
//	sweep_non_ready          sweep                cursor of its settling among the tenant's
//	                                              non-ready jobs
//	requeue                  reopen, requeue      cursor of the requeueing of failed jobs; absent:
//	                                              it is complete
//	reopened                 reopen               id of the request that opened the round
//	results_expired    1     expire               the results are past their retention
//	repaired                 repair               version of the counts: how often they were
//	                                              repaired
const (
	GroupID               = "id"
	GroupTenant           = "tenant"
	GroupType             = "type"
	GroupName             = "name"
	GroupLane             = "lane"
	GroupBasePriority     = "base_priority"
	GroupMaxRetries       = "max_retries"
	GroupJobTimeout       = "job_timeout"
	GroupRunAt            = "run_at"
	GroupFailureThreshold = "failure_threshold"
	GroupAggregate        = "aggregate"
	GroupTotal            = "total"
	GroupStatus           = "status"
	GroupRound            = "round"
	GroupAt               = "at:" // a prefix
	GroupStarted          = "started"
	GroupSealed           = "sealed"
	GroupSubmitted        = "submitted"
	GroupTypes            = "types"
	GroupPaused           = "paused"
	GroupAccepted         = "accepted"
	GroupWaiting          = "waiting"
	GroupNonReady         = "non_ready"
	GroupReady            = "ready"
	GroupInFlight         = "in_flight"
	GroupDone             = "done"
	GroupFailed           = "failed"
	GroupCancelled        = "cancelled"
	GroupReduced          = "reduced"
	GroupThrottles        = "throttles"
	GroupRetries          = "retries"
	GroupSweep            = "sweep"
	GroupRequeue          = "requeue"
	GroupResultsExpired   = "results_expired"
	GroupRepaired         = "repaired"
)

// TypesSeparator divides the types of a group.
const TypesSeparator = "|"

// Aggregate is the hash aggregate:GROUP: the partial aggregates.
//
//	field              unit  written by           meaning
//	partial:PARTIAL          reduce               the partial aggregate, encoded by its reducers
//	version:PARTIAL          reduce               how often it was written
const (
	AggregatePartial = "partial:" // a prefix
	AggregateVersion = "version:" // a prefix
)

// Other hashes of a group have the ordinal of a job or an error code for a field:
//
//	key              field     written by             value
//	payloads:GROUP   ordinal   append                 the payload, where it is large
//	failures:GROUP   ordinal   outcome, reclaim,      the error as JSON, a newline, the job's
//	                           lose                   moving blob
//	errors:GROUP     ordinal   outcome, reclaim       the latest error of a job that is to be
//	                                                  retried, as JSON
//	codes:GROUP      code      outcome, reclaim,      how many jobs have failed with this code
//	                           lose, requeue
const (
	RecordSeparator = "\n" // between the two parts of a record of failures:GROUP
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
//	paused             1     pause                none of its jobs starts; absent: jobs may
//	unfinished         jobs  append and the       jobs that have not ended
//	                         outcomes
//	active             jobs  append, admit,       jobs that want a permit
//	                         promote …
//	congested          jobs  outcome, admit,      non-ready jobs that came back, or that are the
//	                         promote …            marker
//	marker                   admit, promote       type of its marker; absent: it has none
//	look                     promote              where promote continues among its due jobs
//	w, n, s, t               admit, promote       the state of its limiter, as in the hash rate
//	rs, rd             ms    admit                since when, and when last, it was denied a
//	                                              permit
//	est:TYPE           ms    outcome              how long one of its jobs of a type takes
//	owe:TYPE           ms    outcome, admit       run time of ended jobs that its start tag was
//	                                              not charged for yet; may be negative
//	tag:TYPE:LANE            admit and others     its start tag when it left a lane, behind the
//	                                              type's generation
//	ended              jobs  outcome              how many jobs have ended, ever
//	pace                     outcome              two marks of time (ms) and ended, for its
//	                                              present speed
const (
	TenantPaused     = "paused"
	TenantUnfinished = "unfinished"
	TenantActive     = "active"
	TenantCongested  = "congested"
)

// Load is the hash load:TYPE: the counters of a type.
//
//	field              unit  written by           meaning
//	waiting            jobs  the transitions      the type's waiting jobs
//	non_ready          jobs  the transitions      the type's non-ready jobs
//	stale                    outcome              stale outcomes
//	lost                     renew                leases that were found lost
//	full                     admit                when the ready stream is refilled: most
//	                                              undelivered, most entries, since (ms)
//	due                      promote              when (ms) due jobs last found the ready stream
//	                                              full, and how many
//	yield              1     admit, promote       if the ready stream has free capacity for one
//	                                              job only, the next one is for a due job
//	est                ms    outcome              how long a job of the type takes
//	quick, quick_at    ms    outcome              run time of the quickest tenant's jobs, and when
//	                                              that was
const (
	LoadWaiting  = "waiting"
	LoadNonReady = "non_ready"
	LoadStale    = "stale"
	LoadLost     = "lost"
)

// Rate is the hash rate: the limit of all tenants, the partition's quota, and partition-wide marks.
//
//	field              unit  written by           meaning
//	w, n               ms    admit, promote       limiter fixed: the window and the permits that
//	                                              were spent in it
//	s, n               µs    admit, promote       limiter sliding: a log of spent permits and
//	                                              their sum
//	t                  µs    admit, promote       limiter token: the theoretical arrival time
//	xw                       activate …           what active tenants weigh beyond 1, in
//	                                              thousandths
//	rs, rd             ms    admit                since when, and when last, a tenant was denied a
//	                                              permit
//	q, q2, qf, qt, qx        quota                effective quota, the next one, from when (µs),
//	                                              of which limit, and the fencing number
//	ranked                   policy               the ALPHA by which groups are ranked; ? while
//	                                              they are being ranked
//	resumed            ms    pause                when something was resumed last
const (
	RateRanked = "ranked"
)

// Congestion is the hash congestion:TENANT: statistics that expire.
//
//	field              unit  written by           meaning
//	throttles                admit                times that a job became non-ready for want of a
//	                                              permit
//	returns                  outcome              times that a job came back
//	waited, longest    ms    outcome              the sum and the largest of the waits that these
//	                                              were given
//	last               ms    admit, outcome       time of the last event

// Pauses is the hash pauses. Its fields are what is paused: a tenant or a type.
//
//	field              unit  written by           meaning
//	t:TENANT           1     pause                the tenant is paused
//	y:TYPE             1     pause                the type is paused
const (
	PauseOfType = "y:" // a prefix
)

// Fair is the hash fair:TYPE: virtual times of a type's lanes.
//
//	field              unit  written by           meaning
//	v                        admit                virtual time among lanes
//	t:LANE                   admit                a lane's own start tag
//	v:LANE                   admit                virtual time within a lane
//	gen                      admit                the type's generation: tags of an earlier one
//	                                              mean nothing

// Watch is the hash watch: the leader of the partition. The hash rebalance has the same fields for
// the quota rebalancer.
//
//	field              unit  written by           meaning
//	owner                    lead                 the process
//	until              ms    lead                 the end of its lease
//	fence                    lead                 its fencing number
//	renewals                 the watcher          how often the lead was renewed, by whichever
//	                                              process
//	suspicious               reclaim              entries that were found deleted; absent: none
//	                                              since it was last read
const (
	WatchOwner      = "owner"
	WatchRenewals   = "renewals"
	WatchSuspicious = "suspicious"
)
