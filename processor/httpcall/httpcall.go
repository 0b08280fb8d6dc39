// Package httpcall is the processor of the job types HTTP, whose jobs make one HTTP call each, and
// HTTP_BATCH, whose jobs share calls. The package hides its connections and what a response means for
// a job. Payloads are untrusted: the package prevents jobs from calling addresses inside of the
// worker's own network, unless the Config allows that.
package httpcall

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// Type is the job type that the processor serves.
const Type = "HTTP"

// These error codes are for calls without a response. A response that is not 2xx has the code HTTP_
// and its status, for example HTTP_404, or [processor.CodeThrottled] if it throttles the job.
const (
	CodeUnreachable    = "HTTP_UNREACHABLE" // retry: no connection, or it failed before the whole response came
	CodeAddressRefused = "ADDRESS_REFUSED"  // permanent: jobs may not call the host's address
)

// maxDrainBytes is how much of an unwanted response body is read and discarded, so that its
// connection can be used again.
const maxDrainBytes = 64 << 10

// Processor runs HTTP jobs. The payload is
//
//	{"url": …, "method"?: "POST", "headers"?: {…}, "body"?: any JSON}
//
// A body that is a string is sent unchanged, null sends none, and any other body is sent as JSON.
type Processor struct {
	config Config
	client *http.Client
}

// New returns a processor. It connects when the first job runs. The error names every invalid
// field.
func New(config Config) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure HTTP processor: %w", err)
	}
	return &Processor{config: config, client: egress.NewClient(egress.Options{
		Policy: config.policy(), MaxIdleConnsPerHost: config.MaxIdleConnsPerHost,
	})}, nil
}

// Type is HTTP.
func (p *Processor) Type() string { return Type }

// Close closes the idle connections. Calls that run go on.
func (p *Processor) Close() error {
	p.client.CloseIdleConnections()
	return nil
}

// Process makes the call. It sends the job's id as Idempotency-Key, unless the payload sets that
// header, the trace of ctx as traceparent, and which job it is in headers Bulkaction-…. The answer
// decides about the job:
//
//	header Bulkaction-Outcome    as it says: permanent, retry, defer or throttle
//	2xx                          done, with the result {"status": 200, "body": …}
//	429, or 503 with Retry-After throttled
//	any other 5xx                retry
//	any other status, redirects  permanent
//	the address is refused       permanent
//	no whole response            retry
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	request, err := newRequest(job, nil)
	if err != nil {
		return nil, invalidPayload(err)
	}
	return resultOf(p.exchange(ctx, p.client, request, nil, p.config.MaxResponseBytes))
}

func invalidPayload(err error) error {
	return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("read HTTP payload: %w", err))
}

// answer is a response. Only that of a call without an error has a body.
type answer struct {
	status    int    // 0: no whole response came
	said      string // the outcome that the handler has chosen; "": none
	body      []byte
	truncated bool // the response has a longer body
}

// resultOf returns what a processor returns after a call.
func resultOf(a answer, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return newResult(a.status, a.body, a.truncated), nil
}

// exchange sends a request, and keeps at most most bytes of the response's body. used is the credential
// that the request carries (nil: none): exchange hides its secret in the body and the error.
func (p *Processor) exchange(
	ctx context.Context, client *http.Client, request *http.Request, used *member, most int,
) (a answer, err error) {
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(request.Header))
	ctx, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()

	response, err := client.Do(request.WithContext(ctx))
	if err != nil {
		return a, failure(ctx, request, err, used)
	}
	defer func() { _ = response.Body.Close() }()
	if said := saidOutcome(response); response.StatusCode/100 != 2 || said != "" {
		return answer{status: response.StatusCode, said: said}, refusal(request, response, said, used)
	}
	// A secret may begin in the kept part of the body and end behind it. Read so far that it is
	// found.
	a.body, err = io.ReadAll(io.LimitReader(response.Body, int64(most+used.longestForm())+1))
	if err != nil {
		return answer{}, failure(ctx, request, err, used)
	}
	a.status, a.body = response.StatusCode, used.hide(a.body)
	if a.truncated = len(a.body) > most; a.truncated {
		a.body = a.body[:most]
		_, _ = io.CopyN(io.Discard, response.Body, maxDrainBytes)
	}
	return a, nil
}

