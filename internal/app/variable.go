package app

import (
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v10"
)

const envPrefix = "BULKACTION_"

// Variable describes one environment variable, as docs/configuration.md shows it.
type Variable struct {
	Section string
	Name    string // with the prefix BULKACTION_
	Default string // "" for none
	Meaning string // "" in a processor's section, whose fields have doc comments instead
	Rule    string // the rule for valid values, in words

	Owner reflect.Type // the struct that has the field
	Field string       // the field's name there

	prefix string
	field  reflect.StructField
	value  reflect.Value
}

// Variables returns every variable, in the order of docs/configuration.md.
func Variables() []Variable { return new(Config).variables() }

// variables returns every variable, bound to its field in c.
func (c *Config) variables() []Variable {
	var all []Variable
	sections := reflect.ValueOf(c).Elem()
	for i := range sections.NumField() {
		field, section := sections.Type().Field(i), sections.Field(i)
		prefix := envPrefix + field.Tag.Get("envPrefix")
		for j := range section.NumField() {
			f := section.Type().Field(j)
			name, _, _ := strings.Cut(f.Tag.Get("env"), ",")
			if name == "" {
				continue
			}
			all = append(all, Variable{
				Section: field.Tag.Get("section"),
				Name:    prefix + name,
				Default: f.Tag.Get("envDefault"),
				Meaning: meanings[strings.TrimPrefix(prefix+name, envPrefix)],
				Rule:    rule(f),
				Owner:   section.Type(),
				Field:   f.Name,
				prefix:  prefix,
				field:   f,
				value:   section.Field(j),
			})
		}
	}
	return all
}

// parse sets the field from the environment. It returns an error if the value breaks the variable's
// rule. The errors of the env library name only the field, and field names are not unique; so each
// variable is parsed as a struct of its own.
func (v Variable) parse(environ map[string]string) error {
	alone := reflect.New(reflect.StructOf([]reflect.StructField{v.field}))
	if err := env.ParseWithOptions(alone.Interface(), env.Options{Environment: environ, Prefix: v.prefix}); err != nil {
		return v.mistake(environ[v.Name], "must be "+v.Rule)
	}
	v.value.Set(alone.Elem().Field(0))
	if !v.valid() {
		return v.mistake(environ[v.Name], "must be "+v.Rule)
	}
	return nil
}

func (v Variable) mistake(value, problem string) error {
	return fmt.Errorf("%s=%q: %s", v.Name, v.redact(value), problem)
}

// valid reports whether the value keeps the limits in the field's tags.
func (v Variable) valid() bool {
	tag := v.field.Tag
	if check := tag.Get("check"); check != "" {
		return checks[check].holds(v.value)
	}
	if options := tag.Get("oneof"); options != "" {
		return slices.Contains(strings.Split(options, ","), v.value.String())
	}
	if tag.Get("min") == "" {
		return true
	}
	low, high := number(v.field.Type, tag.Get("min")), number(v.field.Type, tag.Get("max"))
	var is float64
	if v.value.CanInt() {
		is = float64(v.value.Int())
	} else {
		is = v.value.Float()
	}
	return is >= low && is <= high // false for NaN
}

var durationType = reflect.TypeFor[time.Duration]()

// number parses a limit in a tag; a duration becomes nanoseconds.
func number(t reflect.Type, s string) float64 {
	if t == durationType {
		d, err := time.ParseDuration(s)
		if err != nil {
			return math.NaN()
		}
		return float64(d)
	}
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return math.NaN()
	}
	return n
}

// rule describes in words the rule that valid checks.
func rule(f reflect.StructField) string {
	tag := f.Tag
	if check := tag.Get("check"); check != "" {
		return checks[check].rule
	}
	if options := tag.Get("oneof"); options != "" {
		text := strings.ReplaceAll(options, ",", ", ")
		if at := strings.LastIndex(text, ", "); at >= 0 {
			text = text[:at] + " or" + text[at+1:]
		}
		return text
	}
	text := map[reflect.Kind]string{
		reflect.Bool:    "true or false",
		reflect.Int:     "a whole number",
		reflect.Int64:   "a whole number",
		reflect.Float64: "a number",
		reflect.String:  "text",
		reflect.Slice:   "a comma list",
	}[f.Type.Kind()]
	if f.Type == durationType {
		text = "a duration"
	}
	if unit := tag.Get("unit"); unit != "" {
		text += " of " + unit
	}
	if low := tag.Get("min"); low != "" {
		return text + " from " + low + " to " + tag.Get("max")
	}
	if f.Type == durationType {
		text += " such as 1m30s"
	}
	return text
}

// secretNames matches the names of variables that hold a secret, by their endings.
var secretNames = regexp.MustCompile(`(PASSWORD|SECRET|TOKEN|API_KEY|HEADERS)$`)

const redacted = "[redacted]"

// redact returns the value with its secret parts replaced.
func (v Variable) redact(value string) string {
	secret := v.field.Tag.Get("secret")
	switch {
	case value == "" || secret == "" && !secretNames.MatchString(v.Name):
		return value
	case secret == "url" && !strings.Contains(value, "?"):
		// The part before the last @ may contain a password, which need not be escaped. The
		// parameters after ? may contain a password, too.
		if at := strings.LastIndexByte(value, '@'); at >= 0 {
			return redacted + value[at:]
		}
		return value
	}
	return redacted
}

// show returns the value as it would be written in the environment; secrets are redacted.
func (v Variable) show() string {
	if v.value.Kind() != reflect.Slice {
		return v.redact(fmt.Sprint(v.value.Interface()))
	}
	parts := make([]string, v.value.Len())
	for i := range parts {
		parts[i] = fmt.Sprint(v.value.Index(i).Interface())
	}
	return v.redact(strings.Join(parts, ","))
}
