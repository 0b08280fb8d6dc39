package processor

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/bulkaction/bulkaction/processor/internal/jsonfit"
)

// Typed returns a processor of the jobs of type typ, whose payload is the JSON of a P. fn gets the
// payload decoded, and returns the result. For a processor without a result, R is any and fn
// returns nil.
//
// A payload that is not the JSON of a P fails the job for good, with the code [CodeInvalidPayload]
// and the name of the wrong field. If P has a method Validate() error, its error does the same.
// Fields that P does not have are ignored, so that a producer may be newer than the worker.
//
// If fn is nil, Typed returns nil. The producer's side is client.Typed.
func Typed[P, R any](typ string, fn func(ctx context.Context, job Job, payload P) (R, error)) Processor {
	if fn == nil {
		return nil
	}
	return Func(typ, func(ctx context.Context, job Job) (any, error) {
		var payload P
		if err := decode(job.Payload, &payload); err != nil {
			return nil, Permanent(CodeInvalidPayload, err)
		}
		result, err := fn(ctx, job, payload)
		if err != nil {
			return nil, err
		}
		return result, nil
	})
}

// decode reads and validates a payload. Its errors contain no values, which may be personal; those
// of the payload's own methods may.
func decode[P any](data json.RawMessage, payload *P) error {
	if err := jsonfit.Decode("payload", data, payload); err != nil {
		return err
	}
	for _, v := range []any{*payload, payload} { // the method may have a pointer receiver
		if v, ok := v.(interface{ Validate() error }); ok {
			if err := v.Validate(); err != nil {
				return fmt.Errorf("payload: %w", err)
			}
			return nil
		}
	}
	return nil
}
