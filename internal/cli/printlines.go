package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"iter"
)

// printLines prints items as they come: a line of JSON each, or on a terminal, if row is not nil, a
// table with head as its first line.
func printLines[T any](r *Root, items iter.Seq2[T, error], head string, row func(T) string) error {
	table := row != nil && r.OutIsTerminal && !r.JSON
	out := bufio.NewWriterSize(r.Out, 64<<10)
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	if table {
		_, _ = out.WriteString(head + "\n") // Flush returns its error
	}
	for item, err := range items {
		if err == nil && table {
			_, err = out.WriteString(printable(row(item)) + "\n")
		} else if err == nil {
			err = e.Encode(item)
		}
		if err == nil && r.OutIsTerminal {
			err = out.Flush()
		}
		if err != nil {
			return errors.Join(err, out.Flush()) // the lines before the error are complete
		}
	}
	return out.Flush()
}
