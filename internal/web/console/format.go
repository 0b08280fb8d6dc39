package console

import (
	"fmt"
	"html/template"
	"math"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// functions returns the functions that templates may call. traceURL is Options.TraceURL.
func functions(hasPage func(string) bool, traceURL string) template.FuncMap {
	return template.FuncMap{
		"asset":        assetPath,
		"count":        count,
		"decimal":      decimal,
		"duration":     duration,
		"eventOf":      api.EventOf,
		"endedBar":     endedBar,
		"expected":     expected,
		"hasPage":      hasPage,
		"holdsUp":      holdsUp,
		"hostOf":       hostOf,
		"isoTime":      isoTime,
		"lower":        strings.ToLower,
		"exampleOf":    exampleOf,
		"matches":      matches,
		"milliseconds": func(ms int64) string { return duration(float64(ms) / 1000) },
		"part":         func(of float64) string { return percent(int64(of*1000), 1000) },
		"percent":      percent,
		"pick":         pick,
		"plain":        plainTime,
		"plural":       plural,
		"segment":      url.PathEscape, // of a path
		"doneTo":       doneTo,
		"titleOf":      titleOf,
		"unitOf":       unitOf,
		"sum":          sum,
		"trace":        func(group, ordinal, id string) string { return traceLink(traceURL, group, ordinal, id) },
		"words":        words,
	}
}

// words is a name of the API, such as a state of jobs, in words.
var words = strings.NewReplacer("non_ready", "non-ready", "_", " ").Replace

// holdsUp says whether somebody has to do something before jobs go on that wait for a reason. The
// other reasons are normal while a group runs, so they are not shown as a warning.
func holdsUp(reason string) bool {
	switch reason {
	case "", api.WhyScheduled, api.WhyRetry, api.WhyCongestion, api.WhyResource, api.WhyRate, api.WhyCapacity,
		api.WhyInFlight, api.WhyFairness:
		return false
	}
	return true
}

// traceLink returns traceURL with the placeholders replaced. It returns "" if traceURL is empty, or
// if the value of one of its placeholders is.
func traceLink(to, group, ordinal, id string) string {
	values := map[string]string{"{group}": group, "{ordinal}": ordinal, "{trace_id}": id}
	for name, value := range values {
		if strings.Contains(to, name) && value == "" {
			return ""
		}
	}
	for name, value := range values {
		to = strings.ReplaceAll(to, name, url.QueryEscape(value))
	}
	return to
}

// count formats a whole number, or the one that a pointer points to, with commas between thousands.
func count(n any) string {
	text := fmt.Sprint(reflect.Indirect(reflect.ValueOf(n)))
	sign := ""
	if strings.HasPrefix(text, "-") {
		sign, text = "-", text[1:]
	}
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return sign + text
}

// decimal formats a number, with fewer decimals the larger it is: 0.25, 7.5, 1,234.
func decimal(x float64) string {
	switch size := math.Abs(x); {
	case math.IsNaN(x) || math.IsInf(x, 0):
		return "–"
	case size >= 1e15:
		return strconv.FormatFloat(x, 'g', 4, 64)
	case size >= 100 || x == math.Trunc(x):
		return count(int64(math.Round(x)))
	case size >= 1:
		return trimZeros(strconv.FormatFloat(x, 'f', 1, 64))
	default:
		return trimZeros(strconv.FormatFloat(x, 'g', 2, 64))
	}
}

func trimZeros(text string) string {
	if strings.Contains(text, ".") && !strings.Contains(text, "e") {
		return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// percent formats part as a percentage of whole. A rounded value is never 0% or 100%.
func percent(part, whole int64) string {
	switch {
	case whole <= 0:
		return "–"
	case part == whole:
		return "100%"
	case part == 0:
		return "0%"
	}
	p := 100 * float64(part) / float64(whole)
	if p >= 10 {
		return fmt.Sprintf("%d%%", int(min(p, 99)))
	}
	return fmt.Sprintf("%.1f%%", max(p, 0.1))
}

// duration formats a number of seconds, with at most two units, such as 3 min 5 s.
func duration(seconds float64) string {
	switch {
	case seconds < 0 || math.IsNaN(seconds) || seconds > 1e9:
		return "–"
	case seconds < 0.001:
		return "0 s"
	case seconds < 1:
		return fmt.Sprintf("%.0f ms", seconds*1000)
	case seconds < 10 && seconds != math.Trunc(seconds):
		return fmt.Sprintf("%.1f s", seconds)
	}
	s := int64(math.Round(seconds))
	switch {
	case s < 60:
		return fmt.Sprintf("%d s", s)
	case s < 3600:
		return twoUnits(s/60, "min", s%60, "s")
	case s < 86400:
		return twoUnits(s/3600, "h", s%3600/60, "min")
	}
	return twoUnits(s/86400, "d", s%86400/3600, "h")
}

func twoUnits(a int64, unit string, b int64, smaller string) string {
	if b == 0 {
		return fmt.Sprintf("%d %s", a, unit)
	}
	return fmt.Sprintf("%d %s %d %s", a, unit, b, smaller)
}

func isoTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// plainTime formats a time in UTC. The script of the page replaces it by the time since then.
func plainTime(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

func plural(n any, one, many string) string {
	if fmt.Sprint(n) == "1" {
		return "1 " + one
	}
	return count(n) + " " + many
}

// expected returns the number of jobs that the group has, or its announced total if that is larger.
func expected(g api.Group) int64 {
	if g.Total != nil {
		return max(*g.Total, g.Counts.Accepted)
	}
	return g.Counts.Accepted
}

func sum(numbers ...int64) (total int64) {
	for _, n := range numbers {
		total += n
	}
	return total
}

// pick returns a map of its arguments, which are names and values in turn. A template needs it to
// pass several values to another template.
func pick(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("pick: %d arguments: give names and values by turns", len(pairs))
	}
	m := map[string]any{}
	for chunk := range slices.Chunk(pairs, 2) {
		m[fmt.Sprint(chunk[0])] = chunk[1]
	}
	return m, nil
}

// notices are the texts that a page shows after an action. The query parameter done has only the
// key of a text, so that no link can make the console show another text. %s is a number of groups.
var notices = map[string]string{
	"pause":      "The group is paused: no more of its jobs start.",
	"resume":     "The group goes on.",
	"cancel":     "The group is cancelled.",
	"retry":      "The failed jobs run again.",
	"seal":       "The group is sealed: it gets no more jobs.",
	"job-retry":  "The job runs again.",
	"job-cancel": "The job is cancelled.",
	"submitted":  "The group was submitted. This page follows it.",

	"submitted-before": "This is the group that was submitted before: the same form was sent again.",
	"key-revoked":      "The key is revoked: all processes refuse it within ten seconds.",
	"limits-changed":   "The limits are changed, and in effect in all partitions.",
	"tenant-changed":   "The settings of the tenant are changed.",
	"tenant-paused":    "The tenant is paused: no more of its jobs start.",
	"tenant-resumed":   "The tenant goes on.",
	"type-paused":      "The type is paused: no more of its jobs start.",
	"type-resumed":     "The type goes on.",
	"groups":           "Done with %s.",

	"callback":        "The callback is sent again.",
	"callback-set":    "The callback endpoint is set.",
	"callback-delete": "The callback endpoint is deleted. What is pending for it dies when it is due.",
	"callback-rotate": "The tenant has a new secret. For 24 hours callbacks are also signed with the previous one.",

	"operation-started": "The operation was started. This page follows it.",
	"operation-pause":   "The operation is paused when the step at which it works is completed.",
	"operation-resume":  "The operation goes on.",
	"operation-cancel":  "The operation is cancelled when the step at which it works is completed.",

	"guard-disable":   "The member is disabled: it is lent no more.",
	"guard-enable":    "The member is enabled.",
	"guard-open":      "The breaker of the member is open.",
	"guard-close":     "The breaker of the member is closed.",
	"guard-take-back": "The leases of the member have ended. Their holders learn it at their next renewal.",

	"room-paused":       "The event is paused: users enter, and nobody is promoted.",
	"room-open":         "The event is open: users are promoted.",
	"room-closed":       "The event is closed: nobody can enter.",
	"room-recalibrated": "The event is recalibrated.",
	"room-deleted":      "The event is deleted when its last user has gone.",
	"user-removed":      "The user is removed.",
	"user-unknown": "The event has no such user. The id is the part of a visitor's cookie before the dot, without " +
		"the rest.",
}

// noticeOf returns the notice that the query names; "" for none. It adds how many of the ticked
// groups did not take the command (parameter failed).
func noticeOf(q url.Values) string {
	if q.Get("done") == "callbacks" {
		return redelivered(q)
	}
	text := notices[q.Get("done")]
	if !strings.Contains(text, "%s") {
		return text
	}
	number := func(name string) int { n, _ := strconv.Atoi(q.Get(name)); return min(max(n, 0), maxTicked) }
	text = fmt.Sprintf(text, plural(number("n"), "group", "groups"))
	if failed := number("failed"); failed > 0 {
		text += " " + plural(failed, "group", "groups") + " did not take the command: their state does not allow it."
	}
	return text
}

func notOneOf[S ~string](field string, values []S) error {
	names := make([]string, len(values))
	for i, v := range values {
		names[i] = string(v)
	}
	return invalid(field, "must be one of %s", strings.Join(names, ", "))
}

// cursorOf returns the cursor in the query of a list; "" for the first page.
func cursorOf(q url.Values) (string, error) {
	const longest = 512
	if cursor := q.Get("cursor"); len(cursor) <= longest {
		return cursor, nil
	}
	return "", invalid("cursor", "must be the cursor of an earlier page")
}

// idOf returns the id in the parameter of this name; "" if it is absent.
func idOf(q url.Values, name string) (string, error) {
	id := strings.TrimSpace(q.Get(name))
	if id != "" && !api.ValidID(id) {
		return "", invalid(name, "must %s", api.IDRule)
	}
	return id, nil
}

// choiceOf returns the parameter of this name, which is true or false; nil if it is absent.
func choiceOf(q url.Values, name string) (*bool, error) {
	switch q.Get(name) {
	case "":
		return nil, nil
	case "true":
		return new(true), nil
	case "false":
		return new(false), nil
	}
	return nil, invalid(name, "must be true or false")
}

// dayOf returns the parameter of this name, which is a date; the zero time if it is absent.
func dayOf(q url.Values, name string) (day time.Time, err error) {
	text := q.Get(name)
	if text == "" {
		return day, nil
	}
	if day, err = time.Parse(time.DateOnly, text); err != nil || day.UnixMilli() < 0 {
		return day, invalid(name, "must be a day such as 2026-01-02, from 1970 on")
	}
	return day, nil
}

// nextPage returns the link to the next page of a list: path with the query q except done, and with
// the cursor. It returns "" if cursor is "", because then this page is the last one.
func nextPage(path string, q url.Values, cursor string) string {
	if cursor == "" {
		return ""
	}
	next := url.Values{}
	for name, values := range q {
		if name != "done" {
			next[name] = values
		}
	}
	next.Set("cursor", cursor)
	return path + "?" + next.Encode()
}
