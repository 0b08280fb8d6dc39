package app

import (
	"encoding"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v10"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

const envPrefix = "BULKACTION_"

// Variable describes one environment variable, as docs/configuration.md shows it.
type Variable struct {
	Section string
	Name    string // with the prefix BULKACTION_
	Default string // "" for none
	Rule    string // the rule for valid values, in words
	File    string // the variable that may name a file with the value instead; "" for none

	Owner reflect.Type // the struct that has the field
	Field string       // the field's name there; its comment describes the variable

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
		of := Variable{Section: field.Tag.Get("section"), prefix: envPrefix + field.Tag.Get("envPrefix")}
		all = append(all, of.fields(section)...)
	}
	for i, v := range all {
		file := v.Name + "_FILE"
		own := slices.ContainsFunc(all, func(v Variable) bool { return v.Name == file })
		if v.isSecret() && !own {
			all[i].File = file
		}
	}
	return all
}

// isSecret reports whether the variable's value is or contains a secret, by its tag or its name.
func (v Variable) isSecret() bool {
	return v.field.Tag.Get("secret") != "" || secretNames.MatchString(v.Name)
}

// maxSecretFile is the largest size of a file with a secret, in bytes.
const maxSecretFile = 64 << 10

// readFile handles the variable NAME_FILE, which only a secret has: if it names a file, readFile
// sets NAME in environ to the file's content without the line breaks at the end. It is an error if
// NAME is set, too, or if nothing remains.
func (v Variable) readFile(environ map[string]string) error {
	name := environ[v.File]
	if v.File == "" || name == "" {
		return nil
	}
	if environ[v.Name] != "" {
		return fmt.Errorf("%s: set either it or %s, not both", v.Name, v.File)
	}
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("%s: %w", v.File, err)
	}
	defer func() { _ = file.Close() }() // it was only read
	content, err := io.ReadAll(io.LimitReader(file, maxSecretFile+1))
	if err != nil {
		return fmt.Errorf("%s: %w", v.File, err)
	}
	value := strings.TrimRight(string(content), "\r\n")
	switch {
	case value == "":
		return fmt.Errorf("%s: %s is empty", v.File, name)
	case len(content) > maxSecretFile:
		return fmt.Errorf("%s: %s has more than %d bytes", v.File, name, maxSecretFile)
	}
	environ[v.Name] = value
	return nil
}

// fields returns the variables of a struct and of its embedded structs, with the section and the
// prefix of v.
func (v Variable) fields(owner reflect.Value) []Variable {
	var all []Variable
	for i := range owner.NumField() {
		f := owner.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("env"), ",")
		switch {
		case name != "":
			all = append(all, Variable{
				Section: v.Section,
				Name:    v.prefix + name,
				Default: f.Tag.Get("envDefault"),
				Rule:    ruleOf(f).text,
				Owner:   owner.Type(),
				Field:   f.Name,
				prefix:  v.prefix,
				field:   f,
				value:   owner.Field(i),
			})
		case f.Anonymous:
			all = append(all, v.fields(owner.Field(i))...)
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
		problem := "must be " + v.Rule
		if _, err := strconv.ParseFloat(environ[v.Name], 64); err == nil && v.field.Type == durationType {
			problem += ": give the unit, such as " + environ[v.Name] + "s"
		}
		return v.mistake(environ[v.Name], problem)
	}
	v.value.Set(alone.Elem().Field(0))
	if ruleOf(v.field).holds(v.value) {
		return nil
	}
	problem := "must be " + v.Rule
	if v.field.Tag.Get("check") == "redis" {
		problem += ": " + redisx.URLMistake(v.value.String())
	}
	return v.mistake(environ[v.Name], problem)
}

func (v Variable) mistake(value, problem string) error {
	return fmt.Errorf("%s=%q: %s", v.Name, v.redact(value), problem)
}

// secretNames matches variables whose values are secrets, by the ends of their names.
var secretNames = regexp.MustCompile(`(PASSWORD|SECRET|TOKEN|API_KEY|HEADERS)$`)

const redacted = "[redacted]"

// redact returns the value with its secret parts replaced.
func (v Variable) redact(value string) string {
	switch {
	case value == "" || !v.isSecret():
		return value
	case v.field.Tag.Get("secret") == "url" && !strings.Contains(value, "?"):
		// Redact a URL up to its last @: the password before it may contain an @ itself. If the URL
		// has parameters after ?, redact it whole: they may contain a password, too.
		if at := strings.LastIndexByte(value, '@'); at >= 0 {
			return redacted + value[at:]
		}
		return value
	}
	return redacted
}

// show returns the value as it would be written in the environment; secrets are redacted.
func (v Variable) show() string {
	if timeouts, ok := v.value.Interface().(map[string]time.Duration); ok {
		parts := make([]string, 0, len(timeouts))
		for _, typ := range slices.Sorted(maps.Keys(timeouts)) {
			parts = append(parts, typ+"="+timeouts[typ].String())
		}
		return strings.Join(parts, ",")
	}
	if text, ok := v.value.Interface().(encoding.TextMarshaler); ok {
		b, _ := text.MarshalText() // never fails for the types of variables
		return v.redact(string(b))
	}
	if v.value.Kind() != reflect.Slice {
		return v.redact(fmt.Sprint(v.value.Interface()))
	}
	parts := make([]string, v.value.Len())
	for i := range parts {
		parts[i] = fmt.Sprint(v.value.Index(i).Interface())
	}
	return v.redact(strings.Join(parts, ","))
}
