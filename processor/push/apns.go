package push

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	apnsURL        = "https://api.push.apple.com"
	apnsSandboxURL = "https://api.sandbox.push.apple.com"
	// apnsTokenAge is the age at which a provider token is replaced. APNs refuses tokens that are
	// older than 60 minutes.
	apnsTokenAge = 50 * time.Minute
	// apnsTokenPause is the shortest time between two new tokens that replace refused ones. APNs
	// refuses accounts that change their token more than once in 20 minutes.
	apnsTokenPause = 20 * time.Minute
	// apnsIdleTimeout is the time after which an unused connection is closed. APNs asks providers
	// to keep connections open.
	apnsIdleTimeout = time.Hour
)

// apnsCodes maps the reasons of APNs after which a job fails for good to the job's error code.
var apnsCodes = map[string]string{
	"BadDeviceToken":         CodeInvalidArgument,
	"DeviceTokenNotForTopic": CodeSenderMismatch,
	"Unregistered":           CodeUnregistered,
	"ExpiredToken":           CodeUnregistered,
	"PayloadTooLarge":        CodeTooLarge,
}

// apnsAccountReasons are the reasons with which APNs refuses the account or its token, and not the
// message.
var apnsAccountReasons = []string{
	"BadTopic", "MissingTopic", "TopicDisallowed", "BadCertificate", "BadCertificateEnvironment",
	"BadEnvironmentKeyInToken", "ExpiredProviderToken", "Forbidden", "InvalidProviderToken", "MissingProviderToken",
	"UnrelatedKeyIdInToken",
}

// apnsOtherReasons are further known reasons of APNs. They appear in errors, but the HTTP status
// decides about the job.
var apnsOtherReasons = []string{
	"BadCollapseId", "BadExpirationDate", "BadMessageId", "BadPath", "BadPriority", "IdleTimeout",
	"InternalServerError", "InvalidPushType", "MethodNotAllowed", "MissingDeviceToken", "PayloadEmpty",
	"ServiceUnavailable", "Shutdown", "TooManyProviderTokenUpdates", "TooManyRequests",
}

// apnsAccount sends with one key of APNs over one connection.
type apnsAccount struct {
	url        *url.URL // without the device token at its end
	topic      string
	connection *connection
	tokens     *tokens
	now        func() time.Time
}

func newAPNsAccount(base *url.URL, key *ecdsa.PrivateKey, e apnsEntry, p parts) *apnsAccount {
	address := net.JoinHostPort(base.Hostname(), cmp.Or(base.Port(), "443"))
	a := &apnsAccount{
		url: base.JoinPath("3/device/"), topic: e.Topic, now: p.now,
		connection: newConnection(newAPNsTransport(p.roots), address),
	}
	a.tokens = &tokens{now: p.now, pause: apnsTokenPause, create: func(context.Context) (string, time.Time, error) {
		issued := p.now()
		token := jwt.NewWithClaims(jwt.SigningMethodES256, jwt.MapClaims{"iss": e.TeamID, "iat": issued.Unix()})
		token.Header["kid"] = e.KeyID
		signed, err := token.SignedString(key)
		return signed, issued.Add(apnsTokenAge), err
	}}
	return a
}

func newAPNsTransport(roots *x509.CertPool) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true) // APNs has no other
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		Protocols:           protocols,
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter},
		TLSHandshakeTimeout: handshakeTimeout,
		IdleConnTimeout:     apnsIdleTimeout,
		DisableCompression:  true,
	}
}

func (a *apnsAccount) close() { a.connection.close() }

func (a *apnsAccount) send(ctx context.Context, job processor.Job, m *message) answer {
	body, err := json.Marshal(apnsPayload(m))
	if err != nil {
		return answer{err: processor.Permanent(CodeBadPayload, errors.New("the message can't be encoded"))}
	}
	token, err := a.tokens.get(ctx, "")
	if err != nil {
		return unanswered(ctx, APNs, errors.New("the token can't be signed"))
	}
	sent, expired := a.post(ctx, job, m, token, body)
	if !expired {
		return sent
	}
	fresh, err := a.tokens.get(ctx, token)
	if err != nil || fresh == token {
		return sent
	}
	sent, _ = a.post(ctx, job, m, fresh, body)
	return sent
}

