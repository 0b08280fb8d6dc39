// Command custom-processor is a worker binary with its own processor: it runs jobs of the type
// WORD_COUNT.
package main

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

func main() {
	run.Worker(processor.Func("WORD_COUNT", func(_ context.Context, job processor.Job) (any, error) {
		var text string
		if err := json.Unmarshal(job.Payload, &text); err != nil {
			return nil, processor.Permanent(processor.CodeInvalidPayload, err)
		}
		return map[string]int{"words": len(strings.Fields(text))}, nil
	}))
}
