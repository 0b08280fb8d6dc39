// Package browser tests the waiting room and the shop behind it in a real browser, headless
// Chromium: what visitors see and do, on `bulkaction dev --rooms` and examples/protected-shop as
// processes.
//
// The tests have the build tag browser, so that `go test ./...` does not need Chromium. `make
// browser` installs it and runs them; `make screenshots` writes the pictures in docs/waiting-room.
package browser