// post sends the push with this token. expired is true if APNs says that the token has expired.
func (a *apnsAccount) post(ctx context.Context, job processor.Job, m *message, token string,
	body []byte) (sent answer, expired bool) {
	header := http.Header{
		"Authorization":  {"bearer " + token},
		"Apns-Id":        {apnsID(job)},
		"Apns-Topic":     {a.topic},
		"Apns-Push-Type": {"alert"},
	}
	if m.silent() {
		header.Set("Apns-Push-Type", "background")
	}
	if m.silent() || m.priority != "" {
		header.Set("Apns-Priority", apnsPriority(m))
	}
	if m.ttl != nil {
		header.Set("Apns-Expiration", expiration(*m.ttl, a.now()))
	}
	if m.collapseKey != "" {
		header.Set("Apns-Collapse-Id", m.collapseKey)
	}
	target := *a.url
	target.RawPath = target.EscapedPath() + url.PathEscape(m.apnsToken)
	target.Path += m.apnsToken
	response, err := a.connection.RoundTrip(newPost(ctx, &target, header, body))
	if err != nil {
		return unanswered(ctx, APNs, err), false
	}
	defer func() { _ = response.Body.Close() }()
	r := reply{platform: APNs, status: response.StatusCode, header: response.Header}
	if r.status/100 == 2 {
		discard(response.Body)
		return r.accepted(), false
	}
	r.reason = apnsReason(read(response.Body))
	code, permanent := apnsCodes[r.reason]
	switch {
	case r.status == http.StatusNotFound && strings.ContainsFunc(m.apnsToken, notInTokens):
		return r.permanent(CodeInvalidArgument), false // the path is wrong because the token is
	case r.status == http.StatusNotFound, r.status == http.StatusMethodNotAllowed:
		return r.failed(statusCode(r.status)), false // the account's url is wrong, not the recipient
	case r.status == http.StatusGone:
		return r.permanent(CodeUnregistered), false
	case r.status/100 == 4 && permanent:
		return r.permanent(code), false
	case r.status/100 == 4 && slices.Contains(apnsAccountReasons, r.reason):
		return r.failed(CodeCredentialRefused), r.reason == "ExpiredProviderToken"
	case r.status == http.StatusTooManyRequests && r.reason == "TooManyRequests":
		sent = r.throttled()
		sent.outcome = credential.Outcome{} // too many pushes to this device, not of this account
		return sent, false
	}
	return r.classify(), false
}

// notInTokens says whether r never occurs in device tokens of APNs, which are hexadecimal.
func notInTokens(r rune) bool { return !strings.ContainsRune("0123456789abcdefABCDEF", r) }

// apnsReason returns the reason in the body of a reply of APNs; "" if it is none of the known ones,
// because a body may repeat parts of the request, which must not be logged.
func apnsReason(body []byte) string {
	var decoded struct {
		Reason string `json:"reason"`
	}
	if json.Unmarshal(body, &decoded) != nil {
		return ""
	}
	if _, ok := apnsCodes[decoded.Reason]; ok || slices.Contains(apnsAccountReasons, decoded.Reason) ||
		slices.Contains(apnsOtherReasons, decoded.Reason) {
		return decoded.Reason
	}
	return ""
}

// apnsID returns the value of the header apns-id. It is the same in each attempt of a job, so that
// APNs can recognize a repeated push.
func apnsID(job processor.Job) string {
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte(job.ID())).String()
}

// apnsPayload returns the request body for APNs. The fields of the message's data stand beside the
// field aps, where apps expect them.
func apnsPayload(m *message) any {
	aps := apnsDictionary{Alert: &apnsAlert{Title: m.title, Body: m.body}}
	if m.silent() {
		aps = apnsDictionary{ContentAvailable: 1}
	}
	if len(m.data) == 0 {
		return struct {
			APS apnsDictionary `json:"aps"`
		}{aps}
	}
	payload := map[string]any{"aps": aps}
	for name, value := range m.data {
		payload[name] = value
	}
	return payload
}

type apnsDictionary struct {
	Alert            *apnsAlert `json:"alert,omitempty"`
	ContentAvailable int        `json:"content-available,omitempty"`
}

type apnsAlert struct {
	Title string `json:"title,omitempty"`
	Body  string `json:"body,omitempty"`
}

// apnsPriority returns the value of the header apns-priority: 10 to deliver at once, 5 when it
// suits the device. APNs allows only 5 for a message that shows nothing.
func apnsPriority(m *message) string {
	if m.priority == "high" && !m.silent() {
		return "10"
	}
	return "5"
}

