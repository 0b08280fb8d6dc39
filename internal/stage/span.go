package stage

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// SpanSeed returns 8 random hex digits, not all 0, from which a script makes the ids of the spans
// that it creates.
func SpanSeed() string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], rand.Uint32()|1)
	return hex.EncodeToString(b[:])
}

// RecordSteps records a span for each sampled job in steps: the jobs that a script has failed,
// cancelled or reclaimed. For destination see [telemetry.Telemetry.RecordStep].
func (p Process) RecordSteps(ctx context.Context, destination string, steps []ledger.JobStep) {
	for _, s := range steps {
		p.Tel.RecordStep(ctx, destination, telemetry.JobStep(s))
	}
}
