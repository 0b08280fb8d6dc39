package httpcall

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// With these headers a handler decides about the job itself.
const (
	headerOutcome = "Bulkaction-Outcome" // permanent, retry, defer or throttle; the last two with Retry-After
	headerCode    = "Bulkaction-Code"    // the code of the error
)

// saidOutcome returns the outcome that the handler has chosen for the job; "" if it has chosen none.
func saidOutcome(response *http.Response) string {
	said := strings.ToLower(response.Header.Get(headerOutcome))
	if slices.Contains([]string{"permanent", "retry", "defer", "throttle"}, said) {
		return said
	}
	return ""
}

// refusal returns the error for a status that is not 2xx, or for the outcome that the handler has
// said. It has the code and the text of the handler, without the secrets of the request. What the
// handler decides itself is no failure of its host; a throttle holds for the host, too.
func refusal(request *http.Request, response *http.Response, said string, used *member) error {
	status := response.StatusCode
	code, text := explanation(request, response, used)
	err := fmt.Errorf("call %s: status %d %s", request.URL.Hostname(), status, http.StatusText(status))
	if text != "" {
		err = fmt.Errorf("%w: %s", err, text)
	}
	after, given := egress.RetryAfter(response.Header.Get("Retry-After"), time.Now())
	switch said {
	case "permanent":
		return &outcomes{processor.Permanent(code, err), neutral, neutral}
	case "retry":
		return &outcomes{processor.Retry(code, err), neutral, neutral}
	case "defer":
		return &outcomes{processor.Deferred(after, err.Error()), neutral, neutral}
	case "throttle":
		throttled := credential.Outcome{Kind: credential.Throttled, After: after}
		return &outcomes{processor.Throttled(after, err), throttled, throttled}
	}
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && given:
		return processor.Throttled(after, err)
	case status/100 == 5:
		return processor.Retry(code, err)
	}
	return processor.Permanent(code, err)
}

// maxTextBytes is how much of a handler's text an error has.
const maxTextBytes = 512

// explanation returns the code and the text with which an answer explains itself: those of a JSON
// body such as problem+json, or plain text. The code is HTTP_ and the status unless the answer has a
// valid one.
func explanation(request *http.Request, response *http.Response, used *member) (code, text string) {
	body, _ := io.ReadAll(io.LimitReader(response.Body, maxDrainBytes)) // an error leaves the status
	code = response.Header.Get(headerCode)
	var content any
	media, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	switch {
	case json.Unmarshal(body, &content) == nil:
		text = textIn(content)
		if !isCode(code) {
			code = codeIn(content)
		}
	case (media == "" || media == "text/plain") && !strings.HasPrefix(string(body), "<"):
		text = string(body)
	}
	secrets := secretsOf(request)
	hide := func(s string) string { return string(secrets.hide(used.hide([]byte(s)))) }
	if text, code = hide(text), hide(code); !isCode(code) { // no code has an asterisk
		code = "HTTP_" + strconv.Itoa(response.StatusCode)
	}
	visible := func(r rune) rune { // a log or a terminal must not interpret the others
		if !unicode.IsGraphic(r) {
			return ' '
		}
		return r
	}
	text = strings.Join(strings.Fields(strings.Map(visible, strings.ToValidUTF8(text, "\uFFFD"))), " ")
	if len(text) > maxTextBytes {
		text = strings.ToValidUTF8(text[:maxTextBytes], "") + "…"
	}
	return code, text
}

// isCode says whether a job's error can have this code.
func isCode(code string) bool {
	return code != "" && processor.Classify(processor.Permanent(code, nil)).Code == code
}

// textIn returns the first text in the JSON of an error: a string, or one in a field that usually
// has it. The texts of a list are joined.
func textIn(content any) string {
	switch v := content.(type) {
	case string:
		return v
	case []any:
		var texts []string
		for _, element := range v[:min(len(v), 5)] {
			if text := textIn(element); text != "" {
				texts = append(texts, text)
			}
		}
		return strings.Join(texts, "; ")
	case map[string]any:
		for _, name := range []string{"detail", "message", "error_description", "error", "errors", "title", "reason"} {
			if text := textIn(v[name]); strings.TrimSpace(text) != "" {
				return text
			}
		}
	}
	return ""
}

// codeIn returns the field code of the JSON of an error, or of the error in its field error.
func codeIn(content any) string {
	object, _ := content.(map[string]any)
	if code, ok := object["code"].(string); ok || object == nil {
		return code
	}
	return codeIn(object["error"])
}

var secretName = regexp.MustCompile(`(?i)auth|cookie|token|secret|key|passw|session|signature`)

// secretsOf returns a member that hides what is secret, by its name, in a request itself.
func secretsOf(request *http.Request) *member {
	m := &member{}
	add := func(name string, values ...string) {
		for _, value := range values {
			if secretName.MatchString(name) && len(value) >= leastHidden {
				m.hidden = append(m.hidden, hiddenTexts(value)...)
			}
		}
	}
	for name, values := range request.Header {
		if !strings.HasPrefix(name, jobHeaders) && name != "Idempotency-Key" {
			add(name, values...)
		}
	}
	for name, values := range request.URL.Query() {
		add(name, values...)
	}
	if password, ok := request.URL.User.Password(); ok {
		plain := request.URL.User.Username() + ":" + password
		add("password", password, base64.StdEncoding.EncodeToString([]byte(plain)))
	}
	return m
}
