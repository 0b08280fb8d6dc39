package client

import (
	"fmt"

	"github.com/bulkaction/bulkaction/internal/messages"
)

// validateAll refuses here what the server would refuse where the producer can't see it. Nothing is
// published of a group of which a part is wrong.
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

// opsOf lets every reducer of a group pass: which there are beside those that are built in, the
// server knows.
func opsOf(g Group) map[string]bool {
	ops := map[string]bool{}
	for _, a := range g.Aggregate {
		ops[a.Op] = true
	}
	return ops
}