// failure returns the error of a call without a whole response. The error names only the host,
// because the rest of a URL may contain a secret. It hides the secret of used, because err may
// repeat a part of the response.
func failure(ctx context.Context, request *http.Request, err error, used *member) error {
	var withURL *url.Error
	if errors.As(err, &withURL) {
		err = withURL.Err
	}
	host := request.URL.Hostname()
	switch {
	case errors.Is(err, egress.ErrPublicAddress):
		return invalidPayload(errNotEncrypted)
	case errors.Is(err, egress.ErrAddressRefused):
		return processor.Permanent(CodeAddressRefused, fmt.Errorf(
			"call %s: %w; BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS or "+
				"BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE would allow it",
			host, egress.ErrAddressRefused,
		))
	case ctx.Err() != nil:
		return fmt.Errorf("call %s: %w", host, ctx.Err())
	case used != nil:
		err = errors.New(string(used.hide([]byte(err.Error()))))
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("call %s: %w", host, err))
}

// With these headers a handler decides about the job itself.
const (
	headerOutcome = "Bulkaction-Outcome" // permanent, retry, defer or throttle; the last two with Retry-After
	headerCode    = "Bulkaction-Code"    // the code of the error
)

// saidOutcome returns the outcome that the handler has chosen for the job; "" if it has chosen none.
func saidOutcome(response *http.Response) string {
	said := strings.ToLower(response.Header.Get(headerOutcome))
	if isOutcome(said) {
		return said
	}
	return ""
}

// The outcomes that a handler may choose for a job.
const (
	saysPermanent = "permanent"
	saysRetry     = "retry"
	saysDefer     = "defer"
	saysThrottle  = "throttle"
)

func isOutcome(said string) bool {
	return slices.Contains([]string{saysPermanent, saysRetry, saysDefer, saysThrottle}, said)
}

// errorOf returns the error of a job that has the outcome that a handler has said.
func errorOf(said, code string, after time.Duration, err error) error {
	switch said {
	case saysPermanent:
		return processor.Permanent(code, err)
	case saysDefer:
		return processor.Deferred(after, err.Error())
	case saysThrottle:
		return processor.Throttled(after, err)
	}
	return processor.Retry(code, err)
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
	if said != "" {
		o := neutral
		if said == saysThrottle {
			o = credential.Outcome{Kind: credential.Throttled, After: after}
		}
		return &outcomes{errorOf(said, code, after, err), o, o}
	}
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && given:
		return processor.Throttled(after, err)
	case status/100 == 5:
		return processor.Retry(code, err)
	}
	return processor.Permanent(code, err)
}

// Config says what calls may do. Each field is set by an environment variable with the prefix
// HTTP_PROCESSOR_.
type Config struct {
	// Timeout is the longest time for one call with its response. The job's own timeout applies as
	// well.
	Timeout time.Duration `env:"TIMEOUT" envDefault:"30s"`
	// MaxResponseBytes is how much of a response body is kept; the rest is cut off.
	MaxResponseBytes int `env:"MAX_RESPONSE_BYTES" envDefault:"65536"`
	// MaxIdleConnsPerHost is how many connections to one host are kept open for reuse.
	MaxIdleConnsPerHost int `env:"MAX_IDLE_CONNS_PER_HOST" envDefault:"64"`
	// AllowPrivate lets jobs call every address, also private and loopback addresses. Each
	// producer can then reach every service that this process can reach.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// AllowedCIDRs are networks that jobs may call although they are not public, for example
	// 10.1.0.0/16.
	AllowedCIDRs []netip.Prefix `env:"ALLOWED_CIDRS"`
	// CredentialsFile is a YAML file that lists credentials and secrets for signatures with the hosts
	// that they are for, and further job types whose calls have their URL there. It is read again
	// when it changes. Empty means that calls have no credentials but those in payloads.
	CredentialsFile string `env:"CREDENTIALS_FILE"`
	// BatchSize is how many jobs of the type HTTP_BATCH one call has at most, up to 1000; 0: 100.
	BatchSize int `env:"BATCH_SIZE" envDefault:"100"`
	// BatchWait is for how long jobs of the type HTTP_BATCH gather at most, up to 1s and a quarter of
	// LEASE; 0: 50ms.
	BatchWait time.Duration `env:"BATCH_WAIT" envDefault:"50ms"`
	credential.Limits
	// HostRate is how often one host may be called in a time span, such as 100/1s; none is no
	// limit. ACCOUNT_LIMITER says how calls are counted.
	HostRate credential.Rate `env:"HOST_RATE" envDefault:"none" check:"rate"`
	// HostBreaker says when a host is not called because it fails: after this many failures in a
	// row, for this time, until this many calls succeed, such as 3/10m/3; none is no breaker.
	HostBreaker credential.Breaker `env:"HOST_BREAKER" envDefault:"none" check:"breaker"`
}

