// Package aggregate reads and writes the field of a group that holds the aggregates it asked for.
// It hides how they are encoded.
package aggregate

import (
	"encoding/json"
	"fmt"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/reducer"
)

// Encode returns the field for what a group asks for, "" for nothing. It returns an error when the
// registry can't compute an aggregate.
func Encode(registry *reducer.Registry, asked []messages.Aggregate) (string, error) {
	if len(asked) == 0 {
		return "", nil
	}
	specs := make([]reducer.Spec, len(asked))
	for i, a := range asked {
		specs[i] = reducer.Spec{As: a.As, Op: a.Op, Field: a.Field}
	}
	if _, err := registry.Compile(specs); err != nil {
		return "", err
	}
	b, err := json.Marshal(asked)
	if err != nil {
		return "", fmt.Errorf("encode aggregates: %w", err)
	}
	return string(b), nil
}

// Plan compiles the aggregates of a group from its field.
func Plan(registry *reducer.Registry, encoded string) (*reducer.Plan, error) {
	var specs []reducer.Spec
	if encoded != "" {
		var asked []struct{ As, Op, Field string }
		if err := json.Unmarshal([]byte(encoded), &asked); err != nil {
			return nil, fmt.Errorf("read aggregates: %w", err)
		}
		for _, a := range asked {
			specs = append(specs, reducer.Spec{As: a.As, Op: a.Op, Field: a.Field})
		}
	}
	return registry.Compile(specs)
}
