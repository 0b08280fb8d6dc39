package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
)

// unmarshalStrict decodes JSON, but refuses unknown fields and trailing data: a state of another
// format must not be read as if it were complete.
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

// floatJSON returns f as JSON, but null for NaN and infinities, which only a corrupt state can
// produce.
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
