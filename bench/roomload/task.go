// Package roomload is the load generator of `bulkaction bench room`: users of a waiting room, each
// with a stream of its own, and the checks of all that they receive. It knows the waiting room by
// its HTTP calls alone, so that it can find faults in it. It hides raw TCP, frames, reconnects and
// how the brokers are told apart.
package roomload

import "time"

// Command is the argument with which this program runs as a process that generates load; see
// [Serve].
const Command = "room-load"

// Task is the load of one process. The parent writes it as JSON to the process's standard input.
// The process gets ready and writes an Answer; then it answers each Step with an Answer.
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
	Session   time.Duration // mean time inside; a user has 0.5 to 1.5 times as much. 0: until the token expires
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

// Step is what the parent asks for. The first step is Begin; the task ends with End.
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

// Answer is what a process answers to its task and to each step.
type Answer struct {
	Error  string `json:",omitempty"`
	Counts Counts
	// Since the step Mark:
	Frames     int64         // of all kinds
	Ages       map[int]int64 `json:",omitempty"` // number of position frames by their age in ms
	Violations []string      `json:",omitempty"` // at most mostViolations
	Wrong      int           // number of violations
	// Only of the step End:
	Visits []Visit   `json:",omitempty"`
	Waits  []float64 `json:",omitempty"` // of Entries: ms from the time at which it was due
}

// Counts are numbers of users at present.
type Counts struct {
	Entered  int64 // users who have had a frame; of Entries: answers
	Open     int64 // streams that are open and have had a frame
	Shown    int64 // of them, streams that have shown a position
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
