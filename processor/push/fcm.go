package push

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/jwt"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	fcmURL   = "https://fcm.googleapis.com"
	fcmScope = "https://www.googleapis.com/auth/firebase.messaging"
	// fcmTokenMargin is how long before its expiry an access token is replaced.
	fcmTokenMargin = time.Minute
	// fcmTokenPause is the shortest time between two new access tokens that replace refused ones.
	fcmTokenPause = time.Minute
)

// fcmErrors are the error codes of FCM v1 that decide about a job or help an operator.
var fcmErrors = []string{
	"UNREGISTERED", "INVALID_ARGUMENT", "SENDER_ID_MISMATCH", "QUOTA_EXCEEDED", "UNAVAILABLE", "INTERNAL",
	"THIRD_PARTY_AUTH_ERROR", "PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND",
}

// fcmAccount sends messages through the API FCM v1 with one service account of Google.
type fcmAccount struct {
	url       *url.URL // of the method messages:send
	transport http.RoundTripper
	tokens    *tokens
}

func newFCMAccount(base *url.URL, project string, key *jwt.Config, p parts) *fcmAccount {
	a := &fcmAccount{url: base.JoinPath("v1/projects", project, "messages:send"), transport: p.services}
	a.tokens = &tokens{now: p.now, pause: fcmTokenPause, create: func(ctx context.Context) (string, time.Time, error) {
		// The library has no parameter for the context of a request.
		bound := &http.Client{
			CheckRedirect: noRedirect,
			Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
				return p.services.RoundTrip(r.WithContext(ctx))
			}),
		}
		token, err := key.TokenSource(context.WithValue(ctx, oauth2.HTTPClient, bound)).Token()
		if err != nil {
			if ctx.Err() != nil {
				return "", time.Time{}, ctx.Err() // the library's error does not wrap it
			}
			return "", time.Time{}, err
		}
		until := token.Expiry.Add(-fcmTokenMargin)
		if token.Expiry.IsZero() {
			until = p.now().Add(fcmTokenMargin)
		}
		return token.AccessToken, until, nil
	}}
	return a
}

// roundTrip makes a function an [http.RoundTripper].
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (a *fcmAccount) close() {} // the connections belong to all accounts

func (a *fcmAccount) send(ctx context.Context, _ processor.Job, m *message) answer {
	body, err := json.Marshal(fcmRequest{fcmMessageOf(m, time.Now())})
	if err != nil {
		return answer{err: processor.Permanent(CodeBadPayload, errors.New("the message can't be encoded"))}
	}
	token, err := a.tokens.get(ctx, "")
	if err != nil {
		return a.tokenFailure(ctx, err)
	}
	sent := a.post(ctx, token, body)
	if sent.status != http.StatusUnauthorized || sent.outcome.Kind != credential.Failure {
		return sent // another token would not help
	}
	fresh, err := a.tokens.get(ctx, token)
	if err != nil {
		return a.tokenFailure(ctx, err)
	}
	if fresh == token {
		return sent
	}
	return a.post(ctx, fresh, body)
}

func (a *fcmAccount) post(ctx context.Context, token string, body []byte) answer {
	header := http.Header{"Authorization": {"Bearer " + token}, "Content-Type": {"application/json"}}
	response, err := a.transport.RoundTrip(newPost(ctx, a.url, header, body))
	if err != nil {
		return unanswered(ctx, FCM, err)
	}
	defer func() { _ = response.Body.Close() }()
	r := reply{platform: FCM, status: response.StatusCode, header: response.Header}
	if r.status/100 == 2 {
		discard(response.Body)
		return r.accepted()
	}
	r.reason = fcmReason(read(response.Body))
	switch {
	case r.status == http.StatusNotFound && r.reason == "UNREGISTERED":
		return r.permanent(CodeUnregistered)
	case r.status == http.StatusNotFound: // the project or the path is wrong, not the recipient
		return r.failed(statusCode(r.status))
	case r.status == http.StatusForbidden && r.reason == "SENDER_ID_MISMATCH":
		return r.permanent(CodeSenderMismatch)
	case r.reason == "THIRD_PARTY_AUTH_ERROR":
		// The Firebase project can't reach this kind of device, but it can reach others. So the
		// account has not failed.
		a := r.failed(CodeCredentialRefused)
		a.outcome = credential.Outcome{Kind: credential.Neutral}
		return a
	}
	return r.classify()
}

