package push

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	googleToken = "dQw4w9:APA91b-secret-token"
	toFCM       = `{"deviceToken":"` + googleToken + `","title":"Sale","message":"All half price"}`
)

// newToken answers with the access token access-CALL.
func newToken(call int, w http.ResponseWriter, _ request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"access_token":"access-%d","expires_in":3600,"token_type":"Bearer"}`, call)
}

// startFCM starts fakes of FCM and of Google's token endpoint, and a processor with one account
// there.
func startFCM(t testing.TB, options ...Option) (s, google *service, p *Processor, o *outcomes) {
	s, google = serve(t, status(http.StatusOK, `{"name":"projects/shop/messages/1"}`)), serve(t, newToken)
	f := newFolder(t)
	f.fcmKey(t, "fcm.json", "shop", google.URL+"/token")
	o = &outcomes{}
	return s, google, start(t, config(t, f, fcmYAML(s.URL)), append(options, WithChoice(o.choice))...), o
}

func TestRequestsToFCM(t *testing.T) {
	s, google, p, _ := startFCM(t)
	for name, tt := range map[string]struct{ payload, message string }{
		"short form": {toFCM, `{"token":"` + googleToken + `","notification":{"title":"Sale","body":"All half price"}}`},
		"token":      {`{"to":{"fcm":"t"},"body":"b"}`, `{"token":"t","notification":{"body":"b"}}`},
		"topic":      {`{"to":{"fcm_topic":"news"},"title":"a"}`, `{"topic":"news","notification":{"title":"a"}}`},
		"data":       {`{"to":{"fcm":"t"},"data":{"a":"b","n":7,"o":{"x":[]},"z":null}}`, `{"token":"t","data":{"a":"b","n":"7","o":"{\"x\":[]}","z":"null"}}`},
		"settings": {`{"to":{"fcm":"t"},"body":"b","ttl_seconds":0,"collapse_key":"sale","priority":"high"}`,
			`{"token":"t","notification":{"body":"b"},"android":{"ttl":"0s","collapse_key":"sale","priority":"HIGH"},
				"apns":{"headers":{"apns-expiration":"0","apns-collapse-id":"sale","apns-priority":"10"}},
				"webpush":{"headers":{"TTL":"0","Topic":"sale","Urgency":"high"}}}`},
	} {
		t.Run(name, func(t *testing.T) {
			result, err := processor.Run(t.Context(), p, job(1, tt.payload))
			require.NoError(t, err)
			require.Equal(t, Result{Platform: FCM, Code: 200}, result)
			r := s.last(t)
			require.Equal(t, "POST /v1/projects/shop/messages:send", r.Method+" "+r.URL.Path)
			require.Equal(t, "Bearer access-1", r.Header.Get("Authorization"))
			require.JSONEq(t, `{"message":`+tt.message+`}`, string(r.body))
		})
	}
	require.Len(t, google.got(), 1, "one access token serves all pushes")
}

func TestTheAccessTokenIsAskedForWithTheServiceAccount(t *testing.T) {
	_, google, p, _ := startFCM(t)
	_, err := processor.Run(t.Context(), p, job(1, toFCM))
	require.NoError(t, err)
	form, err := url.ParseQuery(string(google.last(t).body))
	require.NoError(t, err)
	require.Equal(t, "urn:ietf:params:oauth:grant-type:jwt-bearer", form.Get("grant_type"))
	assertion, err := jwt.Parse(form.Get("assertion"), func(token *jwt.Token) (any, error) { return &serviceKey.PublicKey, nil },
		jwt.WithValidMethods([]string{"RS256"}), jwt.WithAudience(google.URL+"/token"), jwt.WithIssuer("push@shop.example"))
	require.NoError(t, err)
	require.Equal(t, "kid-1", assertion.Header["kid"])
	require.Equal(t, fcmScope, assertion.Claims.(jwt.MapClaims)["scope"])
}

func TestAnswersOfFCM(t *testing.T) {
	fault := func(code, status string) string {
		return `{"error":{"message":"SECRET","status":"` + status + `","details":[
			{"@type":"type.googleapis.com/google.firebase.fcm.v1.FcmError","errorCode":"` + code + `"}]}}`
	}
	general := func(status string) string { return `{"error":{"message":"SECRET","status":"` + status + `"}}` }
	s, _, p, o := startFCM(t)
	for name, tt := range map[string]row{
		"accepted":               {status: 200, body: "{}", kind: processor.Done, outcome: credential.Success},
		"UNREGISTERED":           {status: 404, body: fault("UNREGISTERED", "NOT_FOUND"), kind: processor.Fail, code: CodeUnregistered, mayContain: "404 UNREGISTERED"},
		"404 of the project":     {status: 404, body: general("NOT_FOUND"), kind: processor.RetryLater, code: "PUSH_404", outcome: credential.Failure},
		"INVALID_ARGUMENT":       {status: 400, body: fault("INVALID_ARGUMENT", "INVALID_ARGUMENT"), kind: processor.Fail, code: CodeInvalidArgument},
		"400 without details":    {status: 400, body: general("INVALID_ARGUMENT"), kind: processor.Fail, code: CodeInvalidArgument, mayContain: "INVALID_ARGUMENT"},
		"unknown code":           {status: 400, body: fault("SECRET", "SECRET"), kind: processor.Fail, code: CodeInvalidArgument},
		"SENDER_ID_MISMATCH":     {status: 403, body: fault("SENDER_ID_MISMATCH", "PERMISSION_DENIED"), kind: processor.Fail, code: CodeSenderMismatch},
		"403 of the account":     {status: 403, body: general("PERMISSION_DENIED"), kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"413":                    {status: 413, body: "SECRET", kind: processor.Fail, code: CodeTooLarge},
		"401 for iOS devices":    {status: 401, body: fault("THIRD_PARTY_AUTH_ERROR", "UNAUTHENTICATED"), kind: processor.RetryLater, code: CodeCredentialRefused, mayContain: "401 THIRD_PARTY_AUTH_ERROR"},
		"429":                    {status: 429, body: fault("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED"), kind: processor.Throttle, code: processor.CodeThrottled, after: time.Minute, outcome: credential.Throttled},
		"429 with Retry-After":   {status: 429, header: "90", kind: processor.Throttle, code: processor.CodeThrottled, after: 90 * time.Second, outcome: credential.Throttled},
		"500":                    {status: 500, body: fault("INTERNAL", "INTERNAL"), kind: processor.RetryLater, code: "PUSH_500", outcome: credential.Failure},
		"503":                    {status: 503, header: "5", body: fault("UNAVAILABLE", "UNAVAILABLE"), kind: processor.RetryLater, code: "PUSH_503", outcome: credential.Failure},
		"an answer without JSON": {status: 502, body: "<html>SECRET", kind: processor.RetryLater, code: "PUSH_502", outcome: credential.Failure},
	} {
		t.Run(name, func(t *testing.T) { tt.check(t, s, p, o, toFCM, googleToken, "access-1") })
	}
}

func TestARefusedAccessTokenIsReplacedOnce(t *testing.T) {
	now := &clock{time.Now()}
	s, google, p, o := startFCM(t, now.option)
	refused := func(times int) answerFunc {
		return func(call int, w http.ResponseWriter, _ request) {
			if call <= times {
				w.WriteHeader(http.StatusUnauthorized)
			}
		}
	}
	s.set(refused(1))
	_, err := processor.Run(t.Context(), p, job(1, toFCM))
	require.NoError(t, err)
	require.Equal(t, []string{"Bearer access-1", "Bearer access-2"}, s.authorizations())
	require.Equal(t, credential.Success, o.last(t).Kind)

	s.set(refused(100))
	_, err = processor.Run(t.Context(), p, job(1, toFCM))
	require.Equal(t, processor.RetryLater, processor.Classify(err).Kind)
	require.Equal(t, CodeCredentialRefused, processor.Classify(err).Code)
	require.Equal(t, credential.Failure, o.last(t).Kind)
	require.Equal(t, []string{"Bearer access-2"}, s.authorizations(), "the token was replaced a moment ago")

	now.at = now.at.Add(fcmTokenPause)
	s.set(refused(100))
	_, err = processor.Run(t.Context(), p, job(1, toFCM))
	require.Equal(t, CodeCredentialRefused, processor.Classify(err).Code)
	require.Equal(t, []string{"Bearer access-2", "Bearer access-3"}, s.authorizations())
	require.Len(t, google.got(), 3)
}

func TestTheAccessTokenIsReplacedBeforeItsEnd(t *testing.T) {
	now := &clock{time.Now()}
	s, _, p, _ := startFCM(t, now.option)
	for _, after := range []time.Duration{0, 58 * time.Minute, 60 * time.Minute} {
		now.at = time.Now().Add(after)
		_, err := processor.Run(t.Context(), p, job(1, toFCM))
		require.NoError(t, err)
	}
	require.Equal(t, []string{"Bearer access-1", "Bearer access-1", "Bearer access-2"}, s.authorizations())
}

func TestAnswersOfTheTokenEndpoint(t *testing.T) {
	s, google, p, o := startFCM(t)
	for name, tt := range map[string]row{
		"key refused":          {status: 400, body: `{"error":"invalid_grant"} SECRET`, kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"account deleted":      {status: 401, body: "SECRET", kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"429":                  {status: 429, header: "3", kind: processor.Throttle, code: processor.CodeThrottled, after: 3 * time.Second, outcome: credential.Throttled},
		"500":                  {status: 500, body: "SECRET", kind: processor.RetryLater, code: "PUSH_500", outcome: credential.Failure},
		"an answer, not JSON":  {status: 200, body: "SECRET", kind: processor.RetryLater, code: CodeUnreachable, outcome: credential.Failure},
		"redirects are errors": {status: 307, kind: processor.RetryLater, code: "PUSH_307", outcome: credential.Failure},
	} {
		t.Run(name, func(t *testing.T) { tt.check(t, google, p, o, toFCM, googleToken, "PRIVATE KEY") })
	}
	require.Empty(t, s.got(), "no push is sent without a token")
}

func TestAllCallersWaitForOneAccessToken(t *testing.T) {
	s, google, p, _ := startFCM(t)
	asked, release := make(chan struct{}), make(chan struct{})
	google.set(func(call int, w http.ResponseWriter, r request) {
		close(asked)
		<-release
		newToken(call, w, r)
	})
	var running sync.WaitGroup
	const jobs = 20
	errs := make([]error, jobs)
	for i := range jobs {
		running.Go(func() { _, errs[i] = processor.Run(t.Context(), p, job(int64(i), toFCM)) })
	}
	<-asked
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := account(p, FCM).(*fcmAccount).tokens.get(ctx, "")
	require.ErrorIs(t, err, context.Canceled, "the wait ends with the job")
	close(release)
	running.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Len(t, google.got(), 1)
	require.Len(t, s.got(), jobs)
}

func TestTheEndOfAJobDoesNotFailTheOthers(t *testing.T) {
	_, google, p, o := startFCM(t)
	asked, release := make(chan struct{}, 2), make(chan struct{})
	google.set(func(call int, w http.ResponseWriter, r request) {
		asked <- struct{}{}
		if call == 1 {
			<-r.Context().Done()
			return
		}
		newToken(call, w, r)
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var first, second error
	running.Go(func() { _, first = processor.Run(ctx, p, job(1, toFCM)) })
	<-asked
	running.Go(func() {
		close(release)
		_, second = processor.Run(t.Context(), p, job(2, toFCM))
	})
	<-release
	cancel()
	running.Wait()
	require.ErrorIs(t, first, context.Canceled)
	require.NoError(t, second)
	require.ElementsMatch(t, []credential.Kind{credential.Neutral, credential.Success},
		[]credential.Kind{o.all[0].Kind, o.all[1].Kind})
}

func TestNoAnswer(t *testing.T) {
	s, _, p, o := startFCM(t)
	_, err := processor.Run(t.Context(), p, job(1, toFCM)) // gets the token
	require.NoError(t, err)

	s.set(func(int, http.ResponseWriter, request) { panic(http.ErrAbortHandler) })
	_, err = processor.Run(t.Context(), p, job(1, toFCM))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, CodeUnreachable, v.Code)
	require.Equal(t, credential.Failure, o.last(t).Kind)

	p.config.Timeout = 20 * time.Millisecond
	s.set(func(_ int, _ http.ResponseWriter, r request) { <-r.Context().Done() })
	_, err = processor.Run(t.Context(), p, job(1, toFCM))
	require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code)
	require.Equal(t, credential.Failure, o.last(t).Kind)

	s.Close()
	p.config.Timeout = 30 * time.Second
	_, err = processor.Run(t.Context(), p, job(1, toFCM))
	require.Equal(t, CodeUnreachable, processor.Classify(err).Code)
	require.NotContains(t, err.Error(), googleToken)
}

func TestCertificatesOfUnknownAuthorities(t *testing.T) {
	s, google := serve(t, status(http.StatusOK, "")), serve(t, newToken)
	f := newFolder(t)
	f.fcmKey(t, "fcm.json", "shop", google.URL)
	c := config(t, f, fcmYAML(s.URL)+apnsYAML(s.URL)+webPushYAML)
	c.TLSCAFile = ""
	p := start(t, c)
	for _, payload := range []string{toFCM, toApple, toWeb(s.URL + "/secret-endpoint")} {
		_, err := processor.Run(t.Context(), p, job(1, payload))
		require.Equal(t, CodeUnreachable, processor.Classify(err).Code, "%v", err)
		for _, secret := range []string{"secret-endpoint", appleToken, googleToken} {
			require.NotContains(t, err.Error(), secret)
		}
	}
	require.Empty(t, s.got())
}
