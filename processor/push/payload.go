package push

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/mail"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/golang-jwt/jwt/v5"
	oauthjwt "golang.org/x/oauth2/jwt"
)

const (
	maxTargetBytes      = 4096    // of a device token or an endpoint
	maxCollapseKeyBytes = 64      // APNs allows no more
	maxTTLSeconds       = 2419200 // four weeks: FCM allows no more
	authBytes           = 16      // of a Web Push subscription (RFC 8291, 3.2)
)

// message is a parsed and checked payload: a push to one target of one platform. Exactly one of
// fcmToken, fcmTopic, apnsToken and subscription is set.
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

type field func(json.RawMessage) error

// fields is a function that returns, for the name of a field, the function that decodes its value;
// nil for an unknown name.
type fields func(name string) field

// parsePayload reads the short form {deviceToken, title, message} or the full form, which has the
// field to. Errors name fields of the form alone; they contain no part of the payload.
func parsePayload(raw json.RawMessage) (*message, error) {
	if !json.Valid(raw) {
		return nil, errors.New("the payload is not JSON")
	}
	o, err := parseObject(raw, "the payload")
	if err != nil {
		return nil, err
	}
	m := &message{}
	if !o.has("to") {
		m.platform = FCM
		return m, o.decode(m.shortForm, "deviceToken", "title", "message")
	}
	if err := o.decode(m.fullForm, "to"); err != nil {
		return nil, err
	}
	if _, reserved := m.data["aps"]; reserved && m.platform == APNs {
		return nil, errors.New("data may not have the field aps, which APNs reserves")
	}
	return m, nil
}

func (m *message) shortForm(name string) field {
	switch name {
	case "deviceToken":
		return target(&m.fcmToken)
	case "title":
		return text(&m.title)
	case "message":
		return text(&m.body)
	}
	return nil
}

func (m *message) fullForm(name string) field {
	switch name {
	case "to":
		return m.decodeTo
	case "title":
		return text(&m.title)
	case "body":
		return text(&m.body)
	case "data":
		return m.decodeData
	case "ttl_seconds":
		return m.decodeTTL
	case "collapse_key":
		return m.decodeCollapseKey
	case "priority":
		return m.decodePriority
	}
	return nil
}

// object is a JSON object with its fields in their order. Their names are exact: encoding/json
// alone would accept another case, unknown fields and fields that are given twice.
type object struct {
	name   string // for errors
	names  []string
	values []json.RawMessage
}

// parseObject splits a JSON object into its fields. raw must be valid JSON. A [json.Decoder] would
// take three times as long.
func parseObject(raw json.RawMessage, name string) (object, error) {
	o := object{name: name}
	rest := trim(raw)
	if rest[0] != '{' {
		return o, fmt.Errorf("%s is not an object", name)
	}
	for rest = trim(rest[1:]); rest[0] != '}'; {
		n := valueEnd(rest)
		o.names = append(o.names, unquote(rest[:n]))
		rest = trim(trim(rest[n:])[len(":"):])
		n = valueEnd(rest)
		o.values = append(o.values, rest[:n])
		if rest = trim(rest[n:]); rest[0] == ',' {
			rest = trim(rest[1:])
		}
	}
	return o, nil
}

const spaces = " \t\r\n"

func trim(raw json.RawMessage) json.RawMessage { return bytes.TrimLeft(raw, spaces) }

