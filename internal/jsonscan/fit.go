package jsonscan

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Decode decodes data into what `into` points to. If a value does not fit, the error says so in
// words for the people who have written the JSON; types such as int32 stand for a range of numbers.
// The error contains no values, which may be personal, unless a method UnmarshalJSON puts them
// there. name names the whole in errors, such as payload; if it is empty, errors name only fields.
func Decode(name string, data []byte, into any) error {
	err := json.Unmarshal(data, into)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		is, _, _ := strings.Cut(wrong.Value, " ") // behind "number" stands the number
		return at(path(name, wrong.Field), fmt.Errorf("must be %s, not %s", jsonName(wrong.Type), articles[is]))
	case err != nil:
		return at(name, err)
	}
	return nil
}

// articles has the JSON types as encoding/json names them, and as errors name them.
var articles = map[string]string{
	"object": "an object", "array": "an array", "string": "a string", "bool": "a boolean", "number": "a number",
}

// path is the path of a field, or of the whole if field is empty.
func path(name, field string) string {
	if name == "" || field == "" {
		return name + field
	}
	return name + "." + field
}

func at(path string, err error) error {
	if path == "" {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}

func jsonName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number in the range of " + t.Kind().String()
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	}
	return "the JSON of " + t.String()
}
