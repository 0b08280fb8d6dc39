package push

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

func TestPayloads(t *testing.T) {
	ttl := 60
	web := subscription{
		endpoint: "https://push.example.org/x?y=z", p256dh: encodeBase64(browserKey.PublicKey().Bytes()), auth: encodeBase64(browserAuth),
	}
	padded := strings.NewReplacer("-", "+", "_", "/").Replace(web.p256dh) + "="
	for name, tt := range map[string]struct {
		payload string
		want    message
	}{
		"short form":  {`{"deviceToken":"t","title":"a","message":"b"}`, message{platform: FCM, fcmToken: "t", title: "a", body: "b"}},
		"empty texts": {`{"message":"","title":"","deviceToken":"t"}`, message{platform: FCM, fcmToken: "t"}},
		"fcm":         {`{"to":{"fcm":"t"}}`, message{platform: FCM, fcmToken: "t"}},
		"fcm_topic":   {`{"to":{"fcm_topic":"news-2026_a.b~c%20"}}`, message{platform: FCM, fcmTopic: "news-2026_a.b~c%20"}},
		"long topic":  {`{"to":{"fcm_topic":"` + strings.Repeat("a", 900) + `"}}`, message{platform: FCM, fcmTopic: strings.Repeat("a", 900)}},
		"apns":        {`{"to":{"apns":"0a1b"}}`, message{platform: APNs, apnsToken: "0a1b"}},
		"webpush": {`{"to":{"webpush":{"endpoint":"` + web.endpoint + `","p256dh":"` + web.p256dh + `","auth":"` + web.auth + `"}}}`,
			message{platform: WebPush, subscription: web}},
		"other base64": {`{"to":{"webpush":{"endpoint":"` + web.endpoint + `","p256dh":"` + padded + `","auth":"` + web.auth + `=="}}}`,
			message{platform: WebPush, subscription: web}},
		"everything": {`{"to":{"fcm":"t"},"title":"ü","body":"b","data":{"a":[1]},"ttl_seconds":60,"collapse_key":"k","priority":"normal"}`,
			message{platform: FCM, fcmToken: "t", title: "ü", body: "b", data: map[string]json.RawMessage{"a": json.RawMessage("[1]")},
				ttl: &ttl, collapseKey: "k", priority: "normal"}},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parsePayload(json.RawMessage(tt.payload))
			require.NoError(t, err)
			require.Equal(t, &tt.want, m)
		})
	}
}

