package app

import "os"

// ballastBytes is address space that counts as live heap and is never touched, so that it takes no
// memory. Go collects garbage when the heap has doubled, and what lives here is a few MiB: under
// load that would be dozens of times a second, for a tenth of all CPU. With ballast a process may
// grow by so much more before that, and as its heap grows the ballast matters less.
const ballastBytes = 16 << 20

// newBallast is nil where the user has chosen when to collect.
func newBallast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, ballastBytes)
}
