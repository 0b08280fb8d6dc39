package console

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

const (
	maxField  = 512 // most bytes of a field of the form, but tags and jobs
	maxTags   = 2 << 10
	maxPasted = 1 << 20 // most bytes of jobs that are pasted
)

// submitPage shows the form that submits a group, and creates the group when the form is sent. Its
// backend writes no activity log, because submissions are not recorded there.
type submitPage struct {
	backend httpapi.Backend
	decoder messages.Decoder
}

// submitData is the data of the form that submits a group.
type submitData struct {
	Types       []string // that workers serve
	Tenant      string   // the only tenant that the reader may submit for; "": any
	MaxPasted   int
	Priorities  []messages.Lane
	SomePayload string
	query       url.Values
}

// Given returns the value of a field that a link to the form has given.
func (d submitData) Given(name string) string { return d.query.Get(name) }

// FormID returns a new random id for each rendering of the form. A form that is sent twice creates
// one group. Copies of the form have different ids, even if an outage shows the same data in both,
// because two files must not count as one submission.
func (submitData) FormID() string { return rand.Text() }

func (p submitPage) form(r *http.Request) (view, error) {
	who, _ := auth.From(r.Context())
	d := submitData{
		MaxPasted: maxPasted, SomePayload: `{"payload": {"to": "ann@example.com"}}`,
		Priorities: []messages.Lane{messages.LaneNormal, messages.LaneHigh, messages.LaneLow}, query: r.URL.Query(),
	}
	if who.Tenant != auth.AllTenants {
		d.Tenant = who.Tenant
	}
	if who.May(auth.ReadMetrics) {
		s, err := p.backend.Stats(r.Context())
		if err != nil {
			return view{}, err
		}
		for _, t := range s.Types {
			if t.Workers > 0 {
				d.Types = append(d.Types, t.Type)
			}
		}
	}
	if given := d.Given("type"); given != "" && !slices.Contains(d.Types, given) {
		d.Types = append(d.Types, given)
	}
	return view{name: "submit", title: "Submit", data: d}, nil
}

// submit serves the form. Its error is a formError, which has the values of the fields.
func (p submitPage) submit(ctx context.Context, r *http.Request) (string, error) {
	fields := map[string]string{}
	to, err := p.submitForm(ctx, r, fields)
	if err != nil {
		return "", &formError{fields, err}
	}
	return to, nil
}

// submitForm creates a group from the form's fields, and appends the jobs of the pasted text, or
// those of the file while it arrives. It stores the values of the fields in fields. The fields must
// come before the file, as they do in the form.
func (p submitPage) submitForm(ctx context.Context, r *http.Request, fields map[string]string) (string, error) {
	parts, err := r.MultipartReader()
	if err != nil {
		return "", invalid("The form", "must be sent as multipart/form-data")
	}
	for {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", invalid("The form", "ended before it was complete")
		}
		if part.FormName() == "file" {
			// a form without a file has an empty one
			first := make([]byte, 1)
			n, err := io.ReadFull(part, first)
			csv := isCSV(part)
			switch {
			case part.FileName() == "" || n == 0 && errors.Is(err, io.EOF):
				continue
			case fields["jobs"] != "":
				return "", invalid("The form", "has a file and pasted jobs: choose one of the two")
			case !csv && first[0] == '[':
				return "", errArray
			}
			text := io.MultiReader(strings.NewReader(string(first[:n])), part)
			return p.submitJobs(ctx, fields, httpapi.Load{CSV: csv, Text: text})
		}
		most := int64(maxField)
		switch part.FormName() {
		case "tags", "aggregate", "callback_url":
			most = maxTags
		case "jobs":
			most = maxPasted
		}
		text, err := io.ReadAll(io.LimitReader(part, most+1))
		switch {
		case err != nil:
			return "", invalid("The form", "ended before it was complete")
		case int64(len(text)) > most:
			return "", invalid(part.FormName(), "must be at most %d bytes; a file may be larger", most)
		case len(fields) > 30:
			return "", invalid("The form", "has too many fields")
		}
		fields[part.FormName()] = strings.TrimSpace(string(text))
	}
	if fields["jobs"] == "" {
		return "", invalid("The form", "has no jobs: choose a file, or paste some")
	}
	if strings.HasPrefix(fields["jobs"], "[") {
		return "", errArray
	}
	csv := !strings.HasPrefix(fields["jobs"], "{")
	return p.submitJobs(ctx, fields, httpapi.Load{CSV: csv, Text: strings.NewReader(fields["jobs"] + "\n")})
}

