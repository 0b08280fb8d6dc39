package push

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"encoding/json"
	"errors"
	"net/mail"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/golang-jwt/jwt/v5"
	oauthjwt "golang.org/x/oauth2/jwt"
)

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