// GuardsHosts says whether HostRate or HostBreaker limits the calls of each host.
func (c Config) GuardsHosts() bool { return c.HostRate.Permits > 0 || c.HostBreaker.Failures > 0 }

// Validate checks every field, but not the content of CredentialsFile, because only workers can
// read it. The error joins one error for each invalid field and names the field as its environment
// variable, without the prefix.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Timeout > 0, "TIMEOUT: %s is not above 0", c.Timeout)
	check(c.MaxResponseBytes >= 0 && c.MaxResponseBytes <= processor.MaxResultBytes,
		"MAX_RESPONSE_BYTES: %d is not between 0 and %d", c.MaxResponseBytes, processor.MaxResultBytes)
	check(c.MaxIdleConnsPerHost >= 1, "MAX_IDLE_CONNS_PER_HOST: %d is not above 0", c.MaxIdleConnsPerHost)
	_, err := new(batchSettings).options(c)
	check(err == nil, "BATCH_SIZE, BATCH_WAIT: %w", err)
	for _, err := range c.policy().Validate() {
		check(false, "ALLOWED_CIDRS: %w", err)
	}
	return errors.Join(errs...)
}

func (c Config) policy() egress.Policy {
	return egress.Policy{AllowPrivate: c.AllowPrivate, AllowedCIDRs: c.AllowedCIDRs}
}

// newResult returns the job's result {"status":…,"body":…}. A JSON body stays JSON, an empty body
// becomes null, and any other body becomes a string. A body that was cut, or has to be cut to fit,
// is a string too, with "truncated":true.
func newResult(status int, body []byte, truncated bool) json.RawMessage {
	head := `{"status":` + strconv.Itoa(status) + `,"body":`
	const mark = `,"truncated":true}`
	room := processor.MaxResultBytes - len(head) - len(mark)

	if len(body) == 0 && !truncated {
		return json.RawMessage(head + "null}")
	}
	if !truncated && utf8.Valid(body) {
		// Marshal makes the JSON compact and escapes <, > and &, so that encoding it a second time
		// does not make it longer.
		if raw, err := json.Marshal(json.RawMessage(body)); err == nil && len(raw) <= room {
			return json.RawMessage(head + string(raw) + "}")
		}
	}
	encoded, cut := encodeString(strings.ToValidUTF8(string(body), string(utf8.RuneError)), room)
	if truncated || cut {
		return json.RawMessage(head + encoded + mark)
	}
	return json.RawMessage(head + encoded + "}")
}

// encodeString returns text as a JSON string of at most room bytes. It cuts text that is too long.
func encodeString(text string, room int) (encoded string, cut bool) {
	prefix := func(n int) string {
		for n > 0 && n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		raw, _ := json.Marshal(text[:n]) // a string can always be marshalled
		return string(raw)
	}
	most := min(len(text), room-len(`""`)) // enough if no character needs an escape
	if all := prefix(most); len(all) <= room {
		return all, most < len(text)
	}
	tooLong := sort.Search(most, func(n int) bool { return len(prefix(n)) > room })
	return prefix(tooLong - 1), true
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
	if code, text = presentable(request, used, code, text); code == "" {
		code = "HTTP_" + strconv.Itoa(response.StatusCode)
	}
	return code, text
}

// presentable returns a handler's code, "" if it is not valid, and its text as an error can have it:
// without the secrets of the request, on one line and not too long.
func presentable(request *http.Request, used *member, code, text string) (string, string) {
	secrets := secretsOf(request)
	hide := func(s string) string { return string(secrets.hide(used.hide([]byte(s)))) }
	if text, code = hide(text), hide(code); !isCode(code) { // no code has an asterisk
		code = ""
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
