package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync"
)

// columns describes a table that is printed row by row. Its columns have fixed widths, because
// later rows are not known when the first one is printed.
type columns[T any] struct {
	format string // of a row
	head   []any
	cells  func(T) []any
	none   string // said of an empty list, unless --json is set
}

// printLines prints items while they are read: as rows of a table, or with --json as lines of JSON.
// It prints at once only on a terminal, otherwise whenever 64 KiB are full and at the end.
func printLines[T any](r *Root, items iter.Seq2[T, error], c *columns[T]) error {
	out := bufio.NewWriterSize(r.Out, 64<<10)
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	write := func(item T) error { return e.Encode(item) }
	head := func() {}
	if !r.JSON {
		// Print the header row with the first item, so that nothing is printed before an error.
		head = sync.OnceFunc(func() { _, _ = fmt.Fprintf(out, c.format+"\n", c.head...) }) // Flush returns its error
		write = func(item T) error {
			head()
			_, err := out.WriteString(printable(fmt.Sprintf(c.format, c.cells(item)...)) + "\n")
			return err
		}
	}
	listed := false
	for item, err := range items {
		listed = true
		if err == nil {
			err = write(item)
		}
		if err == nil && r.OutIsTerminal {
			err = out.Flush()
		}
		if err != nil {
			return errors.Join(err, out.Flush()) // the lines before the error are complete
		}
	}
	head() // of an empty list
	if err := out.Flush(); err != nil || listed || r.JSON || c.none == "" {
		return err
	}
	r.Notef("%s", c.none)
	return nil
}
