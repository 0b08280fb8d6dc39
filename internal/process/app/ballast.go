package app

import "os"

// ballastBytes is the size of an allocation that is never written, so it uses no physical memory,
// but counts as live heap. Go collects garbage when the heap has doubled since the last collection.
// The live heap of a role is only a few MiB, so under load there would be dozens of collections a
// second, a tenth of all CPU time. With the ballast, the heap grows by at least this size before
// each collection.
const ballastBytes = 16 << 20

// newBallast allocates the ballast. It returns nil if the environment sets GOGC or GOMEMLIMIT.
func newBallast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, ballastBytes)
}
