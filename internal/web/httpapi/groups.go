package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
)

const (
	defaultLimit = 50
	maxLimit     = 1000
	maxCursor    = 512 // in bytes
	idProblem    = "must " + api.IDRule
)

func (s *server) submitGroup(w http.ResponseWriter, r *http.Request) error {
	if _, err := mediaType(r, "application/json"); err != nil {
		return err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return err
	}
	body, release, err := s.readBody(r, messages.MaxMessageBytes)
	defer release()
	if err != nil {
		return err
	}
	g, err := s.Decoder.DecodeSubmit(body)
	if err != nil {
		return err
	}
	named := g.ID != ""
	if !named {
		g.ID = uuid.Must(uuid.NewV7()).String()
	}
	var a api.Accepted
	err = s.write(r.Context(), func(ctx context.Context) (err error) {
		a, err = s.Backend.Submit(ctx, g, SubmitOptions{
			IdempotencyKey: key,
			GeneratedID:    !named,
			TraceParent:    traceParent(r),
		})
		return err
	})
	if err != nil {
		return err
	}
	accept(w, withLinks(a))
	return nil
}

// accept answers a submission or a command with status 202, and with the header Location if the
// answer is an api.Accepted.
func accept(w http.ResponseWriter, answer any) {
	if a, ok := answer.(api.Accepted); ok {
		w.Header().Set("Location", a.Links["self"])
	}
	web.WriteJSON(w, http.StatusAccepted, "application/json", answer)
}

// withLinks adds the links to the group and to its events.
func withLinks(a api.Accepted) api.Accepted {
	self := "/v1/groups/" + a.ID
	a.Links = map[string]string{"self": self, "events": self + "/events"}
	return a
}

func pathID(r *http.Request) (string, error) { return pathValue(r, "id") }

// pathValue returns the id in a path parameter. That of a callback is longer than others.
func pathValue(r *http.Request, name string) (string, error) {
	id := r.PathValue(name)
	switch {
	case name == "callback" && api.GroupOfEvent(id) == "":
		return "", invalidField(name, "must be the id of an event, such as my-group.1.completed")
	case name != "callback" && !api.ValidID(id):
		return "", invalidField(name, idProblem)
	}
	return id, nil
}

// commandOn returns the handler of a command on the object whose id is in the path parameter param; "": on
// none. read reads the fields of the JSON body, which is optional; nil: it has none. do runs to its end
// even if the client disconnects.
func commandOn[B any](
	s *server, param string, read func(*fields) B,
	do func(ctx context.Context, id string, body B) (answer any, err error),
) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) (err error) {
		var id string
		if param != "" {
			if id, err = pathValue(r, param); err != nil {
				return err
			}
		}
		f, err := readOptionalFields(s, r)
		if err != nil {
			return err
		}
		var body B
		if read != nil {
			body = read(f)
		}
		if err := f.err(); err != nil {
			return err
		}
		var answer any
		err = s.write(r.Context(), func(ctx context.Context) (err error) {
			answer, err = do(ctx, id, body)
			return err
		})
		if err != nil {
			return err
		}
		accept(w, answer)
		return nil
	}
}

// groupCommand returns the handler of a command on a group without arguments.
func (s *server) groupCommand(do func(context.Context, string) (api.Accepted, error)) web.Handler {
	return commandOn(s, "id", nil, func(ctx context.Context, id string, _ struct{}) (any, error) {
		a, err := do(ctx, id)
		return withLinks(a), err
	})
}

const (
	maxRetryCodes = 100
	maxRetryJobs  = 1000
)

// MaxCodeLength is the most bytes of an error code.
const MaxCodeLength = 128

func readRetryChoice(f *fields) api.RetryChoice {
	return api.RetryChoice{
		Codes: listOf[string](f, "codes", "error codes, which are strings"),
		Jobs:  listOf[int64](f, "jobs", "ordinals of jobs, whole numbers from 0"),
	}
}

