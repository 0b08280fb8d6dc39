package client

// Typed returns a function that makes jobs of type typ whose payloads are all a P, so that the
// compiler checks what a producer sends. The worker's side is processor.Typed.
func Typed[P any](typ string) func(payload P) NewJob {
	return func(payload P) NewJob { return NewJob{Type: typ, Payload: payload} }
}