// fcmReason returns the error code in the body of a reply: FCM's own code if there is one, else the
// general one. It returns "" for an unknown code, because a body may repeat parts of the request,
// which must not be logged.
func fcmReason(body []byte) string {
	var decoded struct {
		Error struct {
			Status  string `json:"status"`
			Details []struct {
				ErrorCode string `json:"errorCode"`
			} `json:"details"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &decoded) != nil {
		return ""
	}
	for _, detail := range decoded.Error.Details {
		if slices.Contains(fcmErrors, detail.ErrorCode) {
			return detail.ErrorCode
		}
	}
	if slices.Contains(fcmErrors, decoded.Error.Status) {
		return decoded.Error.Status
	}
	return ""
}

// tokenFailure returns the answer for a push that could not be sent because no access token could
// be got. err is the error of the token endpoint.
func (a *fcmAccount) tokenFailure(ctx context.Context, err error) answer {
	var refused *oauth2.RetrieveError
	if !errors.As(err, &refused) || refused.Response == nil {
		return unanswered(ctx, FCM, errors.New("no access token: no answer"))
	}
	status := refused.Response.StatusCode // the text of RetrieveError has the whole answer in it
	r := reply{platform: FCM, status: status, reason: "from the token endpoint", header: refused.Response.Header}
	switch {
	case status == http.StatusTooManyRequests:
		return r.throttled()
	case status/100 == 4:
		return r.failed(CodeCredentialRefused)
	}
	return r.failed(statusCode(status))
}

type fcmRequest struct {
	Message fcmMessage `json:"message"`
}

type fcmMessage struct {
	Token        string            `json:"token,omitempty"`
	Topic        string            `json:"topic,omitempty"`
	Notification *fcmNotification  `json:"notification,omitempty"`
	Data         map[string]string `json:"data,omitempty"`
	Android      *fcmAndroid       `json:"android,omitempty"`
	APNs         *fcmHeaders       `json:"apns,omitempty"`
	WebPush      *fcmHeaders       `json:"webpush,omitempty"`
}

type fcmNotification struct {
	Title string `json:"title,omitempty"`
	Body  string `json:"body,omitempty"`
}

type fcmAndroid struct {
	CollapseKey string `json:"collapse_key,omitempty"`
	Priority    string `json:"priority,omitempty"`
	TTL         string `json:"ttl,omitempty"`
}

type fcmHeaders struct {
	Headers map[string]string `json:"headers"`
}

// fcmMessageOf returns the message in the form of FCM v1. Behind a token of FCM may be an Android
// device, an Apple device or a browser, each of which has settings of its own in the message.
func fcmMessageOf(m *message, now time.Time) fcmMessage {
	out := fcmMessage{Token: m.fcmToken, Topic: m.fcmTopic}
	if !m.silent() {
		out.Notification = &fcmNotification{Title: m.title, Body: m.body}
	}
	for name, value := range m.data { // FCM has text alone; other values become their JSON
		var s string
		if json.Unmarshal(value, &s) != nil || value[0] != '"' {
			s = string(value)
		}
		if out.Data == nil {
			out.Data = map[string]string{}
		}
		out.Data[name] = s
	}
	if m.ttl == nil && m.collapseKey == "" && m.priority == "" {
		return out
	}
	android := &fcmAndroid{CollapseKey: m.collapseKey}
	apns, web := map[string]string{}, map[string]string{}
	if m.ttl != nil {
		android.TTL = fmt.Sprintf("%ds", *m.ttl)
		apns["apns-expiration"] = expiration(*m.ttl, now)
		web["TTL"] = strconv.Itoa(*m.ttl)
	}
	if m.collapseKey != "" {
		apns["apns-collapse-id"] = m.collapseKey
		web["Topic"] = webPushTopic(m.collapseKey)
	}
	if m.priority != "" {
		android.Priority = map[string]string{"high": "HIGH", "normal": "NORMAL"}[m.priority]
		apns["apns-priority"] = apnsPriority(m)
		web["Urgency"] = m.priority
	}
	out.Android, out.APNs, out.WebPush = android, &fcmHeaders{apns}, &fcmHeaders{web}
	return out
}
