package httpcall

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/idna"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/processor"
)

var methods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch,
	http.MethodDelete, http.MethodOptions,
}

// connectionHeaders are headers about one connection or about the framing of messages on it (RFC
// 9110, 7.6.1). A payload may not set them: it could make one request look like two.
var connectionHeaders = []string{
	"Connection", "Content-Length", "Expect", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// jobHeaders begins the names of the headers that tell the handler which job calls it.
const jobHeaders = "Bulkaction-"

// payload is the payload of a job of type HTTP or HTTP_BATCH.
type payload struct {
	URL     string            `json:"url" yaml:"url"`
	Method  string            `json:"method" yaml:"method"`
	Headers map[string]string `json:"headers" yaml:"headers"`
	Body    json.RawMessage   `json:"body" yaml:"-"`
	Batch   *batchSettings    `json:"-" yaml:"batch"` // of a type: its jobs share calls
}

// payloadOf returns the job's payload. That of a job of a type in types is the body of a call that is
// otherwise like all calls of the type.
func payloadOf(job processor.Job, types map[string]payload) (payload, error) {
	p, ok := types[job.Type]
	if p.Body = job.Payload; !ok {
		p.Body = nil
		if err := jsonscan.Decode("", job.Payload, &p); err != nil {
			return payload{}, err
		}
	}
	if p.Method = strings.ToUpper(p.Method); p.Method == "" {
		p.Method = http.MethodPost
	}
	return p, nil
}

// newRequest makes the job's HTTP request. If no request can be made from the payload, the error
// says why and contains no part of the payload.
func newRequest(job processor.Job, types map[string]payload) (*http.Request, error) {
	p, err := payloadOf(job, types)
	if err != nil {
		return nil, err
	}
	if err := p.check(methods); err != nil {
		return nil, err
	}
	body, contentType, err := encodeBody(p.Body)
	if err != nil {
		return nil, err
	}
	request, err := p.request(body, contentType, job.ID())
	if err != nil {
		return nil, err
	}
	setJobHeaders(request, map[string]string{
		"Tenant": job.Tenant, "Group": job.Group, "Ordinal": strconv.FormatInt(job.Ordinal, 10), "Type": job.Type,
		"Attempt": strconv.Itoa(job.Attempt), "Retries-Left": strconv.Itoa(job.RetriesLeft), "Key": url.PathEscape(job.Key),
	})
	return request, nil
}

// check says whether the payload names a URL that can be called, and one of the methods.
func (p payload) check(methods []string) error {
	target, err := url.Parse(p.URL)
	if err != nil || (target.Scheme != "http" && target.Scheme != "https") || target.Hostname() == "" {
		return errors.New("url is not an absolute http or https URL")
	}
	if !slices.Contains(methods, p.Method) {
		return fmt.Errorf("method is not one of %s", strings.Join(methods, ", "))
	}
	return nil
}

// request makes a request of a payload that was checked. The payload's headers replace its own ones.
func (p payload) request(body io.Reader, contentType, idempotencyKey string) (*http.Request, error) {
	request, err := http.NewRequest(p.Method, p.URL, body)
	if err != nil {
		return nil, errors.New("url, method or body make no request")
	}
	for name, value := range map[string]string{
		"Idempotency-Key": idempotencyKey, "User-Agent": "bulkaction", "Content-Type": contentType,
	} {
		if value != "" {
			request.Header.Set(name, value)
		}
	}
	for name, value := range p.Headers {
		if err := checkHeader(name, value, request.URL.Host); err != nil {
			return nil, err
		}
		request.Header.Set(name, value)
	}
	return request, nil
}

// setJobHeaders sets the headers that say which job, or whose jobs, a request is for.
func setJobHeaders(request *http.Request, headers map[string]string) {
	for name, value := range headers {
		if value != "" {
			request.Header.Set(jobHeaders+name, value)
		}
	}
}

// encodeBody returns the request body: a JSON string's text unchanged, null as no body, and any
// other value as JSON.
func encodeBody(raw json.RawMessage) (body io.Reader, contentType string, err error) {
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, "", nil
	case raw[0] != '"':
		return bytes.NewReader(raw), "application/json", nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return nil, "", err
	}
	return strings.NewReader(text), "text/plain; charset=utf-8", nil
}

