package bulktest

// RunLimited is Run with another limit for a clock that stands still.
var RunLimited = runBubble