// erase reads the key from the body, so that no log of requests has it.
func (s *server) erase(r *http.Request) (api.Erasure, error) {
	tenant, err := pathID(r)
	if err != nil {
		return api.Erasure{}, err
	}
	f, err := readFields(s, r)
	if err != nil {
		return api.Erasure{}, err
	}
	key, cursor := f.text("key"), f.text("cursor")
	if !messages.ValidJobKey(key) {
		f.problem("key", "must "+messages.JobKeyRule)
	}
	if err := f.err(); err != nil {
		return api.Erasure{}, err
	}
	var e api.Erasure
	err = s.write(r.Context(), func(ctx context.Context) (err error) {
		e, err = s.Backend.Erase(ctx, tenant, key, cursor)
		return err
	})
	e.Left = orEmpty(e.Left)
	return e, err
}

func (s *server) deleteGroup(ctx context.Context, id string) (d api.Deletion, err error) {
	err = s.write(ctx, func(ctx context.Context) (err error) {
		d, err = s.Backend.Delete(ctx, id)
		return err
	})
	return d, err
}

// retryGroup returns the function that opens the next round of a completed or failed group. Without
// a body, all failed jobs run again.
func retryGroup(b Backend) func(context.Context, string, api.RetryChoice) (any, error) {
	return func(ctx context.Context, id string, choice api.RetryChoice) (any, error) {
		switch {
		case len(choice.Codes) > maxRetryCodes:
			return nil, invalidField("codes", fmt.Sprintf("must be at most %d codes", maxRetryCodes))
		case len(choice.Jobs) > maxRetryJobs:
			return nil, invalidField("jobs", fmt.Sprintf("must be at most %d ordinals", maxRetryJobs))
		case choice.Codes != nil && len(choice.Codes) == 0 && len(choice.Jobs) == 0:
			return nil, invalidField("codes", "must not be empty: leave it out to retry all failed jobs")
		case choice.Jobs != nil && len(choice.Jobs) == 0 && len(choice.Codes) == 0:
			return nil, invalidField("jobs", "must not be empty: leave it out to retry all failed jobs")
		}
		for i, code := range choice.Codes {
			if code == "" || len(code) > MaxCodeLength {
				field := fmt.Sprintf("codes[%d]", i)
				return nil, invalidField(field, fmt.Sprintf("must be 1 to %d bytes", MaxCodeLength))
			}
		}
		for i, ordinal := range choice.Jobs {
			if ordinal < 0 || ordinal >= messages.MaxTotal {
				field := fmt.Sprintf("jobs[%d]", i)
				return nil, invalidField(field, "must be the ordinal of a job, a whole number from 0")
			}
		}
		a, err := b.Retry(ctx, id, choice)
		return withLinks(a), err
	}
}

func readTotal(f *fields) *int64 { return f.upTo("total", messages.MaxTotal) }

func (s *server) sealGroup(ctx context.Context, id string, total *int64) (any, error) {
	a, err := s.Backend.Seal(ctx, id, total)
	return withLinks(a), err
}

// show returns the handler of a call that answers with what get returns, as JSON.
func show[T any](get func(r *http.Request) (T, error)) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		v, err := get(r)
		if err != nil {
			return err
		}
		web.WriteJSON(w, http.StatusOK, "application/json", v)
		return nil
	}
}

// showByID returns the handler of a call without a body, such as a GET: it answers with what get
// returns for the id in the path.
func showByID[T any](get func(ctx context.Context, id string) (T, error)) web.Handler {
	return show(func(r *http.Request) (v T, err error) {
		id, err := pathID(r)
		if err != nil {
			return v, err
		}
		return get(r.Context(), id)
	})
}

// showPage returns the handler of a list: it answers with the page that the query's cursor and
// limit select.
func showPage[T any](list func(ctx context.Context, cursor string, limit int) (T, error)) web.Handler {
	return show(func(r *http.Request) (page T, err error) {
		cursor, limit, err := pageParams(r)
		if err != nil {
			return page, err
		}
		return list(r.Context(), cursor, limit)
	})
}