func checkHeader(name, value, host string) error {
	canonical := http.CanonicalHeaderKey(name)
	switch {
	case !isHeaderName(name):
		return errors.New("headers has a name that is not a token")
	case strings.ContainsFunc(value, isNoFieldChar):
		return errors.New("headers has a value with a line break or another control character")
	case canonical == "Host" && !strings.EqualFold(value, host):
		return errors.New("headers has a Host that is not the one of url")
	case strings.HasPrefix(canonical, jobHeaders):
		return fmt.Errorf("headers has %s, which the worker sets", canonical)
	case slices.Contains(connectionHeaders, canonical):
		return fmt.Errorf("headers has %s, which belongs to the connection", canonical)
	}
	return nil
}

func isHeaderName(name string) bool { return name != "" && !strings.ContainsFunc(name, isNoTokenChar) }

// isNoTokenChar says whether r may not be in a header's name, and isNoFieldChar whether it may not
// be in a header's value (RFC 9110, 5.6.2 and 5.5).
func isNoTokenChar(r rune) bool {
	letter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
	return !letter && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}

func isNoFieldChar(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

// webhookHeaders begins the names of the headers of a signature.
const webhookHeaders = "Webhook-"

// sign adds the headers of Standard Webhooks (https://www.standardwebhooks.com) to a request, with a
// signature by each secret, so that the receiver can change its secret at any time.
func sign(r *http.Request, id string, now time.Time, secrets [][]byte) {
	if len(secrets) == 0 {
		return
	}
	var body []byte
	if r.GetBody != nil {
		reader, _ := r.GetBody() // of bytes in memory, which can always be read
		body, _ = io.ReadAll(reader)
	}
	timestamp := strconv.FormatInt(now.Unix(), 10)
	signed := slices.Concat([]byte(id+"."+timestamp+"."), body)
	signatures := make([]string, len(secrets))
	for i, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		mac.Write(signed)
		signatures[i] = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	r.Header.Set(webhookHeaders+"Id", id)
	r.Header.Set(webhookHeaders+"Timestamp", timestamp)
	r.Header.Set(webhookHeaders+"Signature", strings.Join(signatures, " "))
}

// target is a host to which calls go, with or without a port. All spellings of one name and port
// are the same target, so that a payload can't avoid a host's guard by another spelling. Two names
// of one host are two targets.
type target struct {
	name string // lower case, without a dot at its end
	port string // "": that of the scheme; in the file of credentials: any port
}

var defaultPorts = map[string]string{"http": "80", "https": "443"}

func targetOf(u *url.URL) target {
	t := target{name: strings.ToLower(u.Hostname()), port: u.Port()}
	if ascii, err := idna.Lookup.ToASCII(t.name); err == nil { // as package http does
		t.name = ascii
	}
	t.name = strings.TrimSuffix(t.name, ".")
	if ip, err := netip.ParseAddr(t.name); err == nil {
		t.name = ip.Unmap().String()
	}
	if n, err := strconv.ParseUint(t.port, 10, 16); err == nil {
		t.port = strconv.FormatUint(n, 10) // without zeros at the start
	}
	if t.port == defaultPorts[u.Scheme] {
		t.port = ""
	}
	return t
}

// String returns the name, with the port if there is one.
func (t target) String() string {
	if t.port == "" {
		return t.name
	}
	return net.JoinHostPort(t.name, t.port)
}

func (t target) isLoopback() bool {
	ip, err := netip.ParseAddr(t.name)
	return t.name == "localhost" || err == nil && ip.IsLoopback()
}

// overlaps says whether there are calls to which both targets of the credentials file apply.
func (t target) overlaps(other target) bool {
	return t.name == other.name && (t.port == other.port || t.port == "" || other.port == "")
}

var hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)

const maxHostName = 253 // bytes

// parseTarget reads a host of the credentials file, with or without a port.
func parseTarget(s string) (t target, ok bool) {
	u, err := url.Parse("//" + s)
	if err != nil || u.Host != s || strings.HasSuffix(s, ":") {
		return target{}, false
	}
	t = targetOf(u)
	if _, err := netip.ParseAddr(t.name); err != nil && (len(t.name) > maxHostName || !hostName.MatchString(t.name)) {
		return target{}, false
	}
	n, err := strconv.ParseUint(t.port, 10, 16)
	return t, t.port == "" || err == nil && n > 0
}