// isCSV reports whether to read a file as CSV: always, unless its name or media type says NDJSON or
// JSON.
func isCSV(part *multipart.Part) bool {
	name := strings.ToLower(part.FileName())
	for _, ending := range []string{".ndjson", ".jsonl", ".json"} {
		if strings.HasSuffix(name, ending) {
			return false
		}
	}
	return !strings.Contains(part.Header.Get("Content-Type"), "json")
}

// submitJobs creates a group from the form's fields, and appends the jobs of a text.
func (p submitPage) submitJobs(ctx context.Context, fields map[string]string, load httpapi.Load) (string, error) {
	group, err := submissionOf(fields)
	if err != nil {
		return "", err
	}
	if fields["key_column"] != "" {
		load.Table.Key = fields["key_column"]
	}
	if load.Table.Delimiter, err = records.ParseDelimiter(fields["delimiter"]); err != nil {
		return "", invalid("delimiter", "%v", err)
	}
	if load.Table.Types, err = records.ParseColumnTypes(fields["types"]); err != nil {
		return "", invalid("types", "%v", err)
	}
	return p.store(ctx, group, fields["form_id"], load)
}

// submissionOf returns the fields of a submission, as JSON values that the decoder then checks.
func submissionOf(fields map[string]string) (map[string]any, error) {
	group := map[string]any{"unique_keys": fields["unique_keys"] == "true"}
	for _, name := range []string{"id", "tenant", "name", "priority", "callback_url"} {
		group[name] = fields[name]
	}
	if group["type"] = fields["type"]; fields["other_type"] != "" {
		group["type"] = fields["other_type"]
	}
	for _, name := range []string{"max_retries", "failure_threshold", "job_timeout"} {
		var n json.Number
		text := fields[name]
		if part, percent := strings.CutSuffix(text, "%"); percent && name == "failure_threshold" {
			if x, err := strconv.ParseFloat(strings.TrimSpace(part), 64); err == nil {
				text = strconv.FormatFloat(x/100, 'f', -1, 64)
			}
		}
		if json.Unmarshal([]byte(text), &n) == nil {
			group[name] = n
		} else if text != "" {
			group[name] = text
		}
	}
	if at := fields["run_at"]; at != "" {
		if _, err := time.Parse(minute, at); err == nil { // as browsers send it
			at += ":00Z"
		}
		if start, err := time.Parse(time.RFC3339, at); err == nil && time.Since(start) > time.Minute {
			return nil, invalid("run_at", "is in the past (it is UTC): choose a later time, or none to start at once")
		}
		group["run_at"] = at
	}
	tags, err := api.ParseTags(withoutBlank(linesOf(fields["tags"])))
	if err != nil {
		return nil, invalid("tags", "%v", err)
	}
	if group["tags"] = tags; fields["aggregate"] != "" {
		if group["aggregate"], err = aggregatesOf(fields["aggregate"]); err != nil {
			return nil, err
		}
	}
	return group, nil
}

func linesOf(text string) []string {
	return strings.FieldsFunc(text, func(c rune) bool { return c == '\r' || c == '\n' })
}

// aggregatesOf parses aggregates: JSON as the API has it, or lines such as as=cost,op=sum,field=data.cost,
// as the command line has them.
func aggregatesOf(text string) (any, error) {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text), nil
	}
	var all []map[string]string
	for _, line := range withoutBlank(linesOf(text)) {
		a := map[string]string{}
		for part := range strings.SplitSeq(line, ",") {
			name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
			if _, twice := a[name]; !ok || twice {
				return nil, invalid("aggregate", "must be JSON, or lines such as as=cost,op=sum,field=data.cost, not %.64q", line)
			}
			a[name] = value
		}
		all = append(all, a)
	}
	return all, nil
}

