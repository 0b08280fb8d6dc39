package push

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	appleToken = "a1b2c3d4e5f60718a1b2c3d4e5f60718"
	toApple    = `{"to":{"apns":"` + appleToken + `"},"title":"Sale","body":"All half price"}`
)

// startAPNs starts a fake of APNs, and a processor with one account at it.
func startAPNs(t testing.TB, options ...Option) (*service, *Processor, *outcomes) {
	s := serve(t, status(http.StatusOK, ""))
	o := &outcomes{}
	return s, start(t, config(t, newFolder(t), apnsYAML(s.URL)), append(options, WithChoice(o.choice))...), o
}

// providerToken checks the provider token (a JWT) of a request that the fake has got, and returns
// the time at which it was issued.
func providerToken(t testing.TB, r request) time.Time {
	text, ok := strings.CutPrefix(r.Header.Get("Authorization"), "bearer ")
	require.True(t, ok)
	token, err := jwt.Parse(text, func(token *jwt.Token) (any, error) {
		require.Equal(t, map[string]any{"alg": "ES256", "kid": "KEY1", "typ": "JWT"}, token.Header)
		return &apnsKey.PublicKey, nil
	}, jwt.WithValidMethods([]string{"ES256"}), jwt.WithTimeFunc(func() time.Time { return time.Now().Add(24 * time.Hour) }))
	require.NoError(t, err)
	claims := token.Claims.(jwt.MapClaims)
	require.Len(t, claims, 2)
	require.Equal(t, "TEAM1", claims["iss"])
	issued, err := claims.GetIssuedAt()
	require.NoError(t, err)
	return issued.Time
}

func TestRequestsToAPNs(t *testing.T) {
	s, p, _ := startAPNs(t)
	sent := time.Now()
	for name, tt := range map[string]struct {
		payload, body string
		header        map[string]string
	}{
		"alert": {toApple, `{"aps":{"alert":{"title":"Sale","body":"All half price"}}}`,
			map[string]string{"Apns-Push-Type": "alert", "Apns-Priority": "", "Apns-Expiration": "", "Apns-Collapse-Id": ""}},
		"data": {`{"to":{"apns":"` + appleToken + `"},"body":"b","data":{"order":{"id":7},"x":"y"}}`,
			`{"aps":{"alert":{"body":"b"}},"order":{"id":7},"x":"y"}`, nil},
		"silent": {`{"to":{"apns":"` + appleToken + `"},"data":{"x":"y"},"priority":"high"}`, `{"aps":{"content-available":1},"x":"y"}`,
			map[string]string{"Apns-Push-Type": "background", "Apns-Priority": "5"}},
		"high": {`{"to":{"apns":"` + appleToken + `"},"body":"b","priority":"high","ttl_seconds":0}`, `{"aps":{"alert":{"body":"b"}}}`,
			map[string]string{"Apns-Priority": "10", "Apns-Expiration": "0"}},
		"normal": {`{"to":{"apns":"` + appleToken + `"},"body":"b","priority":"normal","collapse_key":"sale"}`, `{"aps":{"alert":{"body":"b"}}}`,
			map[string]string{"Apns-Priority": "5", "Apns-Collapse-Id": "sale"}},
	} {
		t.Run(name, func(t *testing.T) {
			result, err := processor.Run(t.Context(), p, job(1, tt.payload))
			require.NoError(t, err)
			encoded, err := json.Marshal(result)
			require.NoError(t, err)
			require.JSONEq(t, `{"platform":"apns","code":200}`, string(encoded))

			r := s.last(t)
			require.Equal(t, 2, r.ProtoMajor)
			require.Equal(t, "POST /3/device/"+appleToken, r.Method+" "+r.URL.Path)
			require.WithinRange(t, providerToken(t, r), sent.Add(-time.Second), time.Now())
			require.Equal(t, "org.example.app", r.Header.Get("Apns-Topic"))
			for name, value := range tt.header {
				require.Equal(t, value, r.Header.Get(name), name)
			}
			require.JSONEq(t, tt.body, string(r.body))
		})
	}
}

func TestDeviceTokensAreEscapedInPaths(t *testing.T) {
	s := serve(t, status(http.StatusOK, ""))
	p := start(t, config(t, newFolder(t), apnsYAML(s.URL+"/apple/")))
	_, err := processor.Run(t.Context(), p, job(1, `{"to":{"apns":"../a/b?c%2F#d"}}`))
	require.NoError(t, err)
	require.Equal(t, "/apple/3/device/..%2Fa%2Fb%3Fc%252F%23d", s.last(t).RequestURI)
}

