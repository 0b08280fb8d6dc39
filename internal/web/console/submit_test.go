package console

import (
	"bytes"
	"maps"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func upload(w *testConsole, fields map[string]string, name, text string) *httptest.ResponseRecorder {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		require.NoError(w, form.WriteField(field, fields[field]))
	}
	file, err := form.CreateFormFile("file", name)
	require.NoError(w, err)
	_, err = file.Write([]byte(text))
	require.NoError(w, err)
	require.NoError(w, form.Close())
	r := httptest.NewRequestWithContext(w.Context(), http.MethodPost, "/ui/submit", &body)
	r.Header.Set("Content-Type", form.FormDataContentType())
	return w.do(r)
}

// TestSubmit: two jobs from a file (CSV, NDJSON) or a pasted text become a group. The calls of the
// backend are submit, pause, append, seal and resume, in this order.
func TestSubmit(t *testing.T) {
	t.Parallel()
	fields := map[string]string{"type": "NOOP", "id": "g1", "tenant": "acme", "tags": "campaign=spring sale\r\n\r\nregion=eu"}
	for name, c := range map[string]struct{ file, text, pasted, payload string }{
		"csv":    {"a.csv", "to,n\nann,1\nbob,2\n", "", `{"to":"ann","n":"1"}`},
		"ndjson": {"a.ndjson", "{\"payload\":1}\n{\"payload\":2}\n", "", "1"},
		"pasted": {"", "", `{"payload":1}` + "\n" + `{"payload":2}`, "1"},
		"table":  {"", "", "to\nann\nbob", `{"to":"ann"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestConsole(t)
			f := maps.Clone(fields)
			f["jobs"] = c.pasted
			answer := upload(w, f, c.file, c.text)
			require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
			require.Equal(t, "/ui/groups/g1?done=submitted", answer.Header().Get("Location"))
			require.Equal(t, []string{"submit g1 acme NOOP", "pause g1", "append g1 2", "seal g1", "resume g1"}, w.backend.calls)
			require.Equal(t, api.Tags{"campaign": "spring sale", "region": "eu"}, w.backend.tags)
			require.JSONEq(t, c.payload, string(w.backend.jobs["g1"][0].Payload))
			require.Empty(t, w.log.entries, "submissions are not recorded")
		})
	}
}

// TestSubmitSettings: the form has the settings of a submission. A refusal names the field.
func TestSubmitSettings(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	answer := upload(w, map[string]string{
		"type": "NOOP", "other_type": "MINE", "jobs": `{"payload":1}`, "run_at": "2031-01-02T15:04", "max_retries": "0", "job_timeout": "1m30s",
		"failure_threshold": "0.5", "aggregate": "as=n,op=count\r\nas=c, op=sum, field=data.c", "callback_url": "https://example.com/",
		"unique_keys": "true", "priority": "high",
	}, "", "")
	require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
	g := w.backend.submitted
	require.Equal(t, "MINE", g.Type)
	require.Equal(t, time.Date(2031, 1, 2, 15, 4, 0, 0, time.UTC), *g.RunAt)
	require.Equal(t, 0, *g.MaxRetries)
	require.Equal(t, messages.Duration(90*time.Second), g.JobTimeout)
	require.InDelta(t, 0.5, *g.FailureThreshold, 0)
	require.Equal(t, []messages.Aggregate{{As: "n", Op: "count"}, {As: "c", Op: "sum", Field: "data.c"}}, g.Aggregate)
	require.Equal(t, "https://example.com/", g.CallbackURL)
	require.True(t, g.UniqueKeys)
	for field, text := range map[string]string{
		"run_at": "tomorrow", "max_retries": "many", "job_timeout": "soon", "failure_threshold": "2", "aggregate": "as=n,op=odd",
	} {
		fields := map[string]string{"type": "NOOP", "jobs": `{"payload":1}`, field: text}
		refused(t, upload(w, fields, "", ""), http.StatusUnprocessableEntity, "That can't be used. "+formLabels[field], url.Values{field: {text}})
	}
	for problem, fields := range map[string]map[string]string{
		"Start at is in the past":                     {"run_at": "2026-01-02T03:04"},
		"Aggregates, number 1, as is required":        {"aggregate": "op=count"},
		"choose semicolon under Options of CSV":       {"jobs": "a;b\n1;2"},
		"Column with the jobs' keys names the column": {"jobs": "a,b\n1,2", "key_column": "c"},
		"is a JSON array":                             {"jobs": `[{"payload":1}]`},
		"Type is required":                            {"type": ""},
	} {
		all := map[string]string{"type": "NOOP", "jobs": `{"payload":1}`}
		maps.Copy(all, fields)
		d := refused(t, upload(w, all, "", ""), http.StatusUnprocessableEntity, problem, nil)
		require.Equal(t, 1, strings.Count(d.text, problem))
	}
	refused(t, upload(w, map[string]string{"type": "NOOP", "jobs": "a\n1"}, "a.csv", "a\n1\n"), http.StatusUnprocessableEntity, "choose one of the two", nil)
	refused(t, upload(w, map[string]string{"type": "NOOP"}, "a.json", "[]"), http.StatusUnprocessableEntity, "is a JSON array", nil)
	upload(w, map[string]string{"type": "NOOP", "jobs": `{"payload":1}`, "failure_threshold": "10%"}, "", "")
	require.InDelta(t, 0.1, *w.backend.submitted.FailureThreshold, 0)
	upload(w, map[string]string{"type": "NOOP", "jobs": `{"payload":1}`, "aggregate": `[{"as":"n","op":"count"}]`}, "", "")
	require.Equal(t, []messages.Aggregate{{As: "n", Op: "count"}}, w.backend.submitted.Aggregate)
}

// TestFileIsTheLastField: the server reads the file while it arrives, so all fields come before it.
func TestFileIsTheLastField(t *testing.T) {
	w := parallel(t)
	last := ""
	for _, e := range w.page("/ui/submit").all("") {
		if name := attribute(e, "name"); slices.Contains([]string{"input", "select", "textarea"}, e.Data) && name != "" && name != "next" {
			last = name
		}
	}
	require.Equal(t, "file", last)
}

// TestFormsOfAnOutageHaveTheirNames: if an outage makes a page show its last data, its form gets an
// id of its own, and not the one of the page that was shown before.
func TestFormsOfAnOutageHaveTheirNames(t *testing.T) {
	w := parallel(t)
	first := formIDOf(w.page("/ui/submit"))
	w.backend.err = api.ErrUnavailable
	answer := w.get("/ui/submit")
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	second := formIDOf(parse(t, answer.Body.String()))
	require.NotEmpty(t, second)
	require.NotEqual(t, first, second)
}

// TestSubmitRefuses: a wrong line in a short file, or a wrong field, leads to 422 without a group.
// A wrong line late in a long file, or a full backlog, cancels the group. The page names the line.
func TestSubmitRefuses(t *testing.T) {
	t.Parallel()
	good := map[string]string{"type": "NOOP", "id": "g1"}
	late := `{"payload":"` + strings.Repeat("x", maxPasted/5) + "\"}\n" // the bad line is not among the first bytes
	for name, c := range map[string]struct {
		fields     map[string]string
		file, text string
		want       string
		calls      []string
	}{
		"a bad line": {good, "a.ndjson", "{\"payload\":1}\n{\"x\"}\n", "1 line is no job, so no group was created. line 2", []string{}},
		"late":       {good, "a.ndjson", strings.Repeat(late, 7) + "{\"x\"}\n", "1 line is no job, so the group g1 was cancelled, with 7 jobs. line 8", nil},
		"no rows":    {good, "a.csv", "to\n", "The text has no jobs", []string{}},
		"a word":     {map[string]string{"type": "NOOP", "jobs": "hello"}, "", "", "The text has no jobs", []string{}},
		"same names": {good, "a.csv", "to,to\na,b\n", "repeats the name", []string{}},
		"no key":     {map[string]string{"type": "NOOP", "jobs": "to\nann", "key_column": "id"}, "", "", "id", []string{}},
		"no type":    {map[string]string{"id": "g1"}, "a.csv", "to\na\n", "Type is required", []string{}},
		"no jobs":    {good, "", "", "The form has no jobs", []string{}},
		"long field": {map[string]string{"type": strings.Repeat("x", 600)}, "a.csv", "to\na\n", "Type must be at most 512 bytes", []string{}},
		"delimiter":  {map[string]string{"type": "NOOP", "delimiter": "x"}, "a.csv", "to\na\n", "Delimiter", []string{}},
		"tags":       {map[string]string{"type": "NOOP", "tags": "a=b\r\nspring"}, "a.csv", "to\na\n", "Tags must be KEY=VALUE", []string{}},
		"types":      {map[string]string{"type": "NOOP", "types": "x"}, "a.csv", "to\na\n", "Types of columns", []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestConsole(t)
			answer := upload(w, c.fields, c.file, c.text)
			require.Equal(t, http.StatusUnprocessableEntity, answer.Code, answer.Body.String())
			require.Contains(t, parse(t, answer.Body.String()).text, c.want)
			if c.calls != nil {
				require.ElementsMatch(t, c.calls, w.backend.calls)
			} else {
				require.Contains(t, w.backend.calls, "cancel g1")
			}
		})
	}
	w := newTestConsole(t)
	w.backend.refuse = &api.BackpressureError{RetryAfter: time.Second, Reason: "the backlog is full"}
	answer := upload(w, good, "a.csv", "to\na\n")
	require.Contains(t, answer.Body.String(), "the backlog is full")
	require.Contains(t, w.backend.calls, "cancel g1")
	require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/submit", url.Values{"type": {"NOOP"}}).Code)
}

// typed returns the values of the page's form fields, by name.
func (d document) typed() map[string]string {
	values := map[string]string{}
	for _, e := range d.all("") {
		name := attribute(e, "name")
		has := func(attribute string) bool {
			return slices.ContainsFunc(e.Attr, func(a html.Attribute) bool { return a.Key == attribute })
		}
		switch {
		case e.Data == "input" && (attribute(e, "type") != "checkbox" || has("checked")):
			values[name] = attribute(e, "value")
		case e.Data == "textarea" && e.FirstChild != nil:
			values[name] = e.FirstChild.Data
		case e.Data == "option" && has("selected"):
			value := attribute(e, "value")
			if !has("value") {
				value = e.FirstChild.Data
			}
			values[attribute(e.Parent, "name")] = value
		}
	}
	return values
}

// refused checks the answer to a refused form, and returns the parsed page: it is the page of the
// form, with the problem and with the values in want, and without a live topic.
func refused(t *testing.T, answer *httptest.ResponseRecorder, status int, problem string, want url.Values) document {
	t.Helper()
	require.Equal(t, status, answer.Code, answer.Body.String())
	d := parse(t, answer.Body.String())
	said := false
	for _, e := range d.all("div") {
		said = said || attribute(e, "id") == "refused" && attribute(e, "role") == "alert"
	}
	require.True(t, said)
	require.Contains(t, d.text, problem)
	typed := d.typed()
	for name := range want {
		require.Equal(t, want.Get(name), typed[name], name)
	}
	require.Empty(t, attribute(d.all("body")[0], "data-topic"))
	return d
}

func TestRefusedFormsKeepWhatWasTyped(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		path    string
		form    url.Values
		problem string
	}{
		"key": {"/ui/keys", url.Values{
			"form_id": {"a"}, "role": {"producer"}, "tenant": {"acme"}, "name": {hostile[:20]}, "payloads": {"true"}, "days": {"0"},
		}, "days must be 1 to 3650"},
		"tenant":      {"/ui/tenants/acme", url.Values{"rps": {"1.5x"}, "weight": {"3"}, "base_priority": {"7"}}, "rps"},
		"recalibrate": {"/ui/rooms/sale/recalibrate", url.Values{"capacity": {"12"}, "stock": {"many"}}, "stock must be"},
		"user":        {"/ui/rooms/sale/users", url.Values{"user": {"a b"}}, "user must"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := as(t, admin)
			refused(t, w.post(c.path, c.form), http.StatusUnprocessableEntity, c.problem, c.form)
			require.NotContains(t, w.get(strings.TrimSuffix(strings.TrimSuffix(c.path, "/users"), "/recalibrate")).Body.String(), `id="refused"`)
		})
	}
	w := as(t, admin)
	preview := url.Values{"rps": {"x"}, "weight": {"3"}, "base_priority": {"7"}}
	refused(t, w.get("/ui/tenants/acme?preview=true&"+preview.Encode()), http.StatusUnprocessableEntity, "rps", preview)

	// A form that was sent before comes back with a new id, and with what was typed.
	good := url.Values{"form_id": {"a"}, "role": {"metrics"}, "name": {"mine"}}
	require.Equal(t, http.StatusOK, w.post("/ui/keys", good).Code)
	d := refused(t, w.post("/ui/keys", good), http.StatusConflict, "was sent before", url.Values{"name": {"mine"}, "role": {"metrics"}})
	require.NotContains(t, []string{"", "a"}, formIDOf(d))
	answer := w.post("/ui/rooms/none/users", url.Values{"user": {"a b"}})
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	require.NotContains(t, answer.Body.String(), `id="refused"`, "there is no page of such an event")
}

