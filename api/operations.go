package api

import "time"

// What an operation does, the values of [OperationRequest.Do]. The last two are about dead letters,
// the others about groups.
const (
	OpCancel            = "cancel"
	OpPause             = "pause"
	OpResume            = "resume"
	OpRetry             = "retry"               // the failed jobs of groups that have ended run again; with a code, those with it
	OpRetryDeadLetters  = "retry_dead_letters"  // the jobs of single dead letters run again
	OpDeleteDeadLetters = "delete_dead_letters" // the jobs stay failed, and can be retried with their groups
)

// OperationKinds are the values of [OperationRequest.Do].
var OperationKinds = []string{OpCancel, OpPause, OpResume, OpRetry, OpRetryDeadLetters, OpDeleteDeadLetters}

// OnDeadLetters says whether an operation that does this is about dead letters.
func OnDeadLetters(do string) bool { return do == OpRetryDeadLetters || do == OpDeleteDeadLetters }

// OperationRequest asks for one change of all groups, or dead letters, that a filter matches.
type OperationRequest struct {
	Do     string          `json:"do"`
	Filter OperationFilter `json:"filter"`
	DryRun bool            `json:"dry_run,omitempty"` // only counts
}

// OperationFilter selects groups or dead letters that existed when the operation began. A field that
// is absent matches all.
type OperationFilter struct {
	All    bool   `json:"all,omitempty"` // there is no other field: everything is meant
	Tenant string `json:"tenant,omitempty"`
	Type   string `json:"type,omitempty"`
	// Code matches dead letters with this error code, and groups with a failed job that has it.
	Code string `json:"code,omitempty"`
	// Since and Until bound when the group was created, or when the dead letter's job failed. Until
	// itself is outside.
	Since *time.Time `json:"since,omitempty"`
	Until *time.Time `json:"until,omitempty"`

	Group string `json:"group,omitempty"` // of dead letters

	// These are of groups.
	Status     Status `json:"status,omitempty"`
	Paused     *bool  `json:"paused,omitempty"`
	FailedJobs *bool  `json:"failed_jobs,omitempty"` // whether at least one job has failed
	Prefix     string `json:"prefix,omitempty"`      // the beginning of the id
	Tags       Tags   `json:"tags,omitempty"`        // all of them
}

// OperationState is the state of an operation.
type OperationState string

// The states of an operation. It works in steps of some hundred groups; one that was begun is
// completed also when the operation is paused or cancelled.
const (
	OperationRunning    OperationState = "RUNNING"
	OperationPaused     OperationState = "PAUSED"
	OperationCancelling OperationState = "CANCELLING" // its last step is not complete
	OperationCompleted  OperationState = "COMPLETED"
	OperationCancelled  OperationState = "CANCELLED"
	OperationFailed     OperationState = "FAILED" // it can't be read, and was set aside
)

// Ended says whether the state is final.
func (s OperationState) Ended() bool {
	return s == OperationCompleted || s == OperationCancelled || s == OperationFailed
}

// Why an operation has skipped a group or a dead letter: the values of [OperationSkip.Reason].
const (
	SkipAlready      = "already"        // it is as it was asked to become
	SkipEnded        = "ended"          // the group has ended
	SkipNotEnded     = "not_ended"      // the group has not ended, and only then can be retried
	SkipCancelled    = "cancelled"      // the group was cancelled, and can't be retried
	SkipNoFailedJobs = "no_failed_jobs" // there is nothing to retry
	SkipGone         = "gone"           // it was deleted
	SkipChanged      = "changed"        // it has changed while the operation was about to act
	SkipUnreadable   = "unreadable"     // its data is damaged
)

// Operation is one change of many groups or dead letters. Matched is always the sum of Changed and
// Skipped. With DryRun, Changed counts what would change.
type Operation struct {
	ID      string          `json:"id"`
	Do      string          `json:"do"`
	Filter  OperationFilter `json:"filter"`
	DryRun  bool            `json:"dry_run"`
	State   OperationState  `json:"state"`
	Matched int64           `json:"matched"`
	Changed int64           `json:"changed"`
	Skipped int64           `json:"skipped"`
	Reasons []OperationSkip `json:"reasons"` // of those that were skipped, by reason
	// Examined of about Total groups or dead letters were compared with the filter; Progress, from 0
	// to 1, is this part. Total is 0 if it is not known: for the dead letters of one tenant, which are
	// among those of the others.
	Examined int64   `json:"examined"`
	Total    int64   `json:"total"`
	Progress float64 `json:"progress"`
	// Tenant is that of the API key that has started the operation; it bounds what the operation
	// touches.
	Tenant    string            `json:"tenant,omitempty"`
	CreatedBy string            `json:"created_by,omitempty"` // the API key
	CreatedAt time.Time         `json:"created_at"`
	EndedAt   *time.Time        `json:"ended_at,omitempty"`
	Error     string            `json:"error,omitempty"` // why it was set aside
	Links     map[string]string `json:"links,omitempty"`
}

// OperationSkip counts what an operation has skipped for one reason.
type OperationSkip struct {
	Reason   string   `json:"reason"`
	Count    int64    `json:"count"`
	Examples []string `json:"examples"` // ids of groups or jobs, 5 at most
}

// OperationList is a page of operations, the newest first.
type OperationList struct {
	Operations []Operation `json:"operations"`
	Cursor     string      `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}

// OperationCommand is what can be done to an operation.
type OperationCommand string

// The commands. What an operation has changed stays when it is cancelled.
const (
	PauseOperation  OperationCommand = "pause"
	ResumeOperation OperationCommand = "resume"
	CancelOperation OperationCommand = "cancel"
)

// OperationCommands are all commands.
var OperationCommands = []OperationCommand{PauseOperation, ResumeOperation, CancelOperation}

// Bounds of the operations of an installation.
const (
	MaxOpenOperations   = 100                // that have not ended
	MaxTenantOperations = 10                 // of these, of the keys of one tenant
	MaxEndedOperations  = 1000               // the oldest are deleted
	KeepOperations      = 7 * 24 * time.Hour // ended ones are deleted then
)
