package cli

import (
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/bench"
)

// showBench prints the result of a benchmark: as JSON with --json, otherwise a line for each figure
// (see showComparison and showFigures).
func (r *Root) showBench(result any) error {
	if r.JSON {
		return r.Print(result)
	}
	t := newTable(r.Out)
	if c, ok := result.(bench.Comparison); ok {
		showComparison(t, c)
	} else {
		showFigures(t, "", reflect.ValueOf(result))
	}
	return t.flush()
}

// showComparison adds a row for each figure of each variant to the table.
func showComparison(t table, c bench.Comparison) {
	t.row("variant", "figure", c.Base, c.Head, "ratio", "ratios of rounds")
	for _, v := range c.Variants {
		for _, f := range v.Figures {
			least, most := f.Range()
			t.row(v.Name, f.Name, fmt.Sprintf("%.2f", f.Base), fmt.Sprintf("%.2f", f.Head),
				fmt.Sprintf("%.3f", f.Ratio), fmt.Sprintf("%.3f to %.3f", least, most))
		}
	}
}

// mostShown is the length of the longest list of numbers that showFigures prints, mostRows that of
// structs. Longer lists are left out. Of a list of texts it prints the first mostRows.
const mostShown, mostRows = 10, 20

// showFigures adds v to the table, as a row with its JSON name. A struct or a map becomes a row for
// each part, with names like name.part; a list of structs a table; a list of texts a row for each.
// It leaves out what shownFields does, nil pointers, and empty and long lists.
func showFigures(t table, name string, v reflect.Value) {
	within := func(part string) string { return strings.TrimPrefix(name+"."+part, ".") }
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			showFigures(t, name, v.Elem())
		}
	case reflect.Struct:
		for field, value := range shownFields(v) {
			showFigures(t, within(field), value)
		}
	case reflect.Map:
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, key := range keys {
			showFigures(t, within(key.String()), v.MapIndex(key))
		}
	case reflect.Slice:
		switch n := v.Len(); {
		case n > 0 && n <= mostRows && v.Index(0).Kind() == reflect.Struct:
			showRows(t, v)
		case n > 0 && v.Index(0).Kind() == reflect.String:
			for i := range min(n, mostRows) {
				t.row(name, v.Index(i).Interface())
			}
		case n > 0 && n <= mostShown:
			t.row(name, v.Interface())
		}
	default:
		t.row(name, figureText(v))
	}
}

// showRows adds a list of structs to the table, with a column for each shown field that is no list
// and no map.
func showRows(t table, list reflect.Value) {
	for i := range list.Len() {
		var names, cells []any
		for field, value := range shownFields(list.Index(i)) {
			if kind := value.Kind(); kind != reflect.Slice && kind != reflect.Map {
				names, cells = append(names, field), append(cells, figureText(value))
			}
		}
		if i == 0 {
			t.section(names...)
		}
		t.row(cells...)
	}
}

// shownFields iterates over the fields of a struct that are shown, by JSON name, including those of
// embedded structs. It leaves out empty fields with omitempty, overrides, and the tag text:"-".
func shownFields(v reflect.Value) iter.Seq2[string, reflect.Value] {
	return func(yield func(string, reflect.Value) bool) {
		for _, field := range reflect.VisibleFields(v.Type()) {
			name, option, _ := strings.Cut(field.Tag.Get("json"), ",")
			value, err := v.FieldByIndexErr(field.Index) // an error if an embedded pointer is nil
			if err != nil || field.Anonymous || field.Tag.Get("text") == "-" || name == "overrides" ||
				option == "omitempty" && value.IsZero() {
				continue
			}
			if !yield(name, value) {
				return
			}
		}
	}
}

// figureText returns the text of a number, a text or a bool.
func figureText(v reflect.Value) string {
	switch {
	case v.CanInt():
		return thousands(v.Int())
	case v.CanFloat() && v.Float() >= 1000:
		return thousands(int64(v.Float()))
	}
	return fmt.Sprint(v.Interface())
}
