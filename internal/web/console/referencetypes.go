package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// prose is a text of the OpenAPI document, divided into plain parts and code (in backticks in the
// document).
type prose []prosePart

type prosePart struct {
	Text string
	Code bool
}

func proseOf(text string) (all prose) {
	for i, part := range strings.Split(text, "`") {
		if part != "" {
			all = append(all, prosePart{part, i%2 == 1})
		}
	}
	return all
}

// apiType is the text of a type, in parts. A part that is the name of a schema becomes a link.
type apiType []typePart

type typePart struct {
	Text   string
	Schema bool
}

func plainType(text string) apiType { return apiType{{Text: text}} }

// refOf returns the name of the schema that s refers to, or "" if s is an inline schema.
func refOf(s *openapi3.SchemaRef) string { return s.Ref[strings.LastIndexByte(s.Ref, '/')+1:] }

// typeOf returns the type of the values that a schema allows, with their limits. Of a schema that
// has a name it returns only a reference.
func typeOf(ref *openapi3.SchemaRef) apiType {
	switch {
	case ref == nil || ref.Value == nil:
		return nil
	case ref.Ref != "":
		return apiType{{refOf(ref), true}}
	}
	s := ref.Value
	var t apiType
	switch {
	case len(s.AllOf) > 0:
		t = typeOf(s.AllOf[0])
	case len(s.OneOf)+len(s.AnyOf) > 0:
		for i, one := range slices.Concat(s.OneOf, s.AnyOf) {
			if i > 0 {
				t = append(t, typePart{Text: " or "})
			}
			t = append(t, typeOf(one)...)
		}
	case s.Type.Is("array"):
		t = append(plainType("list of "), typeOf(s.Items)...)
	case s.Type.Is("object") && s.AdditionalProperties.Schema != nil:
		t = append(plainType("map of names to "), typeOf(s.AdditionalProperties.Schema)...)
	case s.Type == nil:
		t = plainType("any JSON")
	default:
		t = plainType(s.Type.Slice()[0])
	}
	if limits := limitsOf(s); limits != "" {
		t = append(t, typePart{Text: limits})
	}
	return t
}

// limitsOf returns as text which values of its type a schema allows, and its default.
func limitsOf(s *openapi3.Schema) string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if s.Format != "" && s.Format != "int64" {
		add("%s", s.Format)
	}
	if len(s.Enum) > 0 {
		names := make([]string, len(s.Enum))
		for i, v := range s.Enum {
			names[i] = fmt.Sprint(v)
		}
		add("%s", strings.Join(names, " | "))
	}
	least, most := "from ", " to "
	if s.ExclusiveMin.IsSet() {
		least = "above "
	}
	if s.ExclusiveMax.IsSet() {
		most = " to below "
	}
	switch {
	case s.Min != nil && s.Max != nil:
		add("%s%s%s%s", least, number(*s.Min), most, number(*s.Max))
	case s.Min != nil:
		add("%s%s", least, number(*s.Min))
	case s.Max != nil:
		add("%s%s", strings.TrimPrefix(most, " "), number(*s.Max))
	}
	if s.MaxLength != nil {
		add("at most %d characters", *s.MaxLength)
	}
	if s.MaxItems != nil {
		add("at most %d", *s.MaxItems)
	}
	if s.Pattern != "" {
		add("%s", s.Pattern)
	}
	if s.Default != nil {
		add("default %v", s.Default)
	}
	if s.Nullable {
		add("or null")
	}
	if len(all) == 0 {
		return ""
	}
	return ", " + strings.Join(all, ", ")
}

func number(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

// fieldsOf returns the fields of an object, the required ones first. A field that is an inline
// object, or a list of inline objects, is followed by the fields of these objects, with names such
// as links.openapi and jobs[].key. within is what the names begin with.
func fieldsOf(within string, s *openapi3.Schema) (all []apiField) {
	names := slices.Clone(s.Required)
	for _, name := range sortedNames(s.Properties) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		p := s.Properties[name]
		if p == nil {
			continue
		}
		f := apiField{Name: within + name, Required: slices.Contains(s.Required, name), Type: typeOf(p)}
		if p.Ref == "" {
			f.Text = proseOf(p.Value.Description)
		}
		all = append(all, f)
		if p.Ref == "" {
			all = append(all, fieldsOf(f.Name+".", p.Value)...)
			if p.Value.Items != nil && p.Value.Items.Ref == "" {
				all = append(all, fieldsOf(f.Name+"[].", p.Value.Items.Value)...)
			}
		}
	}
	return all
}

func sortedNames(all openapi3.Schemas) []string {
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// sampleOf returns an example body of a call: the example of the schema (of a text its first line),
// or else JSON with the required fields.
func sampleOf(ref *openapi3.SchemaRef) string {
	if text, ok := ref.Value.Example.(string); ok {
		line, _, _ := strings.Cut(text, "\n")
		return line
	}
	text, err := json.Marshal(sampleValue(ref))
	if err != nil {
		return "{}"
	}
	return string(text)
}

func sampleValue(ref *openapi3.SchemaRef) any {
	s := ref.Value
	switch {
	case s.Example != nil:
		return s.Example
	case len(s.Enum) > 0:
		return s.Enum[0]
	case len(s.AllOf) > 0:
		return sampleValue(s.AllOf[0])
	case len(s.OneOf) > 0:
		return sampleValue(s.OneOf[0])
	case s.Type == nil:
		return map[string]any{}
	case s.Type.Is("object"):
		fields := map[string]any{}
		for _, name := range s.Required {
			if p := s.Properties[name]; p != nil {
				fields[name] = sampleValue(p)
			}
		}
		return fields
	case s.Type.Is("array"):
		return []any{}
	case s.Type.Is("boolean"):
		return true
	case s.Type.Is("integer"), s.Type.Is("number"):
		if s.Min != nil && *s.Min > 0 {
			return *s.Min
		}
		return 1
	case s.Format == "date-time":
		return "2026-01-02T03:04:05Z"
	}
	return strings.ToUpper(cmp.Or(refOf(ref), "text"))
}
