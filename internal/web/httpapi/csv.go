package httpapi

import (
	"bufio"
	"errors"
	"fmt"
	"net/url"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// tableQuery lists the query parameters that an append of CSV may have.
var tableQuery = []string{"delimiter", "types", "key_column"}

// tableOptions parses the query parameters of an append of CSV.
func tableOptions(q url.Values) (o records.TableOptions, err error) {
	o.MaxPayload = messages.MaxPayloadBytes
	if o.Delimiter, err = records.ParseDelimiter(q.Get("delimiter")); err != nil {
		return o, invalidField("delimiter", err.Error())
	}
	if o.Types, err = records.ParseColumnTypes(q.Get("types")); err != nil {
		return o, invalidField("types", err.Error())
	}
	o.Key = q.Get("key_column")
	return o, nil
}

// csvSource turns each row of a table into a job.
type csvSource struct{ table *records.Table }

// newCSVSource reads the header row of a table, and returns a source of the jobs in the later rows.
func newCSVSource(in *bufio.Reader, o records.TableOptions) (*csvSource, error) {
	table, line, err := records.NewTable(newRecords(in, records.CSV), o)
	var bad *records.HeaderError
	switch {
	case errors.As(err, &bad):
		return nil, headerProblem(bad)
	case err != nil:
		return nil, brokenRecord(err, line)
	}
	return &csvSource{table}, nil
}

// headerProblem returns the problem for a CSV body whose header row is refused.
func headerProblem(bad *records.HeaderError) *web.Problem {
	field, detail := "header", bad.Error()
	switch {
	case bad.Option != "":
		field = bad.Option
	case bad.Column > 0:
		field = fmt.Sprintf("header[%d]", bad.Column-1)
	}
	if bad.Looks != 0 {
		detail += "; send the query parameter delimiter=" + url.QueryEscape(string(bad.Looks))
	}
	return web.NewProblem(api.Invalid, detail, api.FieldError{Field: field, Problem: detail})
}

func (s *csvSource) next() (messages.Job, int64, int, error) {
	payload, key, line, err := s.table.NextWithKey()
	var bad *records.RowError
	switch {
	case errors.Is(err, records.ErrLongRow):
		return messages.Job{}, line, 0, errLongLine
	case errors.As(err, &bad):
		return messages.Job{}, line, 0, &lineError{bad.Problem}
	case err != nil:
		return messages.Job{}, line, 0, err
	}
	if key != "" && !messages.ValidJobKey(key) {
		return messages.Job{}, line, 0, &lineError{"key must " + messages.JobKeyRule}
	}
	return messages.Job{Payload: payload, Key: key}, line, len(payload), nil
}
