package console

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	lettersPage    = 50
	maxPayloadText = 4000 // most bytes that a list shows of a payload, a message or a setting
)

// letterPages serves two pages: dead letters, and rejected messages.
type letterPages struct{ backend httpapi.Backend }

type deadLettersData struct {
	Letters  []deadLetter
	Codes    []letterCode // of the letters on this page
	Most     int64        // the largest number in Codes
	More     int          // codes that Codes leaves out
	Query    messages.DeadLetterQuery
	Since    string // of Query, as the form has it
	Filtered bool
	Scanned  int
	Next     string // path of the next page
	Tenants  bool   // the reader sees dead letters of several tenants
	All      allMatching
}

// First reports whether this is the first page.
func (d deadLettersData) First() bool { return d.Query.Cursor == "" }

type letterCode struct {
	quantity
	Path string // of the dead letters with this code
}

type deadLetter struct {
	api.DeadLetter
	Text string // the payload, with line breaks; "": the reader may not see it
}

// minute is the layout of the time since which the page lists dead letters, as in package time.
const minute = "2006-01-02T15:04"

// readDeadLetters parses the query of the list of dead letters. It returns a function that reads
// this page of the list, and the parameters that are set, which are part of the name of the page's
// live topic. An invalid parameter is an error.
func (p letterPages) readDeadLetters(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	query := messages.DeadLetterQuery{Code: q.Get("code"), Limit: lettersPage}
	for name, to := range map[string]*string{"tenant": &query.Tenant, "group": &query.Group, "type": &query.Type} {
		if *to, err = idOf(q, name); err != nil {
			return nil, nil, err
		}
	}
	if len(query.Code) > httpapi.MaxCodeLength {
		return nil, nil, invalid("code", "must be at most %d bytes", httpapi.MaxCodeLength)
	}
	since := q.Get("since")
	if since != "" {
		if query.Since, err = time.Parse(minute, since); err != nil {
			query.Since, err = time.Parse(time.DateOnly, since)
		}
		if err != nil || query.Since.UnixMilli() < 0 {
			return nil, nil, invalid("since", "must be a time such as 2026-01-02T15:04, or a day, from 1970 on")
		}
		since = query.Since.Format(minute)
	}
	if query.Cursor, err = cursorOf(q); err != nil {
		return nil, nil, err
	}
	filter = chosen(map[string]string{
		"tenant": query.Tenant, "group": query.Group, "type": query.Type, "code": query.Code, "since": since,
	})
	filters := maps.Clone(filter)
	if query.Cursor != "" {
		filter.Set("cursor", query.Cursor)
	}
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.DeadLetters(ctx, query)
		if err != nil {
			return nil, err
		}
		who, _ := auth.From(ctx)
		d := deadLettersData{
			Query: query, Since: since, Filtered: len(filters) > 0, Scanned: l.Scanned,
			Next:    nextPage(root+"/dead-letters", filters, l.Cursor),
			Tenants: who.Tenant == "" || who.Tenant == auth.AllTenants,
		}
		f := api.OperationFilter{Tenant: query.Tenant, Group: query.Group, Type: query.Type, Code: query.Code}
		if !query.Since.IsZero() {
			f.Since = &query.Since
		}
		d.All = allMatching{filterJSON(f), api.OperationKinds[4:]}
		d.add(l.DeadLetters, filters)
		return d, nil
	}, filter, nil
}

// list shows the list of dead letters. A query that can't be used is shown again, with the problem.
func (p letterPages) list(r *http.Request) (view, error) {
	q := r.URL.Query()
	return listOf(p.readDeadLetters).orRefused("deadletters", "Dead letters", "dead-letters", func(tenants bool) any {
		return deadLettersData{Since: q.Get("since"), Filtered: true, Tenants: tenants, Query: messages.DeadLetterQuery{
			Tenant: q.Get("tenant"), Group: q.Get("group"), Type: q.Get("type"), Code: q.Get("code"),
		}}
	})(r)
}

// add appends dead letters to the page, and counts them by code. The link of each code has the
// page's other filters.
func (d *deadLettersData) add(letters []api.DeadLetter, filters url.Values) {
	counts := map[string]int64{}
	for _, letter := range letters {
		counts[letter.Code]++
		text := payloadText(letter.Payload)
		letter.Payload = nil // the page is kept for an outage: it shows only the text
		d.Letters = append(d.Letters, deadLetter{letter, text})
	}
	var codes []quantity
	for code, n := range counts {
		codes = append(codes, quantity{Name: code, Number: n})
	}
	if codes, d.More = largest(codes); len(codes) > 0 {
		d.Most = codes[0].Number
	}
	for _, c := range codes {
		same := maps.Clone(filters)
		same.Set("code", c.Name)
		d.Codes = append(d.Codes, letterCode{c, root + "/dead-letters?" + same.Encode()})
	}
}

// payloadText returns a payload as indented JSON, cut to maxPayloadText; "" if there is none.
func payloadText(payload json.RawMessage) string {
	if len(payload) == 0 {
		return ""
	}
	return shortened(indented(payload))
}

// shortened cuts a text that is longer than maxPayloadText, and puts an ellipsis at the end.
func shortened(text string) string {
	if len(text) <= maxPayloadText {
		return text
	}
	return strings.ToValidUTF8(text[:maxPayloadText], "") + "…"
}

// rejectedData is the data of the page of rejected messages.
type rejectedData struct {
	Messages []api.RejectedMessage
	Data     bool // the messages have their data
	Next     string
	First    bool
}

// readRejected parses the query of the list of rejected messages. It returns a function that reads
// this page of the list, and the valid parameters of the query, which are part of the name of the
// page's live topic.
func (p letterPages) readRejected(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	cursor, err := cursorOf(q)
	if err != nil {
		return nil, nil, err
	}
	filters, data := url.Values{}, q.Get("data")
	switch data {
	case "", "false":
	case "true":
		filters.Set("data", data)
	default:
		return nil, nil, invalid("data", "must be true or false")
	}
	filter = maps.Clone(filters)
	if cursor != "" {
		filter.Set("cursor", cursor)
	}
	return func(ctx context.Context) (any, error) {
		d := rejectedData{Data: data == "true" && auth.SeesPayloads(ctx), First: cursor == ""}
		l, err := p.backend.Rejected(ctx, cursor, lettersPage, d.Data)
		if err != nil {
			return nil, err
		}
		for _, m := range l.Rejected {
			if m.Data = shortened(m.Data); !d.Data {
				m.Data = ""
			}
			d.Messages = append(d.Messages, m)
		}
		d.Next = nextPage(root+"/rejected", filters, l.Cursor)
		return d, nil
	}, filter, nil
}

// failuresPage serves the page that counts the failed jobs of a group by code and by fingerprint.
type failuresPage struct{ *Console }

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
	return view{name: "failures", title: "Failures of " + titleOf(g), data: d}, nil
}

// codeOf returns the error code in a query or a form; "": jobs with any code.
func codeOf(q url.Values) (string, error) {
	code := q.Get("code")
	if len(code) > httpapi.MaxCodeLength {
		return "", invalid("code", "must be at most %d bytes", httpapi.MaxCodeLength)
	}
	return code, nil
}
