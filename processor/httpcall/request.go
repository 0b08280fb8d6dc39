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
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/internal/jsonfit"
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
		if err := jsonfit.Decode("", job.Payload, &payload); err != nil {
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
