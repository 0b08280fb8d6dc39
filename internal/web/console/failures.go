package console

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// failuresPage serves the page that counts the failed jobs of a group by code and by fingerprint.
type failuresPage struct{ *Console }

// failuresData is the data of the page.
type failuresData struct {
	Group   api.Group
	Summary api.FailureSummary
	Code    string // only this code is shown; "": all
	Codes   []api.FailureCode
}

// Estimated reports whether the counts of fingerprints are estimates, because the summary looked
// only at a part of the failed jobs.
func (d failuresData) Estimated() bool { return d.Summary.Seen < d.Summary.Total }

// Others is the number of failed jobs whose codes the summary does not list.
func (d failuresData) Others() int64 {
	n := d.Summary.Total
	for _, c := range d.Summary.Codes {
		n -= c.Count
	}
	return max(n, 0)
}

func (p failuresPage) view(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	code, err := codeOf(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	g, _, err := p.Backend.GroupSummary(r.Context(), id, 0)
	if err != nil {
		return view{}, err
	}
	sum, err := p.Backend.FailureSummary(r.Context(), id)
	if err != nil {
		return view{}, err
	}
	d := failuresData{Group: g, Summary: sum, Code: code, Codes: sum.Codes}
	if code != "" {
		d.Codes = slices.DeleteFunc(slices.Clone(sum.Codes), func(c api.FailureCode) bool { return c.Code != code })
	}
	return view{name: "failures", title: "Failures of " + id, data: d}, nil
}

// codeOf returns the error code in a query or a form; "": jobs with any code.
func codeOf(q url.Values) (string, error) {
	code := q.Get("code")
	if len(code) > httpapi.MaxCodeLength {
		return "", invalid("code", "must be at most %d bytes", httpapi.MaxCodeLength)
	}
	return code, nil
}

const downloadPage = 1000 // failed jobs that are read at once

// download answers with the failed jobs as NDJSON. It reads page by page, so that a large group
// takes little memory, and checks the session for each page. An error before the first page is
// answered with a page of HTML. A later error breaks the connection, so that a part of the failed
// jobs is not mistaken for all.
func (p failuresPage) download(w http.ResponseWriter, r *http.Request) {
	id, err := pathID(r, "id")
	if err != nil {
		p.fail(w, r, err)
		return
	}
	q := httpapi.FailureQuery{Limit: downloadPage}
	if q.Code, err = codeOf(r.URL.Query()); err != nil {
		p.fail(w, r, err)
		return
	}
	for first := true; ; first = false {
		var lines bytes.Buffer
		q.Cursor, err = p.readFailures(r.Context(), &lines, id, q)
		if err == nil && !first {
			_, err = p.principal(r, false)
		}
		switch {
		case err != nil && first:
			p.fail(w, r, err)
			return
		case err != nil:
			panic(http.ErrAbortHandler)
		case first:
			w.Header().Set("Content-Type", "application/x-ndjson")
			w.Header().Set("Content-Disposition", `attachment; filename="failures.ndjson"`)
		}
		if _, err := w.Write(lines.Bytes()); err != nil || q.Cursor == "" {
			return
		}
	}
}

// readFailures adds a page of failed jobs to lines as NDJSON. next is the cursor of the next page.
func (p failuresPage) readFailures(
	ctx context.Context, lines *bytes.Buffer, id string, q httpapi.FailureQuery,
) (next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	out := json.NewEncoder(lines)
	return p.Backend.Failures(ctx, id, q, func(f api.Failure) error { return out.Encode(f) })
}
