package bulktest

// RunLimited is like Run, but its caller chooses how long (in real time) the bubble's clock may
// stand still.
var RunLimited = runBubble
