package groups

// ExplainJob explains also a job that is not waiting.
var ExplainJob = (*Store).explainJob
