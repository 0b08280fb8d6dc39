// Package browser tests the web console, the waiting room and the shop behind it in a real browser,
// headless Chromium: what people see and do. `bulkaction dev --rooms` and examples/protected-shop
// run as processes. Files that begin with console_ test the console. axe-core checks its pages
// against WCAG 2.2 A and AA.
//
// The tests have the build tag browser, so that `go test ./...` does not need Chromium. `make
// browser` installs it and runs them; `make screenshots` writes the pictures in docs/console and
// docs/waiting-room.
package browser
