package reducer_test

import (
	"encoding/json"
	"fmt"

	"github.com/bulkaction/bulkaction/reducer"
)

// Two processes reduce their results of a group; a reader merges the stored partial states.
func Example() {
	plan, err := reducer.NewRegistry().Compile([]reducer.Spec{
		{As: "cost", Op: "sum", Field: "data.cost"},
		{As: "codes", Op: "count_by", Field: "data.code"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	one, two := plan.New(), plan.New()
	_ = one.Add(reducer.Result{Ordinal: 0, Data: json.RawMessage(`{"cost": 0.1, "code": 250}`)})
	_ = two.Add(reducer.Result{Ordinal: 1, Data: json.RawMessage(`{"cost": 0.2, "code": 250}`)})
	_ = two.Add(reducer.Result{Ordinal: 2, Data: json.RawMessage(`{"code": 251}`)})

	stored, err := two.Encode()
	if err != nil {
		fmt.Println(err)
		return
	}
	if two, err = plan.Decode(stored); err != nil {
		fmt.Println(err)
		return
	}
	if err := one.Merge(two); err != nil {
		fmt.Println(err)
		return
	}
	values, err := one.Values()
	fmt.Println(one.Count(), string(values["cost"]), string(values["codes"]), one.Skipped(), err)
	// Output: 3 0.3 {"250":2,"251":1} map[cost:1] <nil>
}

// A reducer written in Go: the share of mails that bounced.
func ExampleMapReduce() {
	type tally struct{ Sent, Bounced int }
	registry := reducer.NewRegistry()
	err := registry.Register("bounce_rate", reducer.MapReduce(
		func(r reducer.Result) (tally, error) {
			var mail struct{ Bounced bool }
			if err := json.Unmarshal(r.Data, &mail); err != nil {
				return tally{}, err
			}
			if mail.Bounced {
				return tally{Sent: 1, Bounced: 1}, nil
			}
			return tally{Sent: 1}, nil
		},
		func(a, b tally) tally { return tally{a.Sent + b.Sent, a.Bounced + b.Bounced} },
		reducer.Finish(func(t tally) (any, error) { return float64(t.Bounced) / float64(t.Sent), nil }),
	))
	if err != nil {
		fmt.Println(err)
		return
	}
	plan, err := registry.Compile([]reducer.Spec{{As: "bounced", Op: "bounce_rate"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	s := plan.New()
	for i, data := range []string{`{"bounced":true}`, `{"bounced":false}`, `{}`, `{}`} {
		_ = s.Add(reducer.Result{Ordinal: int64(i), Data: json.RawMessage(data)})
	}
	values, err := s.Values()
	fmt.Println(string(values["bounced"]), err)
	// Output: 0.25 <nil>
}
