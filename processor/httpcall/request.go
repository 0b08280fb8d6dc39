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

// payload is the payload of a job of type HTTP.
type payload struct {
	URL     string            `json:"url" yaml:"url"`
	Method  string            `json:"method" yaml:"method"`
	Headers map[string]string `json:"headers" yaml:"headers"`
	Body    json.RawMessage   `json:"body" yaml:"-"`
}

// newRequest makes the job's HTTP request. A job of a type in types sends its payload there as the
// body. If no request can be made from the payload, the error says why and contains no part of the
// payload.
func newRequest(job processor.Job, types map[string]payload) (*http.Request, error) {
	payload, ok := types[job.Type]
	if payload.Body = job.Payload; !ok {
		payload.Body = nil
		if err := jsonscan.Decode("", job.Payload, &payload); err != nil {
			return nil, err
		}
	}
	target, err := url.Parse(payload.URL)
	if err != nil || (target.Scheme != "http" && target.Scheme != "https") || target.Hostname() == "" {
		return nil, errors.New("url is not an absolute http or https URL")
	}
	method := strings.ToUpper(payload.Method)
	if method == "" {
		method = http.MethodPost
	}
	if !slices.Contains(methods, method) {
		return nil, fmt.Errorf("method is not one of %s", strings.Join(methods, ", "))
	}
	body, contentType, err := encodeBody(payload.Body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequest(method, target.String(), body)
	if err != nil {
		return nil, errors.New("url, method or body make no request")
	}
	request.Header.Set("Idempotency-Key", job.ID())
	request.Header.Set("User-Agent", "bulkaction")
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	for name, value := range payload.Headers {
		if err := checkHeader(name, value, target.Host); err != nil {
			return nil, err
		}
		request.Header.Set(name, value)
	}
	for name, value := range map[string]string{
		"Tenant": job.Tenant, "Group": job.Group, "Ordinal": strconv.FormatInt(job.Ordinal, 10), "Type": job.Type,
		"Attempt": strconv.Itoa(job.Attempt), "Retries-Left": strconv.Itoa(job.RetriesLeft), "Key": url.PathEscape(job.Key),
	} {
		if value != "" {
			request.Header.Set(jobHeaders+name, value)
		}
	}
	return request, nil
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