func (s *server) getGroup(ctx context.Context, id string) (api.Group, error) {
	g, err := s.Backend.Group(ctx, id)
	return withEmptyMaps(g), err
}

// pageParams parses the query parameters of a list: cursor and limit.
func pageParams(r *http.Request) (cursor string, limit int, err error) {
	q := r.URL.Query()
	cursor, limit = q.Get("cursor"), defaultLimit
	if len(cursor) > maxCursor {
		return "", 0, invalidField("cursor", "must be the cursor of an earlier page")
	}
	if v := q.Get("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > maxLimit {
			return "", 0, invalidField("limit", fmt.Sprintf("must be 1 to %d", maxLimit))
		}
	}
	return cursor, limit, nil
}

func (s *server) getJob(r *http.Request) (j api.Job, err error) {
	id, err := pathID(r)
	if err != nil {
		return j, err
	}
	ordinal, err := pathOrdinal(r)
	if err != nil {
		return j, err
	}
	return s.Backend.Job(r.Context(), id, ordinal)
}

func pathOrdinal(r *http.Request) (int64, error) {
	ordinal, err := strconv.ParseUint(r.PathValue("ordinal"), 10, 63)
	if err != nil {
		return 0, invalidField("ordinal", "must be a whole number from 0")
	}
	return int64(ordinal), nil
}

func (s *server) cancelJob(w http.ResponseWriter, r *http.Request) error {
	ordinal, err := pathOrdinal(r)
	if err != nil {
		return err
	}
	return commandOn(s, "id", nil, func(ctx context.Context, id string, _ struct{}) (any, error) {
		return s.Backend.CancelJob(ctx, id, ordinal)
	})(w, r)
}

func (s *server) listDeadLetters(r *http.Request) (l api.DeadLetterList, err error) {
	q := r.URL.Query()
	query := messages.DeadLetterQuery{Tenant: q.Get("tenant"), Group: q.Get("group"), Type: q.Get("type"), Code: q.Get("code")}
	if query.Cursor, query.Limit, err = pageParams(r); err != nil {
		return l, err
	}
	for _, id := range []struct{ field, value string }{
		{"tenant", query.Tenant}, {"group", query.Group}, {"type", query.Type},
	} {
		if id.value != "" && !api.ValidID(id.value) {
			return l, invalidField(id.field, idProblem)
		}
	}
	if len(query.Code) > MaxCodeLength {
		return l, invalidField("code", fmt.Sprintf("must be at most %d bytes", MaxCodeLength))
	}
	if query.Since, err = sinceParam(r.URL.Query()); err != nil {
		return l, err
	}
	l, err = s.Backend.DeadLetters(r.Context(), query)
	l.DeadLetters = orEmpty(l.DeadLetters)
	return l, err
}

func (s *server) getStats(r *http.Request) (api.Stats, error) {
	st, err := s.Backend.Stats(r.Context())
	st.Types, st.Workers, st.Stages = orEmpty(st.Types), orEmpty(st.Workers), orEmpty(st.Stages)
	st.Roles = orEmpty(st.Roles)
	for i := range st.Workers {
		st.Workers[i].Types = orEmpty(st.Workers[i].Types)
		st.Workers[i].CurrentJobs = orEmpty(st.Workers[i].CurrentJobs)
	}
	for i := range st.Stages {
		st.Stages[i].Counts = orEmptyMap(st.Stages[i].Counts)
	}
	return st, err
}

// defaultHistory is how many minutes of the history an answer has if the request names no number.
const defaultHistory = 60