// expiration returns the value of the header apns-expiration: the Unix time after which APNs does
// not try to deliver the message any more. With 0 it tries once.
func expiration(ttl int, now time.Time) string {
	if ttl == 0 {
		return "0"
	}
	return strconv.FormatInt(now.Add(time.Duration(ttl)*time.Second).Unix(), 10)
}

// sendAttempts is how often a request is sent at most. It is sent again if it got no answer because
// its connection ended or the server refused another stream.
const sendAttempts = 2

// connection sends all requests to one server over one connection of HTTP/2. Requests above the
// server's limit of streams wait. A connection that has ended is replaced.
//
// [http.Transport] opens further connections above the limit. With StrictMaxConcurrentRequests it
// deadlocks: each waiting request has reserved a stream, and reserved streams count as used
// (golang/go#70809). Requests on a [http.ClientConn] reserve nothing.
type connection struct {
	transport *http.Transport
	address   string // host:port
	current   atomic.Pointer[http.ClientConn]
	// opening is a lock: a request that opens a connection holds it until it has got its answer.
	// That request is sent alone, because only the answer tells the server's limit of streams, and
	// APNs allows one stream until it has got a valid token.
	opening chan struct{}
}

func newConnection(transport *http.Transport, address string) *connection {
	return &connection{transport: transport, address: address, opening: make(chan struct{}, 1)}
}

// RoundTrip sends r, which must have GetBody.
func (c *connection) RoundTrip(r *http.Request) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		response, again, err := c.send(r)
		if err == nil || !again || attempt == sendAttempts || r.Context().Err() != nil {
			return response, err
		}
		body, err := r.GetBody()
		if err != nil {
			return nil, err
		}
		r = r.WithContext(r.Context()) // a copy
		r.Body = body
	}
}

// send sends r once. again says that the caller should send r once more.
func (c *connection) send(r *http.Request) (response *http.Response, again bool, err error) {
	conn := c.usable()
	if conn == nil {
		select {
		case c.opening <- struct{}{}:
		case <-r.Context().Done():
			return nil, false, r.Context().Err()
		}
		if conn = c.usable(); conn == nil {
			defer func() { <-c.opening }()
			return c.open(r)
		}
		<-c.opening // another request opened a connection meanwhile
	}
	response, err = conn.RoundTrip(r)
	if err == nil || r.Context().Err() != nil {
		return response, false, err
	}
	reset, again := isReset(err)
	if !reset {
		c.drop(conn)
	}
	return nil, again, err
}

// open opens a connection and sends r on it. Other requests may use the connection only after the
// answer to r. again says that the caller should send r once more.
func (c *connection) open(r *http.Request) (response *http.Response, again bool, err error) {
	conn, err := c.transport.NewClientConn(r.Context(), "https", c.address)
	if err != nil {
		return nil, false, err
	}
	response, err = conn.RoundTrip(r)
	if err != nil {
		_ = conn.Close()
		_, again = isReset(err)
		return nil, again, err
	}
	c.current.Store(conn)
	return response, false, nil
}

// usable returns the connection, or nil if there is none or it was closed.
func (c *connection) usable() *http.ClientConn {
	conn := c.current.Load()
	if conn == nil || conn.Err() != nil {
		return nil
	}
	return conn
}

// drop stops the use of a connection for further requests, and closes it after its last answer.
func (c *connection) drop(conn *http.ClientConn) {
	c.current.CompareAndSwap(conn, nil)
	conn.SetStateHook(closeUnused)
	closeUnused(conn)
}

func closeUnused(conn *http.ClientConn) {
	if conn.InFlight() == 0 {
		_ = conn.Close()
	}
}

// close closes the connection after its last answer. A later request opens another one.
func (c *connection) close() {
	if conn := c.current.Load(); conn != nil {
		c.drop(conn)
	}
}

// refusedStream is the code of HTTP/2 with which a server resets a stream that it has not processed
// (RFC 9113, 8.7).
const refusedStream = 7

// streamError is the error that has ended one stream of an HTTP/2 connection. [errors.As] fills it
// from the error of net/http, whose type has the same fields and is not exported.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (streamError) Error() string { return "the stream was reset" }

// isReset classifies the error of a request. reset: it ended only the request's stream, not the
// connection. again: the request should be sent again, because the connection ended, or because the
// server refused the stream before it processed the request.
func isReset(err error) (reset, again bool) {
	var stream streamError
	reset = errors.As(err, &stream)
	return reset, !reset || stream.Code == refusedStream
}
