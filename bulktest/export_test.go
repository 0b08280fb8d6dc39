package bulktest

import "time"

// RunLimited is like Run, but its caller chooses how long (in real time) the bubble's clock may
// stand still.
var RunLimited = runBubble

// ShortenPatience makes Wait give up after d and the timeout of a job.
func ShortenPatience(d time.Duration) { patience = d }