// valueEnd returns the length, in bytes, of the JSON value at the start of raw.
func valueEnd(raw json.RawMessage) int {
	switch raw[0] {
	case '"':
		return textEnd(raw)
	case '{', '[':
		for i, depth := 0, 0; ; i++ {
			switch raw[i] {
			case '"':
				i += textEnd(raw[i:]) - 1
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
		}
	}
	return bytes.IndexAny(raw, ",}"+spaces) // a number or a literal
}

// textEnd returns the length, in bytes, of the JSON string at the start of raw.
func textEnd(raw json.RawMessage) int {
	for i := 1; ; i++ {
		switch raw[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
}

func unquote(raw json.RawMessage) (s string) {
	if text := raw[1 : len(raw)-1]; bytes.IndexByte(text, '\\') < 0 && utf8.Valid(text) {
		return string(text)
	}
	_ = json.Unmarshal(raw, &s) // replaces what is not UTF-8
	return s
}

func (o object) has(name string) bool { return slices.Contains(o.names, name) }

// decode decodes the values of all fields of the object. It fails if a field is unknown or given
// twice, or if a required one is missing.
func (o object) decode(known fields, required ...string) error {
	for i, name := range o.names {
		decode := known(name)
		switch {
		case decode == nil:
			return fmt.Errorf("%s has an unknown field", o.name)
		case slices.Contains(o.names[:i], name):
			return fmt.Errorf("%s has the field %s twice", o.name, name)
		}
		if err := decode(o.values[i]); err != nil {
			return fmt.Errorf("%s %w", name, err)
		}
	}
	for _, name := range required {
		if !o.has(name) {
			return fmt.Errorf("%s has no field %s", o.name, name)
		}
	}
	return nil
}

func text(to *string) field {
	return func(raw json.RawMessage) error {
		if raw[0] != '"' {
			return errors.New("is not text")
		}
		*to = unquote(raw)
		return nil
	}
}

// target returns the decoder of a device token, an endpoint or a collapse key. These are opaque,
// but they are never empty and have no spaces.
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

var topicName = regexp.MustCompile(`^[A-Za-z0-9_.~%-]+$`)

const maxTopicName = 900 // bytes

func (m *message) decodeTo(raw json.RawMessage) error {
	o, err := parseObject(raw, "the target")
	if err == nil {
		err = o.decode(m.target)
	}
	if err != nil {
		return fmt.Errorf("is wrong: %w", err)
	}
	if len(o.names) != 1 {
		return fmt.Errorf("has %d targets instead of one", len(o.names))
	}
	return nil
}

func (m *message) target(name string) field {
	switch name {
	case "fcm":
		m.platform = FCM
		return target(&m.fcmToken)
	case "fcm_topic":
		m.platform = FCM
		return m.decodeTopic
	case "apns":
		m.platform = APNs
		return target(&m.apnsToken)
	case "webpush":
		m.platform = WebPush
		return m.decodeSubscription
	}
	return nil
}

func (m *message) decodeTopic(raw json.RawMessage) error {
	if err := text(&m.fcmTopic)(raw); err != nil {
		return err
	}
	if len(m.fcmTopic) > maxTopicName || !topicName.MatchString(m.fcmTopic) {
		return errors.New("is not the name of a topic")
	}
	return nil
}

func (m *message) decodeSubscription(raw json.RawMessage) error {
	s := &m.subscription
	o, err := parseObject(raw, "the subscription")
	if err == nil {
		err = o.decode(s.field, "endpoint", "p256dh", "auth")
	}
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

func (s *subscription) field(name string) field {
	switch name {
	case "endpoint":
		return target(&s.endpoint)
	case "p256dh":
		return text(&s.p256dh)
	case "auth":
		return text(&s.auth)
	}
	return nil
}

// decodeBase64 decodes base64 in the standard and the URL alphabet, with and without padding:
// subscriptions occur in all four forms.
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

const googleTokenURL = "https://oauth2.googleapis.com/token"

// projectID matches the ids of Google's projects. The ids of projects of a domain have a colon.
var projectID = regexp.MustCompile(`^[A-Za-z0-9.:-]{1,128}$`)

// fcm checks the i-th account of FCM, and adds it if it has no mistake.
func (l *loader) fcm(i int, e fcmEntry) {
	c, account := l.Account(FCM, i, e.Entry)
	base := checkURL(c, e.URL, fcmURL)
	content := c.Secret("credentials_file", e.CredentialsFile)
	key := struct {
		Type         string `json:"type"`
		ProjectID    string `json:"project_id"`
		PrivateKeyID string `json:"private_key_id"`
		PrivateKey   string `json:"private_key"`
		ClientEmail  string `json:"client_email"`
		TokenURI     string `json:"token_uri"`
	}{TokenURI: googleTokenURL}
	if content != nil {
		err := json.Unmarshal(content, &key)
		c.Check(err == nil, "credentials_file: is not JSON with the fields of a service account's key")
		if err == nil {
			c.Check(key.Type == "service_account", "credentials_file: type is not service_account")
			c.Check(projectID.MatchString(key.ProjectID), "credentials_file: project_id is missing or not valid")
			c.Check(key.ClientEmail != "", "credentials_file: client_email is missing")
			c.Check(isHTTPSText(key.TokenURI), "credentials_file: token_uri is not an absolute https URL")
			_, err = jwt.ParseRSAPrivateKeyFromPEM([]byte(key.PrivateKey))
			c.Check(err == nil, "credentials_file: private_key is not an RSA key in PEM")
		}
	}
	l.add(FCM, c, account, func() sender {
		return newFCMAccount(base, key.ProjectID, &oauthjwt.Config{
			Email: key.ClientEmail, PrivateKey: []byte(key.PrivateKey), PrivateKeyID: key.PrivateKeyID,
			Scopes: []string{fcmScope}, TokenURL: key.TokenURI,
		}, l.parts)
	}, e.URL, string(content))
}

// apns checks the i-th account of APNs, and adds it if it has no mistake.
func (l *loader) apns(i int, e apnsEntry) {
	c, account := l.Account(APNs, i, e.Entry)
	instead := apnsURL
	if e.Sandbox {
		instead = apnsSandboxURL
	}
	base := checkURL(c, e.URL, instead)
	for _, f := range []struct{ name, value string }{
		{"key_id", e.KeyID}, {"team_id", e.TeamID}, {"topic", e.Topic},
	} {
		c.Check(f.value != "" && !strings.ContainsFunc(f.value, notGraphic), "%s is missing or not valid", f.name)
	}
	var key *ecdsa.PrivateKey
	content := c.Secret("key_file", e.KeyFile)
	if content != nil {
		var err error
		key, err = jwt.ParseECPrivateKeyFromPEM(content)
		c.Check(err == nil && key.Curve == elliptic.P256(), "key_file: is not a key of the curve P-256 in PEM")
	}
	l.add(APNs, c, account, func() sender { return newAPNsAccount(base, key, e, l.parts) },
		e.URL, e.KeyID, e.TeamID, e.Topic, strconv.FormatBool(e.Sandbox), string(content))
}

// webPush checks the i-th account of Web Push, and adds it if it has no mistake.
func (l *loader) webPush(i int, e webPushEntry) {
	c, account := l.Account(WebPush, i, e.Entry)
	subject := strings.TrimPrefix(e.Subject, "mailto:")
	address, err := mail.ParseAddress(subject)
	c.Check(isHTTPSText(e.Subject) || subject != e.Subject && err == nil && address.Address == subject,
		"subject is neither mailto: with an e-mail address nor an absolute https URL")
	a := &webPushAccount{subject: subject, client: l.parts.public}
	content := c.Secret("key_file", e.KeyFile)
	if content != nil {
		key, err := parseVAPIDKey(content)
		c.Check(err == nil, "key_file: is not a private key of the curve P-256 in base64url or PEM")
		if err == nil {
			a.private, a.public = encodeBase64(key.Bytes()), encodeBase64(key.PublicKey().Bytes())
		}
	}
	l.add(WebPush, c, account, func() sender { return a }, subject, string(content))
}

func parseVAPIDKey(content []byte) (*ecdh.PrivateKey, error) {
	content = bytes.TrimSpace(content)
	if !bytes.HasPrefix(content, []byte("-----BEGIN")) {
		raw, err := decodeBase64(string(content))
		if err != nil {
			return nil, err
		}
		return ecdh.P256().NewPrivateKey(raw)
	}
	key, err := jwt.ParseECPrivateKeyFromPEM(content)
	if err != nil {
		return nil, err
	}
	if key.Curve != elliptic.P256() {
		return nil, errors.New("another curve")
	}
	return key.ECDH()
}

func isHTTPS(u *url.URL) bool { return u.Scheme == "https" && u.Hostname() != "" && u.User == nil }

func isHTTPSText(s string) bool {
	u, err := url.Parse(s)
	return err == nil && isHTTPS(u)
}
