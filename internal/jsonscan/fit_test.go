package jsonscan_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

func TestDecode(t *testing.T) {
	type document struct {
		Name    string            `json:"name"`
		Count   int32             `json:"count"`
		Headers map[string]string `json:"headers"`
		Any     json.RawMessage   `json:"any"`
		Deep    struct {
			Paid bool `json:"paid"`
		} `json:"deep"`
	}
	for data, want := range map[string][2]string{
		`"secret"`:                   {"must be an object, not a string", "payload: must be an object, not a string"},
		`{"name":7}`:                 {"name: must be a string, not a number", "payload.name: must be a string, not a number"},
		`{"count":1.5}`:              {"count: must be a whole number in the range of int32, not a number", "payload.count: must be a whole number in the range of int32, not a number"},
		`{"headers":{"X":7}}`:        {"headers: must be a string, not a number", "payload.headers: must be a string, not a number"},
		`{"deep":{"paid":"secret"}}`: {"deep.paid: must be true or false, not a string", "payload.deep.paid: must be true or false, not a string"},
		`{`:                          {"unexpected end of JSON input", "payload: unexpected end of JSON input"},
		`{"any":[1]}`:                {"", ""},
	} {
		for i, name := range []string{"", "payload"} {
			var d document
			if err := jsonscan.Decode(name, []byte(data), &d); want[i] == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, want[i])
			}
		}
	}
}