func getScale(b Backend) func(*http.Request) (api.Scale, error) {
	return func(r *http.Request) (api.Scale, error) {
		types, drain := strings.Split(r.URL.Query().Get("type"), ","), api.DefaultDrain
		if len(types) > api.MaxScaleTypes || slices.ContainsFunc(types, func(t string) bool { return !api.ValidID(t) }) {
			return api.Scale{}, invalidField("type", fmt.Sprintf("must be a type, or up to %d with commas between them", api.MaxScaleTypes))
		}
		if text := r.URL.Query().Get("drain"); text != "" {
			var err error
			if drain, err = time.ParseDuration(text); err != nil || drain < api.MinDrain || drain > api.MaxDrain {
				return api.Scale{}, invalidField("drain", fmt.Sprintf(
					"must be a time from %s to %s, such as 60s", api.MinDrain, api.MaxDrain))
			}
		}
		slices.Sort(types)
		return b.Scale(r.Context(), slices.Compact(types), drain)
	}
}

func getHistory(b Backend) func(*http.Request) (api.History, error) {
	return func(r *http.Request) (api.History, error) {
		minutes, err := minutesOf(r, api.MaxHistoryMinutes)
		if err != nil {
			return api.History{}, err
		}
		h, err := b.History(r.Context(), minutes)
		h.Points = orEmpty(h.Points)
		return h, err
	}
}

func getTenantHistory(b Backend) func(*http.Request) (api.TenantHistory, error) {
	return func(r *http.Request) (h api.TenantHistory, err error) {
		id, err := pathID(r)
		if err != nil {
			return h, err
		}
		minutes, err := minutesOf(r, defaultHistory)
		if err != nil {
			return h, err
		}
		h, err = b.TenantHistory(r.Context(), id, minutes)
		h.Points = orEmpty(h.Points)
		return h, err
	}
}

func minutesOf(r *http.Request, most int) (minutes int, err error) {
	minutes = defaultHistory
	if v := r.URL.Query().Get("minutes"); v != "" {
		minutes, err = strconv.Atoi(v)
	}
	if err != nil || minutes < api.MinHistoryMinutes || minutes > most {
		return 0, invalidField("minutes", fmt.Sprintf("must be %d to %d", api.MinHistoryMinutes, most))
	}
	return minutes, nil
}

func getAudit(b Backend) func(*http.Request) (api.AuditState, error) {
	return func(r *http.Request) (api.AuditState, error) {
		st, err := b.Audit(r.Context())
		st.Partitions, st.Violations, st.ByLaw = orEmpty(st.Partitions), orEmpty(st.Violations), orEmptyMap(st.ByLaw)
		return st, err
	}
}

// getIndex answers with links to the API's collections. Browsers are redirected to the console if
// this server has it.
func (s *server) getIndex(w http.ResponseWriter, r *http.Request) error {
	if s.UI != nil && strings.Contains(r.Header.Get("Accept"), "text/html") {
		http.Redirect(w, r, s.Prefix+uiRoot, http.StatusSeeOther)
		return nil
	}
	return show(s.showIndex)(w, r)
}

func (s *server) showIndex(*http.Request) (map[string]any, error) {
	links := map[string]string{
		"groups":       "/v1/groups",
		"tenants":      "/v1/tenants",
		"dead_letters": "/v1/dead-letters",
		"operations":   operationsPath,
		"callbacks":    callbacksPath,
		"guards":       "/v1/guards",
		"stats":        "/v1/stats",
		"openapi":      "/openapi.yaml",
	}
	if s.Rooms != nil {
		links["events"] = "/v1/events"
	}
	return map[string]any{"name": "bulkaction", "version": s.Version, "links": links}, nil
}

