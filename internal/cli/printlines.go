package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"iter"
)

// printLines writes each item as a line of JSON, or by row for people on a terminal, as they come.
func printLines[T any](r *Root, items iter.Seq2[T, error], head string, row func(T) string) error {
	table := row != nil && r.OutIsTerminal && !r.JSON
	out := bufio.NewWriterSize(r.Out, 64<<10)
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	if table {
		_, _ = out.WriteString(head + "\n") // an error comes again from Flush
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
			return errors.Join(err, out.Flush()) // what came before is good
		}
	}
	return out.Flush()
}