// TestATokenThatMakesAWrongPath: a wrong device token in a payload fails the job and does not count
// against the account, even if the token makes the URL's path wrong, which APNs answers with 404.
func TestATokenThatMakesAWrongPath(t *testing.T) {
	s, p, o := startAPNs(t)
	wrong := row{status: 404, body: `{"reason":"BadPath"}`, kind: processor.Fail, code: CodeInvalidArgument, mayContain: "404 BadPath"}
	wrong.check(t, s, p, o, `{"to":{"apns":"../x"},"body":"b"}`)
}

func TestExpirationOfAPNs(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	require.Equal(t, "0", expiration(0, now))
	require.Equal(t, "1000060", expiration(60, now))
}

func TestARepeatedPushHasTheSameID(t *testing.T) {
	s, p, _ := startAPNs(t)
	var ids []string
	for _, ordinal := range []int64{1, 1, 2} {
		_, err := processor.Run(t.Context(), p, job(ordinal, toApple))
		require.NoError(t, err)
		ids = append(ids, s.last(t).Header.Get("Apns-Id"))
	}
	require.Equal(t, ids[0], ids[1])
	require.NotEqual(t, ids[0], ids[2])
	id, err := uuid.Parse(ids[0])
	require.NoError(t, err)
	require.EqualValues(t, 5, id.Version())
	require.Equal(t, uuid.NewSHA1(uuid.NameSpaceURL, []byte("sale.1")), id)
}

func TestAnswersOfAPNs(t *testing.T) {
	reason := func(word string) string { return `{"reason":"` + word + `"}` }
	s, p, o := startAPNs(t)
	for name, tt := range map[string]row{
		"accepted":               {status: 200, kind: processor.Done, outcome: credential.Success},
		"410":                    {status: 410, body: reason("Unregistered"), kind: processor.Fail, code: CodeUnregistered, mayContain: "410 Unregistered"},
		"410 without a reason":   {status: 410, kind: processor.Fail, code: CodeUnregistered},
		"BadDeviceToken":         {status: 400, body: reason("BadDeviceToken"), kind: processor.Fail, code: CodeInvalidArgument, mayContain: "400 BadDeviceToken"},
		"DeviceTokenNotForTopic": {status: 400, body: reason("DeviceTokenNotForTopic"), kind: processor.Fail, code: CodeSenderMismatch},
		"PayloadTooLarge":        {status: 413, body: reason("PayloadTooLarge"), kind: processor.Fail, code: CodeTooLarge},
		"another 400":            {status: 400, body: reason("BadCollapseId"), kind: processor.Fail, code: CodeInvalidArgument, mayContain: "BadCollapseId"},
		"unknown reason":         {status: 400, body: reason("SECRET"), kind: processor.Fail, code: CodeInvalidArgument, mayContain: "400 Bad Request"},
		"TopicDisallowed":        {status: 400, body: reason("TopicDisallowed"), kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"InvalidProviderToken":   {status: 403, body: reason("InvalidProviderToken"), kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"403 without a reason":   {status: 403, body: "SECRET", kind: processor.RetryLater, code: CodeCredentialRefused, outcome: credential.Failure},
		"404":                    {status: 404, body: reason("BadPath"), kind: processor.RetryLater, code: "PUSH_404", outcome: credential.Failure},
		"429 of a device":        {status: 429, header: "7", body: reason("TooManyRequests"), kind: processor.Throttle, code: processor.CodeThrottled, after: 7 * time.Second, outcome: credential.Neutral},
		"429 of the account":     {status: 429, body: reason("TooManyProviderTokenUpdates"), kind: processor.Throttle, code: processor.CodeThrottled, after: time.Minute, outcome: credential.Throttled},
		"429 with Retry-After":   {status: 429, header: "7", kind: processor.Throttle, code: processor.CodeThrottled, after: 7 * time.Second, outcome: credential.Throttled},
		"500":                    {status: 500, body: reason("InternalServerError"), kind: processor.RetryLater, code: "PUSH_500", outcome: credential.Failure},
		"503":                    {status: 503, body: reason("Shutdown"), kind: processor.RetryLater, code: "PUSH_503", outcome: credential.Failure},
		"redirect":               {status: 307, kind: processor.RetryLater, code: "PUSH_307", outcome: credential.Failure},
	} {
		t.Run(name, func(t *testing.T) { tt.check(t, s, p, o, toApple, appleToken) })
	}
}

// authorizations returns the header Authorization of each request since the last call of set.
func (s *service) authorizations() []string {
	var all []string
	for _, r := range s.got() {
		all = append(all, r.Header.Get("Authorization"))
	}
	return all
}

func TestAnExpiredProviderTokenIsReplacedOnce(t *testing.T) {
	now := &clock{time.Now()}
	s, p, o := startAPNs(t, now.option)
	expired := func(times int) answerFunc {
		return func(call int, w http.ResponseWriter, _ request) {
			if call <= times {
				w.WriteHeader(http.StatusForbidden)
				_, _ = io.WriteString(w, `{"reason":"ExpiredProviderToken"}`)
			}
		}
	}
	s.set(expired(1))
	_, err := processor.Run(t.Context(), p, job(1, toApple))
	require.NoError(t, err)
	seen := s.authorizations()
	require.Len(t, seen, 2)
	require.NotEqual(t, seen[0], seen[1])
	require.Equal(t, credential.Success, o.last(t).Kind)

	s.set(expired(100))
	_, err = processor.Run(t.Context(), p, job(1, toApple))
	require.Equal(t, CodeCredentialRefused, processor.Classify(err).Code)
	require.Equal(t, processor.RetryLater, processor.Classify(err).Kind)
	require.Equal(t, credential.Failure, o.last(t).Kind)
	require.Equal(t, seen[1:], s.authorizations(), "APNs allows one new token in 20 minutes")

	now.at = now.at.Add(apnsTokenPause)
	s.set(expired(100))
	_, err = processor.Run(t.Context(), p, job(1, toApple))
	require.Equal(t, CodeCredentialRefused, processor.Classify(err).Code)
	seen = s.authorizations()
	require.Len(t, seen, 2)
	require.NotEqual(t, seen[0], seen[1])
}

func TestTheProviderTokenIsRenewedAfter50Minutes(t *testing.T) {
	begin := time.Now().Truncate(time.Second)
	now := &clock{}
	s, p, _ := startAPNs(t, now.option)
	for _, tt := range []struct{ at, issued time.Duration }{
		{0, 0}, {50*time.Minute - 1, 0}, {50 * time.Minute, 50 * time.Minute}, {99 * time.Minute, 50 * time.Minute},
		{100 * time.Minute, 100 * time.Minute},
	} {
		now.at = begin.Add(tt.at)
		_, err := processor.Run(t.Context(), p, job(1, toApple))
		require.NoError(t, err)
		require.Equal(t, begin.Add(tt.issued).UTC(), providerToken(t, s.last(t)).UTC(), tt.at)
	}
}

// serviceVariable is the environment variable that makes the test binary run as a push service for
// a benchmark (see runService).
const serviceVariable = "PUSH_BENCHMARK_SERVICE"

// runService is a push service for benchmarks: it prints its URL, and accepts all pushes until its
// standard input ends.
func runService() {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasPrefix(r.URL.Path, "/v1/") {
			_, _ = io.WriteString(w, `{"name":"projects/shop/messages/1"}`)
		}
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	fmt.Println(s.URL)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startService runs runService in a process of its own, so that its CPU time is not counted as that
// of the benchmark. stop ends the process and returns its CPU time.
func startService(b *testing.B) (url string, stop func() time.Duration) {
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), serviceVariable+"=1")
	input, err := command.StdinPipe()
	require.NoError(b, err)
	output, err := command.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, command.Start())
	url, err = bufio.NewReader(output).ReadString('\n')
	require.NoError(b, err)
	return strings.TrimSpace(url), func() time.Duration {
		require.NoError(b, input.Close())
		require.NoError(b, command.Wait())
		return command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	}
}

