package push

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"

	"github.com/SherClockHolmes/webpush-go"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// webPushAccount sends messages with one VAPID key. Endpoints come from payloads, which are not
// trusted: client refuses addresses that are not public, unless the Config allows them.
type webPushAccount struct {
	private, public string // of the VAPID key, in base64url
	subject         string // an https URL, or an e-mail address without mailto:, which the library adds
	client          *http.Client
}

func (a *webPushAccount) close() {} // the connections belong to all accounts

// webPushMessage is the JSON that the website's service worker gets in the browser.
type webPushMessage struct {
	Title string                     `json:"title,omitempty"`
	Body  string                     `json:"body,omitempty"`
	Data  map[string]json.RawMessage `json:"data,omitempty"`
}

func (a *webPushAccount) send(ctx context.Context, _ processor.Job, m *message) answer {
	body, err := json.Marshal(webPushMessage{Title: m.title, Body: m.body, Data: m.data})
	if err != nil {
		return answer{err: processor.Permanent(CodeBadPayload, errors.New("the message can't be encoded"))}
	}
	options := &webpush.Options{
		HTTPClient: a.client, Subscriber: a.subject, VAPIDPublicKey: a.public, VAPIDPrivateKey: a.private,
		TTL: maxTTLSeconds, Urgency: webpush.Urgency(m.priority),
	}
	if m.ttl != nil {
		options.TTL = *m.ttl
	}
	if m.collapseKey != "" {
		options.Topic = webPushTopic(m.collapseKey)
	}
	response, err := webpush.SendNotificationWithContext(ctx, body, &webpush.Subscription{
		Endpoint: m.subscription.endpoint,
		Keys:     webpush.Keys{P256dh: m.subscription.p256dh, Auth: m.subscription.auth},
	}, options)
	switch {
	case errors.Is(err, webpush.ErrMaxPadExceeded):
		return answer{
			err:     processor.Permanent(CodeTooLarge, errors.New("push by webpush: the message is too large")),
			outcome: credential.Outcome{Kind: credential.Unused},
		}
	case errors.Is(err, egress.ErrAddressRefused):
		return answer{
			err: processor.Permanent(CodeAddressRefused,
				fmt.Errorf("push by webpush: %w; BULKACTION_PUSH_ALLOWED_CIDRS or "+
					"BULKACTION_PUSH_ALLOW_PRIVATE would allow it", egress.ErrAddressRefused)),
			outcome: credential.Outcome{Kind: credential.Unused},
		}
	case err != nil:
		return ofEndpoint(unanswered(ctx, WebPush, kindOnly(err)))
	}
	defer func() { _ = response.Body.Close() }()
	discard(response.Body)
	r := reply{platform: WebPush, status: response.StatusCode, header: response.Header}
	if r.status == http.StatusNotFound || r.status == http.StatusGone {
		return r.permanent(CodeUnregistered)
	}
	return ofEndpoint(r.classify())
}

// ofEndpoint makes the account's outcome Neutral if a Web Push endpoint has not accepted the
// message. Each subscription names its own endpoint, which a tenant may have made up, so a few bad
// ones must not stop the account for all tenants. That includes a refused key (a subscription may
// be for another one) and a long Retry-After.
func ofEndpoint(a answer) answer {
	if a.err != nil {
		a.outcome = credential.Outcome{Kind: credential.Neutral}
	}
	return a
}

var webPushTopicName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,32}$`)

// webPushTopic returns a collapse key as the header Topic, which has at most 32 characters (RFC
// 8030, 5.4). It replaces a key that does not fit by its hash.
func webPushTopic(key string) string {
	if webPushTopicName.MatchString(key) {
		return key
	}
	hash := sha256.Sum256([]byte(key))
	return encodeBase64(hash[:24])
}