// again creates a group of the failed jobs of a group that has ended, with their payloads and keys.
func (p submitPage) again(ctx context.Context, r *http.Request) (string, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	r.Body = io.NopCloser(io.LimitReader(r.Body, maxField))
	if err := r.ParseForm(); err != nil || r.PostForm.Get("jobs") != "failed" {
		return "", invalid("jobs", "must be failed: the payloads of other jobs are not kept")
	}
	g, _, err := p.backend.GroupSummary(ctx, id, 0)
	switch {
	case err != nil:
		return "", err
	case !auth.SeesPayloads(ctx):
		return "", errForbidden
	case !g.Status.Ended() || g.Counts.Failed == 0:
		return "", invalid("The group", "must have ended, with failed jobs")
	}
	ctx, cancel := context.WithCancel(ctx)
	text, lines := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		out := json.NewEncoder(lines)
		out.SetEscapeHTML(false) // payloads stay as they were
		_, err := p.backend.Failures(ctx, id, messages.FailureQuery{Payloads: true}, func(f api.Failure) error {
			if f.PayloadLost {
				return nil
			}
			return out.Encode(messages.Job{Payload: f.Payload, Key: f.Key, Type: f.Type})
		})
		_ = lines.CloseWithError(err)
	}()
	defer func() {
		cancel()
		_ = text.Close()
		<-ended
	}()
	same := map[string]any{
		"type": g.Type, "tenant": g.Tenant, "name": g.Name, "tags": g.Tags, "priority": g.Priority,
		"callback_url": g.CallbackURL, "max_retries": g.MaxRetries, "failure_threshold": g.FailureThreshold,
		"unique_keys": g.UniqueKeys,
	}
	if g.JobTimeout != "" {
		same["job_timeout"] = g.JobTimeout
	}
	return p.store(ctx, same, r.PostForm.Get("form_id"), httpapi.Load{Text: text})
}

// store creates a group, appends the jobs of a text and seals it. It creates no group if the first
// maxPasted bytes have no job, or a line that is no job. The group stays paused until all lines are
// stored, so that no job runs if a later line is wrong. In that case, and if not all jobs could be
// stored, the group is cancelled.
func (p submitPage) store(
	ctx context.Context, group map[string]any, formID string, load httpapi.Load,
) (string, error) {
	check, err := httpapi.CheckLoad(p.decoder, &load, maxPasted)
	switch {
	case err != nil:
		return "", err
	case check.RejectedTotal > 0:
		return "", invalid(plural(check.RejectedTotal, "line is no job", "lines are no jobs")+",",
			"so no group was created. %v", &rejectedError{check})
	case check.Accepted == 0:
		return "", errNoJobs
	}
	given, _ := group["id"].(string)
	if given == "" {
		group["id"] = uuid.Must(uuid.NewV7()).String()
	}
	body, err := json.Marshal(group)
	if err != nil {
		return "", fmt.Errorf("encode a submission: %w", err)
	}
	g, err := p.decoder.DecodeSubmit(body)
	if err != nil {
		return "", err
	}
	id := g.ID
	o := httpapi.SubmitOptions{GeneratedID: given == "", IdempotencyKey: formID}
	if g.ID, err = p.create(ctx, g, o); err != nil {
		return "", err
	}
	if g.ID != id { // the form was sent before, such as by a double click
		return root + "/groups/" + g.ID + "?done=submitted-before", nil
	}
	if _, err := p.backend.Pause(ctx, g.ID); err != nil {
		return "", p.undo(ctx, g.ID, api.Appended{}, err)
	}
	load.Group = g.ID
	answer, err := httpapi.AppendAll(ctx, p.backend, p.decoder, load)
	if err == nil && answer.Accepted == 0 {
		err = errNoJobs
	}
	if err != nil {
		return "", p.undo(ctx, g.ID, answer, err)
	}
	if answer.RejectedTotal > 0 {
		return "", p.undo(ctx, g.ID, answer, &rejectedError{answer})
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), actionTimeout) // also if the browser has left
	defer cancel()
	for _, do := range []command{p.seal, p.backend.Resume} {
		if _, err := do(ctx, g.ID); err != nil {
			return "", fmt.Errorf("group %s has its %d jobs, and is paused: %w", g.ID, answer.Accepted, err)
		}
	}
	return root + "/groups/" + g.ID + "?done=submitted", nil
}