func TestPayloadsThatAreNoMessage(t *testing.T) {
	s, p, o := startWebPush(t, nil)
	web := func(endpoint, p256dh, auth string) string {
		return `{"to":{"webpush":{"endpoint":"` + endpoint + `","p256dh":"` + p256dh + `","auth":"` + auth + `"}}}`
	}
	key, auth := encodeBase64(browserKey.PublicKey().Bytes()), encodeBase64(browserAuth)
	for name, payload := range map[string]string{
		"nothing":               ``,
		"not JSON":              `{"to":`,
		"null":                  `null`,
		"list":                  `[]`,
		"empty object":          `{}`,
		"short, no token":       `{"title":"a","message":"b"}`,
		"short, empty token":    `{"deviceToken":"","title":"a","message":"b"}`,
		"short, no title":       `{"deviceToken":"secret","message":"b"}`,
		"short, no message":     `{"deviceToken":"secret","title":"a"}`,
		"short, number":         `{"deviceToken":"secret","title":7,"message":"b"}`,
		"short, null":           `{"deviceToken":"secret","title":null,"message":"b"}`,
		"short, unknown field":  `{"deviceToken":"secret","title":"a","message":"b","secret":1}`,
		"short, other case":     `{"devicetoken":"secret","title":"a","message":"b"}`,
		"short, field twice":    `{"deviceToken":"secret","deviceToken":"secret","title":"a","message":"b"}`,
		"both forms":            `{"to":{"fcm":"secret"},"deviceToken":"secret"}`,
		"no target":             `{"to":{}}`,
		"target null":           `{"to":null}`,
		"target text":           `{"to":"secret"}`,
		"token null":            `{"to":{"fcm":null}}`,
		"two targets":           `{"to":{"fcm":"secret","apns":"secret"}}`,
		"two targets of fcm":    `{"to":{"fcm":"secret","fcm_topic":"secret"}}`,
		"target twice":          `{"to":{"fcm":"secret","fcm":"secret"}}`,
		"to twice":              `{"to":{"fcm":"secret"},"to":{"apns":"secret"}}`,
		"unknown target":        `{"to":{"sms":"secret"}}`,
		"unknown field":         `{"to":{"fcm":"secret"},"sound":"secret"}`,
		"token with a space":    `{"to":{"apns":"secret secret"}}`,
		"token with a newline":  `{"to":{"apns":"secret\nsecret"}}`,
		"token too long":        `{"to":{"apns":"` + strings.Repeat("secret", 1000) + `"}}`,
		"topic with a slash":    `{"to":{"fcm_topic":"/topics/secret"}}`,
		"empty topic":           `{"to":{"fcm_topic":""}}`,
		"topic too long":        `{"to":{"fcm_topic":"` + strings.Repeat("secret", 151) + `"}}`,
		"http endpoint":         web("http://secret.example.org", key, auth),
		"relative endpoint":     web("/secret", key, auth),
		"endpoint with user":    web("https://u:secret@push.example.org", key, auth),
		"no host":               web("https://", key, auth),
		"not a point":           web("https://secret.example.org", encodeBase64(make([]byte, 65)), auth),
		"key is not base64":     web("https://secret.example.org", "secret!", auth),
		"short auth":            web("https://secret.example.org", key, auth[:20]),
		"no auth":               `{"to":{"webpush":{"endpoint":"https://secret.example.org","p256dh":"` + key + `"}}}`,
		"subscription's extras": `{"to":{"webpush":{"endpoint":"https://secret.example.org","keys":{}}}}`,
		"data list":             `{"to":{"fcm":"secret"},"data":[1]}`,
		"data null":             `{"to":{"fcm":"secret"},"data":null}`,
		"aps for APNs":          `{"to":{"apns":"secret"},"data":{"aps":{}}}`,
		"ttl text":              `{"to":{"fcm":"secret"},"ttl_seconds":"60"}`,
		"ttl null":              `{"to":{"fcm":"secret"},"ttl_seconds":null}`,
		"ttl negative":          `{"to":{"fcm":"secret"},"ttl_seconds":-1}`,
		"ttl too long":          `{"to":{"fcm":"secret"},"ttl_seconds":2419201}`,
		"ttl fraction":          `{"to":{"fcm":"secret"},"ttl_seconds":1.5}`,
		"collapse key too long": `{"to":{"fcm":"secret"},"collapse_key":"` + strings.Repeat("x", 65) + `"}`,
		"priority":              `{"to":{"fcm":"secret"},"priority":"secret"}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := processor.Run(t.Context(), p, job(1, payload))
			v := processor.Classify(err)
			require.Equal(t, processor.Fail, v.Kind, "%v", err)
			require.Equal(t, CodeBadPayload, v.Code)
			require.NotContains(t, v.Message, "secret", "a payload does not go into errors")
		})
	}
	require.Empty(t, s.got())
	require.Empty(t, o.all, "no account was borrowed")
}

// TestAnAdmittedJobKeepsItsMessage: the payload is read once, by Admit. Process gets the message
// through its context.
func TestAnAdmittedJobKeepsItsMessage(t *testing.T) {
	s, p, _ := startAPNs(t)
	admittedJob := job(1, toApple)
	pass, err := p.Admit(t.Context(), admittedJob)
	require.NoError(t, err)
	admittedJob.Payload = nil
	_, err = p.Process(pass.Into(t.Context()), admittedJob)
	pass.Return(err)
	require.NoError(t, err)
	require.Equal(t, "/3/device/"+appleToken, s.last(t).URL.Path)
}

func TestPlatformsWithoutAnAccount(t *testing.T) {
	_, p, _ := startWebPush(t, nil)
	for _, payload := range []string{toFCM, toApple, `{"to":{"fcm_topic":"news"}}`} {
		_, err := processor.Run(t.Context(), p, job(1, payload))
		require.Equal(t, processor.Fail, processor.Classify(err).Kind)
		require.Equal(t, CodeNotConfigured, processor.Classify(err).Code)
	}
}

// TestSources: if the source of accounts denies one, or lends one that the processor does not know,
// the job is deferred. After another error of the source it is retried. No push is sent.
func TestSources(t *testing.T) {
	s, p, o := startWebPush(t, nil)
	o.err = &credential.DeniedError{After: 7 * time.Second, Reason: "circuit open"}
	_, err := processor.Run(t.Context(), p, job(1, toWeb(s.URL)))
	v := processor.Classify(err)
	require.Regexp(t, `^no account is free until .*: circuit open$`, v.Message)
	v.Message = ""
	require.Equal(t, processor.Verdict{Kind: processor.Defer, Code: processor.CodeResourceBusy, After: 7 * time.Second}, v)

	o.err = errors.New("redis is away")
	_, err = processor.Run(t.Context(), p, job(1, toWeb(s.URL)))
	require.Equal(t, processor.RetryLater, processor.Classify(err).Kind)
	require.ErrorIs(t, err, o.err)

	o.err, o.next = nil, credential.InTurn("removed")
	_, err = processor.Run(t.Context(), p, job(1, toWeb(s.URL)))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.Equal(t, credential.Unknown, o.last(t).Kind)
	require.Empty(t, s.got())
}

// FuzzParsePayload: each payload makes one message to one target, or none. The target has no space,
// line break or NUL, and the message can be encoded for FCM and for APNs.
func FuzzParsePayload(f *testing.F) {
	for _, seed := range []string{toFCM, toApple, toWeb("https://push.example.org/x"), `{"to":{"fcm_topic":"a"},"ttl_seconds":1}`, `{}`, ``, `{"to":{"fcm":"a","apns":"b"}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		m, err := parsePayload(payload)
		if err != nil {
			return
		}
		targets := 0
		for _, target := range []string{m.fcmToken, m.fcmTopic, m.apnsToken, m.subscription.endpoint} {
			if target != "" {
				targets++
			}
			require.False(t, strings.ContainsAny(target, "\r\n \x00"))
		}
		require.Equal(t, 1, targets)
		_, err = json.Marshal(fcmMessageOf(m, time.Now()))
		require.NoError(t, err)
		_, err = json.Marshal(apnsPayload(m))
		require.NoError(t, err)
	})
}

// FuzzParseObject: parseObject splits a JSON object as encoding/json does, and refuses other valid
// JSON. unquote decodes a string as encoding/json does.
func FuzzParseObject(f *testing.F) {
	for _, seed := range []string{
		toFCM, toApple, `{}`, ` { } `, `{"a":1,"b" : [ {"c":"]}"} ] ,"c":null}`, `{"\u0061\"":"\\","a":"\""}`, `{"a":{}}`,
		"{\"\xff\":\"\xff\\n\"}", `{"a":-1.5e3 }`, `[1]`, `"a"`, `7`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if !json.Valid(raw) {
			return
		}
		got, err := parseObject(raw, "")
		if !bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		var want object
		d := json.NewDecoder(bytes.NewReader(raw))
		_, err = d.Token()
		require.NoError(t, err)
		for d.More() {
			name, err := d.Token()
			require.NoError(t, err)
			var value json.RawMessage
			require.NoError(t, d.Decode(&value))
			want.names, want.values = append(want.names, name.(string)), append(want.values, value)
		}
		require.Equal(t, want, got)
		for _, value := range got.values {
			var s string
			if value[0] == '"' && json.Unmarshal(value, &s) == nil {
				require.Equal(t, s, unquote(value))
			}
		}
	})
}