// withEmptyMaps replaces nil maps by empty ones, so that the JSON has {} instead of null.
func withEmptyMaps(g api.Group) api.Group {
	g.FailuresByCode = orEmptyMap(g.FailuresByCode)
	g.Aggregate = orEmptyMap(g.Aggregate)
	g.Timestamps = orEmptyMap(g.Timestamps)
	return g
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func orEmptyMap[T any](m map[string]T) map[string]T {
	if m == nil {
		return map[string]T{}
	}
	return m
}

// streamFailures answers with lines of NDJSON, one for each failed job that the query selects. With
// a limit or a cursor they are one page, and the header Link leads to the next one if there is any.
func (s *server) streamFailures(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	q := messages.FailureQuery{Code: query.Get("code")}
	if q.Payloads, err = boolParam(r, "payload"); err != nil {
		return err
	}
	if len(q.Code) > MaxCodeLength {
		return invalidField("code", fmt.Sprintf("must be at most %d bytes", MaxCodeLength))
	}
	lines := func(write func([]byte) error) (next string, err error) {
		return s.Backend.Failures(r.Context(), id, q, func(f api.Failure) error {
			line, err := json.Marshal(f)
			if err != nil {
				return fmt.Errorf("encode failure %d of group %s: %w", f.Ordinal, id, err)
			}
			return write(line)
		})
	}
	if !query.Has("cursor") && !query.Has("limit") {
		return streamLines(r.Context(), w, func(write func([]byte) error) error {
			_, err := lines(write)
			return err
		})
	}
	if q.Cursor, q.Limit, err = pageParams(r); err != nil {
		return err
	}
	var page bytes.Buffer
	next, err := lines(func(line []byte) error {
		_, _ = page.Write(line) // never fails
		return page.WriteByte('\n')
	})
	if err != nil {
		return err
	}
	if next != "" {
		query.Set("cursor", next)
		w.Header().Set("Link", "</v1/groups/"+id+"/failures?"+query.Encode()+`>; rel="next"`)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	_, err = w.Write(page.Bytes())
	return err
}

const (
	defaultBuckets = 500
	maxBuckets     = 1000
)

// getMap returns the function that reads the map of a group's jobs.
func getMap(b Backend) func(*http.Request) (api.JobMap, error) {
	return func(r *http.Request) (m api.JobMap, err error) {
		id, err := pathID(r)
		if err != nil {
			return m, err
		}
		buckets := defaultBuckets
		if v := r.URL.Query().Get("buckets"); v != "" {
			if buckets, err = strconv.Atoi(v); err != nil || buckets < 1 || buckets > maxBuckets {
				return m, invalidField("buckets", fmt.Sprintf("must be 1 to %d", maxBuckets))
			}
		}
		m, err = b.JobMap(r.Context(), id, buckets)
		m.Buckets = orEmpty(m.Buckets)
		return m, err
	}
}

const (
	streamBuffer = 32 << 10    // size of the buffer for an answer, in bytes
	streamDelay  = time.Second // a line flushes the buffer if the last flush is as old as this
)

func (s *server) streamResults(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	return streamLines(r.Context(), w, func(write func([]byte) error) error {
		return s.Backend.Results(r.Context(), id, write)
	})
}

// streamLines answers with the lines that produce writes, as NDJSON. Until the first lines are
// sent, because the buffer is full or streamDelay is over, an error is answered with a problem. A
// later error breaks the connection, so that the client does not mistake a part of the lines for
// all.
func streamLines(
	ctx context.Context, w http.ResponseWriter, produce func(write func(line []byte) error) error,
) error {
	out := bufio.NewWriterSize(w, streamBuffer)
	ctl := http.NewResponseController(w)
	sent := time.Now()
	w.Header().Set("Content-Type", "application/x-ndjson")
	err := produce(func(line []byte) error {
		if err := keyEnded(ctx); err != nil {
			return err
		}
		_, _ = out.Write(line) // a later call returns its error
		if err := out.WriteByte('\n'); err != nil {
			return err
		}
		if time.Since(sent) < streamDelay {
			return nil
		}
		sent = time.Now()
		if err := out.Flush(); err != nil {
			return err
		}
		return ctl.Flush()
	})
	if err != nil {
		return err
	}
	if out.Buffered() == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return out.Flush()
}
