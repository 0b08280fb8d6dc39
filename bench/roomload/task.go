// Package roomload is the load generator of `bulkaction bench room`. It simulates users of a
// waiting room, each with a stream of its own or with one POST, and checks all that they receive.
// It uses only the HTTP calls of the waiting room and none of its code, so that it can find faults
// there. It hides raw TCP, frames, reconnects and how brokers are chosen.
package roomload

import "time"

// Command is the first argument with which the program bulkaction runs as a process that generates
// load; see [Serve].
const Command = "room-load"

// Task is the load that one process generates. The parent writes it as JSON to the process's
// standard input. The process writes an Answer when it is ready, and another Answer to each Step.
type Task struct {
	Kind      string   // Streams or Entries
	Brokers   []string // host:port; users are spread over them in turn
	Header    string   // that carries the user's id
	Keys      string   // URL of the brokers' public keys
	Issuer    string   // of tokens
	API       string   // URL of the API at which sessions are completed; "": users leave at a broker
	Events    []string // users are spread over them in turn
	Prefix    string   // of the ids of users
	First     int      // number of the first user
	Users     int      // for Entries: the most
	Seed      uint64   // of all random choices
	Seconds   float64  // of Entries
	PerSecond float64  // entries a second; 0: as fast as the brokers answer, Parallel at a time
	Parallel  int
	Session   time.Duration // mean time inside; a user has 0.5 to 1.5 times it. 0: to task's end
	KeepOpen  bool          // users keep their stream while they are inside
	Churn     float64       // part of the users who reload the page once
	Close     float64       // part of the users who close the tab for good
	Within    time.Duration // reloads and closes happen in this time after the step Act
}

// Kinds of tasks.
const (
	Streams = "streams" // each user opens a stream
	Entries = "entries" // users enter by POST, over Parallel connections
)

// Step is a command of the parent to a process with a Task. The first one is Begin; End ends the
// task.
type Step struct {
	Do string
}

// Steps.
const (
	Begin = "begin" // users begin to enter
	Mark  = "mark"  // ages and frames are counted from now on
	Act   = "act"   // users begin to reload and to close their tabs
	Look  = "look"  // nothing: the parent wants the answer
	End   = "end"   // users close their streams; the answer has the visits
)

// Answer is what a process writes as JSON after its task and after each step.
type Answer struct {
	Error  string `json:",omitempty"`
	Counts Counts
	// Frames (of all kinds) and Ages count from the last step Mark on, if there was one; all else
	// from Begin on.
	Frames     int64
	Ages       map[int]int64 `json:",omitempty"` // position frames by age (ms); only of step End
	Violations []string      `json:",omitempty"` // at most mostViolations
	Wrong      int           // number of all violations
	// Only of the step End:
	Visits []Visit   `json:",omitempty"`
	Waits  []float64 `json:",omitempty"` // of Entries: ms from the time at which it was due
}

// Counts are numbers of users so far, and of streams at present (Open and Shown).
type Counts struct {
	Entered  int64 // users who have had a frame; of Entries: answers
	Open     int64 // streams that are open and have had a frame
	Shown    int64 // of them, streams that have shown a position or the token
	Admitted int64 // users who have had a token
	Ended    int64 // users who do nothing any more
}

// Add adds the answer of another process with the same task.
func (a *Answer) Add(b Answer) {
	a.Counts.Entered += b.Counts.Entered
	a.Counts.Open += b.Counts.Open
	a.Counts.Shown += b.Counts.Shown
	a.Counts.Admitted += b.Counts.Admitted
	a.Counts.Ended += b.Counts.Ended
	a.Frames += b.Frames
	if a.Ages == nil {
		a.Ages = map[int]int64{}
	}
	for ms, n := range b.Ages {
		a.Ages[ms] += n
	}
	a.Violations, a.Wrong = append(a.Violations, b.Violations...), a.Wrong+b.Wrong
	a.Visits, a.Waits = append(a.Visits, b.Visits...), append(a.Waits, b.Waits...)
}
