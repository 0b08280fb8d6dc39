package reducer

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

type versioned struct {
	N      int  `json:"n"`
	strict bool // this program can't read a state of the other version
}

func (v *versioned) Add(Result) error                { v.N++; return nil }
func (v *versioned) Merge(o Accumulator) error       { v.N += o.(*versioned).N; return nil }
func (v *versioned) MarshalJSON() ([]byte, error)    { return json.Marshal(map[string]int{"n": v.N}) }
func (v *versioned) Value() (json.RawMessage, error) { return json.Marshal(v.N) }
func (v *versioned) UnmarshalJSON(b []byte) error {
	if v.strict {
		return errors.New("unknown state version")
	}
	var m map[string]int
	err := json.Unmarshal(b, &m)
	v.N = m["n"]
	return err
}

func registryOf(strict, refuse bool) *Registry {
	r := NewRegistry()
	_ = r.Register("v", func(Spec) (Accumulator, error) {
		if refuse {
			return nil, errors.New("not in this version")
		}
		return &versioned{strict: strict}, nil
	})
	return r
}

// TestAnotherVersionOfAReducer: a process that can't decode a stored state, or refuses its Spec, does
// not overwrite the state.
func TestAnotherVersionOfAReducer(t *testing.T) {
	specs := []Spec{{As: "a", Op: "v"}}
	for name, other := range map[string]*Registry{"decode": registryOf(true, false), "refuse": registryOf(false, true)} {
		t.Run(name, func(t *testing.T) {
			good := registryOf(false, false).CompileStored(specs)
			s := good.New()
			for i := range 1000 {
				require.NoError(t, s.Add(Result{Ordinal: int64(i)}))
			}
			stored, err := s.Encode()
			require.NoError(t, err)
			plan := other.CompileStored(specs) // as WorkPlan: nothing is missing
			s, err = plan.Decode(stored)
			require.NoError(t, err)
			_ = s.Add(Result{Ordinal: 1000})
			_, err = s.Encode()
			require.ErrorContains(t, err, "this process can't use its state")
		})
	}
}
