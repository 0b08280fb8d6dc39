package api

import "time"

// JobMap counts the jobs of a group by state, in ranges of their ordinals (GET
// /v1/groups/{id}/map).
type JobMap struct {
	Jobs    int64       `json:"jobs"` // the group's jobs
	Buckets []MapBucket `json:"buckets"`
}

// MapBucket counts the jobs of a range of ordinals by their state.
type MapBucket struct {
	From      int64 `json:"from"` // the first ordinal
	To        int64 `json:"to"`   // the last ordinal
	Waiting   int64 `json:"w"`
	NonReady  int64 `json:"n"`
	Ready     int64 `json:"r"`
	InFlight  int64 `json:"i"`
	Done      int64 `json:"d"`
	Failed    int64 `json:"f"`
	Cancelled int64 `json:"c"`
}

// FailureSummary counts the failed jobs of a group by error code, and by what their errors have in
// common (GET /v1/groups/{id}/failures/summary).
type FailureSummary struct {
	Total int64         `json:"total"` // failed jobs
	Seen  int64         `json:"seen"`  // how many of them were read, 5,000 at most
	Codes []FailureCode `json:"codes"` // the 100 most frequent, the most frequent first
}

// FailureCode counts the failed jobs with one error code. For an API key that may not see errors,
// Fingerprints is empty.
type FailureCode struct {
	Code         string               `json:"code"`
	Count        int64                `json:"count"`
	Fingerprints []FailureFingerprint `json:"fingerprints"` // the 20 most frequent, the most frequent first
}

// FailureFingerprint counts the failed jobs whose errors differ only in variable parts, such as
// digits, UUIDs and names of hosts.
type FailureFingerprint struct {
	Text string `json:"text"` // the error with these parts replaced
	// Count is the number of such jobs; an estimate if not all failed jobs were read.
	Count   int64           `json:"count"`
	Sampled int64           `json:"sampled"` // how many such jobs were read
	Samples []FailureSample `json:"samples"` // 5 at most
}

// FailureSample is one of the failed jobs with a fingerprint. Of an error of more than 500 bytes it
// has the beginning.
type FailureSample struct {
	Ordinal int64     `json:"ordinal"`
	At      time.Time `json:"at"`
	Error   string    `json:"error"`
}