func usedCPU(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkProcess sends pushes to a service in another process, from 100 times GOMAXPROCS
// goroutines. Besides their rate it shows the CPU time of a push in the process that sends it and
// in the service.
func BenchmarkProcess(b *testing.B) {
	for _, platform := range []string{FCM, APNs, WebPush} {
		b.Run("platform="+platform, func(b *testing.B) {
			url, stop := startService(b)
			google := serve(b, newToken)
			f := newFolder(b)
			f.fcmKey(b, "fcm.json", "shop", google.URL)
			p := start(b, config(b, f, fcmYAML(url)+apnsYAML(url)+webPushYAML))
			payload := map[string]string{FCM: toFCM, APNs: toApple, WebPush: toWeb(url)}[platform]
			_, err := processor.Run(b.Context(), p, job(0, payload)) // connects
			require.NoError(b, err)

			var ordinal atomic.Int64
			before := usedCPU(b)
			b.ReportAllocs()
			b.SetParallelism(100)
			b.ResetTimer()
			b.RunParallel(func(all *testing.PB) {
				for all.Next() {
					if _, err := processor.Run(b.Context(), p, job(ordinal.Add(1), payload)); err != nil {
						b.Error(err)
					}
				}
			})
			b.StopTimer()
			perPush := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 / float64(b.N) }
			b.ReportMetric(perPush(usedCPU(b)-before), "client-µs/push")
			b.ReportMetric(perPush(stop()), "service-µs/push")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pushes/s")
		})
	}
}

func BenchmarkParsePayload(b *testing.B) {
	for platform, payload := range map[string]string{FCM: toFCM, APNs: toApple, WebPush: toWeb("https://push.example.org/x")} {
		b.Run("platform="+platform, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := parsePayload([]byte(payload)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
