package push

import (
	"bytes"
	"crypto/ecdh"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

const (
	maxTargetBytes      = 4096    // of a device token or an endpoint
	maxCollapseKeyBytes = 64      // APNs allows no more
	maxTTLSeconds       = 2419200 // four weeks: FCM allows no more
	authBytes           = 16      // of a Web Push subscription (RFC 8291, 3.2)
)

// message is a push that is ready to be sent. Exactly one of the targets is set.
type message struct {
	platform string

	fcmToken, fcmTopic, apnsToken string
	subscription                  subscription

	title, body string
	data        map[string]json.RawMessage
	ttl         *int // seconds; nil: as long as the platform keeps a message
	collapseKey string
	priority    string // high, normal or ""
}

// subscription is a Web Push subscription, as a browser returns it.
type subscription struct{ endpoint, p256dh, auth string }

// silent says that the message shows nothing to the user of the device.
func (m *message) silent() bool { return m.title == "" && m.body == "" }

// field decodes the value of one field.
type field func(json.RawMessage) error

// parsePayload reads the short form {deviceToken, title, message} or the full form, which has the
// field to. Errors name fields of the form alone; they contain no part of the payload.
func parsePayload(raw json.RawMessage) (*message, error) {
	if !json.Valid(raw) {
		return nil, errors.New("the payload is not JSON")
	}
	m := &message{}
	var names struct {
		To json.RawMessage `json:"to"`
	}
	if json.Unmarshal(raw, &names) != nil || names.To == nil {
		m.platform = FCM
		return m, object(raw, "the payload", map[string]field{
			"deviceToken": target(&m.fcmToken), "title": text(&m.title), "message": text(&m.body),
		}, "deviceToken", "title", "message")
	}
	err := object(raw, "the payload", map[string]field{
		"to": m.decodeTo, "title": text(&m.title), "body": text(&m.body), "data": m.decodeData,
		"ttl_seconds": m.decodeTTL, "collapse_key": m.decodeCollapseKey, "priority": m.decodePriority,
	}, "to")
	if err != nil {
		return nil, err
	}
	if _, reserved := m.data["aps"]; reserved && m.platform == APNs {
		return nil, errors.New("data may not have the field aps, which APNs reserves")
	}
	return m, nil
}

// object decodes a JSON object. The names of fields are exact: encoding/json alone would accept
// another case, unknown fields and fields that are given twice.
func object(raw json.RawMessage, name string, fields map[string]field, required ...string) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	if start, err := d.Token(); err != nil || start != json.Delim('{') {
		return fmt.Errorf("%s is not an object", name)
	}
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return fmt.Errorf("%s is not JSON", name)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return fmt.Errorf("%s is not JSON", name)
		}
		fieldName, _ := key.(string)
		decode, known := fields[fieldName]
		switch {
		case !known:
			return fmt.Errorf("%s has an unknown field", name)
		case seen[fieldName]:
			return fmt.Errorf("%s has the field %s twice", name, fieldName)
		}
		seen[fieldName] = true
		if err := decode(value); err != nil {
			return fmt.Errorf("%s %w", fieldName, err)
		}
	}
	for _, field := range required {
		if !seen[field] {
			return fmt.Errorf("%s has no field %s", name, field)
		}
	}
	return nil
}

func text(to *string) field {
	return func(raw json.RawMessage) error {
		if raw[0] != '"' || json.Unmarshal(raw, to) != nil {
			return errors.New("is not text")
		}
		return nil
	}
}

// target decodes a device token. Tokens are opaque, but they are never empty and have no spaces.
func target(to *string) field {
	return func(raw json.RawMessage) error {
		if err := text(to)(raw); err != nil {
			return err
		}
		if *to == "" || len(*to) > maxTargetBytes || strings.ContainsFunc(*to, notGraphic) {
			return fmt.Errorf("is not 1 to %d printable ASCII characters", maxTargetBytes)
		}
		return nil
	}
}

func notGraphic(r rune) bool { return r <= ' ' || r > '~' }

var topicName = regexp.MustCompile(`^[A-Za-z0-9_.~%-]{1,900}$`)

func (m *message) decodeTo(raw json.RawMessage) error {
	targets := 0
	of := func(platform string, decode field) field {
		return func(raw json.RawMessage) error {
			m.platform = platform
			targets++
			return decode(raw)
		}
	}
	err := object(raw, "the target", map[string]field{
		"fcm": of(FCM, target(&m.fcmToken)), "fcm_topic": of(FCM, m.decodeTopic),
		"apns": of(APNs, target(&m.apnsToken)), "webpush": of(WebPush, m.decodeSubscription),
	})
	if err != nil {
		return fmt.Errorf("is wrong: %w", err)
	}
	if targets != 1 {
		return fmt.Errorf("has %d targets instead of one", targets)
	}
	return nil
}

func (m *message) decodeTopic(raw json.RawMessage) error {
	if err := text(&m.fcmTopic)(raw); err != nil {
		return err
	}
	if !topicName.MatchString(m.fcmTopic) {
		return errors.New("is not the name of a topic")
	}
	return nil
}

func (m *message) decodeSubscription(raw json.RawMessage) error {
	s := &m.subscription
	err := object(raw, "the subscription", map[string]field{
		"endpoint": target(&s.endpoint), "p256dh": text(&s.p256dh), "auth": text(&s.auth),
	}, "endpoint", "p256dh", "auth")
	if err != nil {
		return fmt.Errorf("is wrong: %w", err)
	}
	endpoint, err := url.Parse(s.endpoint)
	if err != nil || endpoint.Scheme != "https" || endpoint.Hostname() == "" || endpoint.User != nil {
		return errors.New("is wrong: endpoint is not an absolute https URL")
	}
	key, err := decodeBase64(s.p256dh)
	if err == nil {
		_, err = ecdh.P256().NewPublicKey(key)
	}
	if err != nil {
		return errors.New("is wrong: p256dh is not a public key in base64url")
	}
	auth, err := decodeBase64(s.auth)
	if err != nil || len(auth) != authBytes {
		return fmt.Errorf("is wrong: auth is not %d bytes in base64url", authBytes)
	}
	s.p256dh, s.auth = encodeBase64(key), encodeBase64(auth)
	return nil
}

// decodeBase64 accepts both alphabets, with and without padding, as subscriptions come in all four.
func decodeBase64(s string) ([]byte, error) {
	s = strings.NewReplacer("+", "-", "/", "_").Replace(strings.TrimRight(s, "="))
	return base64.RawURLEncoding.DecodeString(s)
}

func encodeBase64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func (m *message) decodeData(raw json.RawMessage) error {
	if raw[0] != '{' || json.Unmarshal(raw, &m.data) != nil {
		return errors.New("is not an object")
	}
	return nil
}

func (m *message) decodeTTL(raw json.RawMessage) error {
	if json.Unmarshal(raw, &m.ttl) != nil || m.ttl == nil || *m.ttl < 0 || *m.ttl > maxTTLSeconds {
		return fmt.Errorf("is not a whole number from 0 to %d", maxTTLSeconds)
	}
	return nil
}

func (m *message) decodeCollapseKey(raw json.RawMessage) error {
	if err := target(&m.collapseKey)(raw); err != nil || len(m.collapseKey) > maxCollapseKeyBytes {
		return fmt.Errorf("is not 1 to %d printable ASCII characters", maxCollapseKeyBytes)
	}
	return nil
}

func (m *message) decodePriority(raw json.RawMessage) error {
	if err := text(&m.priority)(raw); err != nil || m.priority != "high" && m.priority != "normal" {
		return errors.New("is not high or normal")
	}
	return nil
}