// TestRefusedSubmissionsKeepWhatWasTyped: after a wrong line, and after an outage if the page was
// shown before, the form comes back with its fields, its id and the pasted text.
func TestRefusedSubmissionsKeepWhatWasTyped(t *testing.T) {
	t.Parallel()
	fields := map[string]string{
		"form_id": "f-1", "type": "NOOP", "tenant": "acme", "name": hostile, "priority": "high", "delimiter": ";",
		"types": "n:number", "key_column": "id", "jobs": "id;n\n1;x </textarea><script>",
	}
	want := url.Values{}
	for name, value := range fields {
		want.Set(name, value)
	}
	w := newTestConsole(t)
	d := refused(t, upload(w, fields, "", ""), http.StatusUnprocessableEntity, "1 line is no job, so no group was created", want)
	require.Contains(t, d.text, "Choose the file again")
	open := false
	for _, e := range d.all("details") {
		open = open || attribute(e, "id") == "csv-options" && len(e.Attr) == 2
	}
	require.True(t, open, "the options that were typed are seen")

	w.page("/ui/submit")
	w.backend.err = api.ErrUnavailable // the page of the form can't be read: its last data serve
	fields["jobs"] = "id;n\n1;2"
	want.Set("jobs", fields["jobs"])
	refused(t, upload(w, fields, "", ""), http.StatusServiceUnavailable, "look before you repeat it", want)
	w = newTestConsole(t)
	w.backend.err = api.ErrUnavailable
	answer := upload(w, fields, "", "")
	require.Equal(t, http.StatusServiceUnavailable, answer.Code, "without a page of the form, the page says only the problem")
	require.NotContains(t, answer.Body.String(), `id="refused"`)
}
