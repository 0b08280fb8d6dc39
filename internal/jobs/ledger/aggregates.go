package ledger

import (
	"encoding/json"
	"fmt"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/reducer"
)

// The functions of this file encode the aggregates that a group asks for into the field aggregate of
// the group's hash, and compile them from its value.

// EncodeAggregates returns the field's value for the aggregates that a group asks for; "" if it asks for
// none. It returns an error when the registry refuses an aggregate.
func EncodeAggregates(registry *reducer.Registry, asked []messages.Aggregate) (string, error) {
	if len(asked) == 0 {
		return "", nil
	}
	specs := make([]reducer.Spec, len(asked))
	for i, a := range asked {
		specs[i] = reducer.Spec{As: a.As, Op: a.Op, Field: a.Field, Over: a.Over}
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

// CountingAggregates returns the names of those aggregates in the field's value that simply count all results.
// It returns none if the value can't be decoded.
func CountingAggregates(encoded string) []string {
	specs, _ := decodeAggregates(encoded)
	var names []string
	for _, a := range specs {
		if a.Op == "count" && a.Field == "" && a.Over == "" {
			names = append(names, a.As)
		}
	}
	return names
}

// AggregatePlan compiles the aggregates in the field's value; the value "" has none. It returns an error
// when the registry refuses an aggregate, for example because this process lacks its reducer.
func AggregatePlan(registry *reducer.Registry, encoded string) (*reducer.Plan, error) {
	specs, err := decodeAggregates(encoded)
	if err != nil {
		return nil, err
	}
	return registry.Compile(specs)
}

// decodeAggregates returns the aggregates in the field's value; the value "" has none. If the value can't be
// decoded, it returns an error.
func decodeAggregates(encoded string) ([]reducer.Spec, error) {
	if encoded == "" {
		return nil, nil
	}
	var specs []reducer.Spec
	if err := json.Unmarshal([]byte(encoded), &specs); err != nil {
		return nil, fmt.Errorf("read aggregates: %w", err)
	}
	return specs, nil
}
