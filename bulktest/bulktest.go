// Package bulktest tests processors, reducers and producers without a server, and without waiting.
//
//   - [Attempt] runs one attempt of a job and says what a worker decides after it.
//   - [Reduce] computes aggregates of given results, and checks that they are the same for every
//     division and every order of the results.
//   - [Run] runs a whole installation inside the test: all six roles, the HTTP API, and an embedded
//     Redis. Groups are submitted to it as in production.
//
// # The clock
//
// Run calls the test in a bubble of [testing/synctest]. There the time stands still while any
// goroutine works, and jumps ahead as soon as all of them wait. It controls the clock of Go and
// that of the embedded Redis: backoffs, timeouts, start times, rate limits, leases and retentions.
// So a backoff of a minute takes some milliseconds, and times do not depend on the speed of the
// machine. The clock begins at midnight UTC 2000-01-01. The order in which jobs run is not fixed,
// and backoffs have a random part of up to a tenth.
//
// The clock can't jump while a goroutine of the test waits for something outside of the bubble: the
// network, a child process, a channel that was made outside. Such a call works, but the time stands
// still meanwhile. An idle HTTP connection over the network also counts as waiting; close it
// (http.Client.CloseIdleConnections), or replace the http.RoundTripper. Package httptest listens on
// the network.
//
// Attempt and Reduce use the clock of their caller. For an attempt that times out at once, call
// Attempt inside of synctest.Test or of Run.
//
// The embedded Redis is github.com/alicebob/miniredis: what a test says about speed, memory, loss
// of data, Cluster or Sentinel holds only there.
package bulktest

import (
	"encoding/json"
	"testing"
)

// JSON encodes a value as JSON, for payloads and results. If that is impossible, the test fails.
func JSON(t testing.TB, v any) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("bulktest: encode %T: %v", v, err)
	}
	return b
}
