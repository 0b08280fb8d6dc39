package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
)

// unmarshalStrict refuses what it doesn't know: a state that was written otherwise must not be
// taken up as if it were whole.
func unmarshalStrict(b []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON value")
	}
	return nil
}

func validCount(n int64) bool { return n >= 0 && n <= maxCount }

func separator(i int, first string) string {
	if i == 0 {
		return first
	}
	return ","
}

func null() json.RawMessage { return json.RawMessage("null") }

// floatJSON is null for what JSON has no number for; only a corrupt state leads there.
func floatJSON(f float64) json.RawMessage {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return null()
	}
	b, err := json.Marshal(f)
	if err != nil {
		return null()
	}
	return b
}
