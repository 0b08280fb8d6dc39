package console

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
)

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
