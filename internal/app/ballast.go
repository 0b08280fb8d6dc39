package app

import "os"

// ballastBytes is the size of an allocation that counts as live heap but is never written, so it
// uses no physical memory. Go collects garbage when the heap has doubled since the last collection.
// The live heap of a role is only a few MiB, so under load there would be dozens of collections a
// second, a tenth of all CPU. With the ballast the heap may grow by this size first.
const ballastBytes = 16 << 20

// newBallast returns nil if the environment sets GOGC or GOMEMLIMIT.
func newBallast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, ballastBytes)
}