// create creates a group and returns its id. If this copy of the form has already created a group,
// it returns that group's id. It creates a new group nevertheless if that group was cancelled, as
// after a bad line, or if fields of the form have changed since.
func (p submitPage) create(
	ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions,
) (id string, err error) {
	own := g.ID
	a, err := p.backend.Submit(ctx, g, o)
	if err == nil && a.ID != own {
		first, err := p.backend.Group(ctx, a.ID)
		if err != nil || first.Status != api.StatusCancelled {
			return a.ID, err
		}
	} else if err == nil || o.IdempotencyKey == "" || !errors.Is(err, api.ErrConflict) {
		return own, err
	}
	g.ID, o.IdempotencyKey = own, ""
	_, err = p.backend.Submit(ctx, g, o)
	return own, err
}

// formLabels are the names of the form's fields, by those of the API.
var formLabels = map[string]string{
	"type": "Type", "other_type": "Type", "id": "Id", "tenant": "Tenant", "name": "Name", "tags": "Tags", "priority": "Priority",
	"run_at": "Start at", "max_retries": "Most retries of a job", "job_timeout": "Timeout of a job",
	"failure_threshold": "Failure threshold", "aggregate": "Aggregates", "callback_url": "Callback URL",
	"delimiter": "Delimiter", "types": "Types of columns", "key_column": "Column with the jobs' keys", "jobs": "Jobs", "body": "Jobs",
}

// labelOf returns the label of a field, such as "Aggregates, number 1, as" for aggregate[0].as.
func labelOf(field string) string {
	name, rest, _ := strings.Cut(field, "[")
	label := formLabels[name]
	if number, part, inside := strings.Cut(rest, "]"); inside && label != "" {
		n, _ := strconv.Atoi(number)
		label += fmt.Sprintf(", number %d%s", n+1, strings.Replace(part, ".", ", ", 1))
	}
	return cmp.Or(label, field)
}

// formWords replaces the words of a problem that are not about a form.
var formWords = strings.NewReplacer(
	"send the query parameter delimiter=%3B", "choose semicolon under Options of CSV",
	"send the query parameter delimiter=%09", "choose tab under Options of CSV",
	"send the query parameter delimiter=%7C", "choose | under Options of CSV",
	"required", "is required",
)

// say puts the problem in the words of the form, once: Fields are left out if Detail can name the only
// one, and otherwise Detail is.
func (f *failure) say(err error) {
	_, form := errors.AsType[*formError](err)
	for i, e := range f.Fields {
		if form {
			f.Fields[i] = api.FieldError{Field: labelOf(e.Field), Problem: strings.TrimPrefix(formWords.Replace(e.Problem), e.Field+" ")}
		}
	}
	switch {
	case len(f.Fields) > 1:
		f.Detail = ""
	case len(f.Fields) == 1:
		if one := f.Fields[0]; one.Problem != formWords.Replace(f.Detail) {
			f.Detail = one.Field + " " + one.Problem
		} else {
			f.Detail = one.Problem
		}
		f.Fields = nil
	}
}

var errArray = invalid("The text", "is a JSON array, but NDJSON has one object a line")

var errNoJobs = invalid("The text",
	"has no jobs: a line of NDJSON is {\"payload\": …}, and CSV has a row of names and then rows of values")

// rejectedError says which lines of a text are no jobs.
type rejectedError struct{ api.Appended }

func (e *rejectedError) Error() string {
	const shown = 10
	lines := make([]string, 0, shown)
	for _, l := range e.Rejected[:min(len(e.Rejected), shown)] {
		lines = append(lines, fmt.Sprintf("line %d: %s", l.Line, l.Error))
	}
	return strings.Join(lines, "; ")
}

func (p submitPage) seal(ctx context.Context, id string) (api.Accepted, error) {
	return p.backend.Seal(ctx, id, nil)
}

// undo cancels a group whose text could not be appended completely. It returns an error that says
// so, or err itself if the API has no problem for err.
func (p submitPage) undo(ctx context.Context, id string, answer api.Appended, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), actionTimeout)
	defer cancel()
	_, failed := p.backend.Cancel(ctx, id)
	state := "was cancelled"
	if failed != nil {
		state = "stays open"
	}
	var rejected *rejectedError
	if errors.As(err, &rejected) {
		return invalid(plural(answer.RejectedTotal, "line is no job", "lines are no jobs")+",",
			"so the group %s %s, with %s. %v", id, state, plural(answer.Accepted, "job", "jobs"), err)
	}
	if problem, _, known := httpapi.ProblemOf(err); known {
		return invalid("The jobs", "could not be stored: %s. The group %s %s, with %d jobs", problem.Detail, id, state,
			answer.Accepted)
	}
	return err
}
