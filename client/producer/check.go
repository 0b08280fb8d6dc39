package producer

import (
	"fmt"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// validateAll returns an error if the server would refuse one of the messages for its content. The
// producer has to check this, because the server can't answer a message on a stream. If one message
// of a call is invalid, the producer publishes none of them.
func validateAll(outgoing []outgoingMessage) error {
	jobs := 0
	for _, p := range outgoing {
		if err := p.validate(); err != nil {
			if jobs > 0 {
				err = fmt.Errorf("after the first %d jobs: %w", jobs, err)
			}
			return fmt.Errorf("%s of group %s: %w", p.typ, p.group, err)
		}
		jobs += p.jobs
	}
	return nil
}

func (p outgoingMessage) validate() (err error) {
	d := messages.Decoder{Ops: p.acceptedOps}
	switch p.typ {
	case messages.TypeGroupSubmit:
		_, err = d.DecodeSubmit(p.data)
	case messages.TypeJobsAppend:
		_, err = d.DecodeAppend(p.data)
	case messages.TypeGroupSeal:
		_, err = d.DecodeSeal(p.data)
	case messages.TypeGroupCancel:
		_, err = d.DecodeCancel(p.data)
	}
	return err
}

// opsOf returns the ops that the submission's aggregates name, so that validation accepts all of
// them. Only the server knows which custom reducers it has besides the built-in ones.
func opsOf(g client.Submission) map[string]bool {
	ops := map[string]bool{}
	for _, a := range g.Aggregate {
		ops[a.Op] = true
	}
	return ops
}
