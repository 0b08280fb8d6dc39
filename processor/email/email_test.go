package email_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caarlos0/env/v10"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// config returns a valid configuration for the mail server at addr.
func config(t testing.TB, addr string) email.Config {
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	number, err := strconv.Atoi(port)
	require.NoError(t, err)
	return email.Config{
		Host: host, Port: number, From: "Shop <shop@example.com>", TLS: email.TLSNone, Auth: email.AuthAuto,
		Timeout: time.Minute, MaxConnections: 4, MaxMessagesPerConnection: 1000, IdleTimeout: time.Minute,
	}
}

func startSink(t testing.TB, opts smtpsink.Options) *smtpsink.Sink {
	sink, err := smtpsink.Start("127.0.0.1:0", opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sink.Close()) })
	return sink
}

func start(t testing.TB, c email.Config) *email.Processor {
	p, err := email.New(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func job(ordinal int64, payload string) processor.Job {
	return processor.Job{Tenant: "acme", Group: "promo", Ordinal: ordinal, Type: email.Type, Attempt: 1, Payload: json.RawMessage(payload)}
}

const toBob = `{"to":"bob@example.org"}`

// captured stores the mails that the sink received.
type captured struct {
	mu    sync.Mutex
	mails []smtpsink.Mail
}

func (c *captured) add(m smtpsink.Mail) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Data = bytes.Clone(m.Data)
	c.mails = append(c.mails, m)
}

// last returns the newest mail that the test server has got: its envelope, its header with the
// subject decoded, and its body decoded, without the last line break.
func (c *captured) last(t *testing.T) (smtpsink.Mail, map[string][]string, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	require.NotEmpty(t, c.mails)
	m := c.mails[len(c.mails)-1]
	msg, err := mail.ReadMessage(bytes.NewReader(m.Data))
	require.NoError(t, err)
	body, err := io.ReadAll(quotedprintable.NewReader(msg.Body))
	require.NoError(t, err)
	subject, err := new(mime.WordDecoder).DecodeHeader(msg.Header.Get("Subject"))
	require.NoError(t, err)
	msg.Header["Subject"] = []string{subject}
	return m, msg.Header, strings.TrimSuffix(string(body), "\r\n") // SMTP adds a line break at the end of every mail
}

func TestSendsAMail(t *testing.T) {
	var got captured
	sink := startSink(t, smtpsink.Options{OnMail: got.add})
	p := start(t, config(t, sink.Addr()))

	longSubject := strings.TrimSpace(strings.Repeat("long ", 170))
	tests := map[string]struct{ payload, to, subject, body string }{
		"whole":          {`{"to":"bob@example.org","subject":"Hi","body":"Text\n"}`, "bob@example.org", "Hi", "Text"},
		"to alone":       {toBob, "bob@example.org", "Message from Shop", "This message has no text."},
		"more fields":    {`{"to":"bob@example.org","subject":"Hi","body":"x","coupon":7}`, "bob@example.org", "Hi", "x"},
		"not ASCII":      {`{"to":"bob@example.org","subject":"Grüße 世界","body":"Ünï\n"}`, "bob@example.org", "Grüße 世界", "Ünï"},
		"dots":           {`{"to":"bob@example.org","subject":"Hi","body":".\n..\n.\r\nQUIT\r\n"}`, "bob@example.org", "Hi", ".\r\n..\r\n.\r\nQUIT"},
		"name":           {`{"to":"Bob Ö <bob@example.org>","subject":"Hi","body":"x"}`, "bob@example.org", "Hi", "x"},
		"quoted address": {`{"to":"\"b b\"@example.org","subject":"Hi","body":"x"}`, "b b@example.org", "Hi", "x"},
		"long subject":   {`{"to":"bob@example.org","subject":"` + longSubject + `","body":"x"}`, "bob@example.org", longSubject, "x"},
		"long word":      {`{"to":"bob@example.org","subject":"` + strings.Repeat("x", 900) + `","body":"x"}`, "bob@example.org", strings.Repeat("x", 900), "x"},
	}
	var ordinal int64
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			ordinal++
			result, err := p.Process(t.Context(), job(ordinal, tt.payload))
			require.NoError(t, err)
			id := fmt.Sprintf("<promo.%d@example.com>", ordinal)
			require.Equal(t, email.Result{MessageID: id, To: tt.to, Subject: tt.subject}, result)

			envelope, header, body := got.last(t)
			require.Equal(t, "shop@example.com", envelope.From)
			require.Equal(t, tt.to, envelope.To)
			require.Equal(t, []string{tt.subject}, header["Subject"])
			require.Equal(t, []string{`"Shop" <shop@example.com>`}, header["From"])
			require.Equal(t, []string{id}, header["Message-Id"])
			require.Equal(t, tt.body, body)
			for line := range strings.SplitSeq(string(envelope.Data), "\r\n") {
				require.LessOrEqual(t, len(line), 998)
			}
			_, err = mail.ParseDate(header["Date"][0])
			require.NoError(t, err)
			require.Equal(t, 1, sink.ReceivedByMessageID(id))
		})
	}
	require.EqualValues(t, len(tests), sink.Received())
	require.EqualValues(t, 1, sink.Connections())
	require.Zero(t, sink.Duplicates())
}

func TestRefusesPayloadsThatMakeNoMail(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	p := start(t, config(t, sink.Addr()))
	for name, payload := range map[string]string{
		"nothing":            ``,
		"not JSON":           `{"to":`,
		"not an object":      `["bob@example.org"]`,
		"no to":              `{"subject":"Hi"}`,
		"to is a number":     `{"to":7}`,
		"no domain":          `{"to":"bob"}`,
		"two addresses":      `{"to":"bob@example.org, eve@example.org"}`,
		"line break in to":   `{"to":"bob@example.org\r\nBcc: eve@example.org"}`,
		"break in quoted to": `{"to":"\"b\r\nRCPT TO:<eve@example.org>\"@example.org"}`,
		"space in domain":    `{"to":"bob@example.org NOTIFY=NEVER"}`,
		"long to":            `{"to":"` + strings.Repeat("b", 250) + `@example.org"}`,
		"long name":          `{"to":"` + strings.Repeat("b", 300) + ` <b@example.org>"}`,
		"break in subject":   `{"to":"bob@example.org","subject":"Hi\r\nBcc: eve@example.org"}`,
		"bare CR in subject": `{"to":"bob@example.org","subject":"Hi\rBcc: eve@example.org"}`,
		"NUL in subject":     `{"to":"bob@example.org","subject":"Hi\u0000"}`,
		"endless subject":    `{"to":"bob@example.org","subject":"` + strings.Repeat("x", 901) + `"}`,
		"needs SMTPUTF8":     `{"to":"bøb@example.org"}`,
		"no domain in xn--":  `{"to":"bob@a\u00adb..ö.example.org"}`,
		"long in xn--":       `{"to":"bob@` + strings.Repeat("ö.", 60) + `example.org"}`,
		"reply_to":           `{"to":"bob@example.org","reply_to":"eve@example.org, mallory@example.org"}`,
		"break in reply_to":  `{"to":"bob@example.org","reply_to":"eve@example.org\r\nBcc: x@example.org"}`,
		"needs SMTPUTF8 too": `{"to":"bob@example.org","reply_to":"bøb@example.org"}`,
		"http":               `{"to":"bob@example.org","list_unsubscribe":"http://example.org/u"}`,
		"relative":           `{"to":"bob@example.org","list_unsubscribe":"/u/example.org"}`,
		"no host":            `{"to":"bob@example.org","list_unsubscribe":"https:///example.org"}`,
		"no mailbox":         `{"to":"bob@example.org","list_unsubscribe":"mailto:example.org"}`,
		"two pages":          `{"to":"bob@example.org","list_unsubscribe":"https://example.org/1 https://example.org/2"}`,
		"break in URL":       `{"to":"bob@example.org","list_unsubscribe":"https://example.org/\r\nBcc: x@example.org"}`,
		"URL in brackets":    `{"to":"bob@example.org","list_unsubscribe":"https://example.org/>,<http://x"}`,
		"URL not ASCII":      `{"to":"bob@example.org","list_unsubscribe":"https://example.org/ü"}`,
		"endless URL":        `{"to":"bob@example.org","list_unsubscribe":"https://example.org/` + strings.Repeat("u", 900) + `"}`,
		"URLs in a list":     `{"to":"bob@example.org","list_unsubscribe":["https://example.org/u"]}`,
		"html is a number":   `{"to":"bob@example.org","html":7}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := p.Process(t.Context(), job(1, payload))
			v := processor.Classify(err)
			require.Equal(t, processor.Fail, v.Kind)
			require.Equal(t, processor.CodeInvalidPayload, v.Code)
			require.NotContains(t, v.Message, "example.org", "a payload does not go into errors")
		})
	}
	require.Zero(t, sink.Received())
}

func TestNothingCanAddAHeader(t *testing.T) {
	var got captured
	sink := startSink(t, smtpsink.Options{OnMail: got.add})
	p := start(t, config(t, sink.Addr()))
	want := []string{"Content-Transfer-Encoding", "Content-Type", "Date", "From", "Message-Id", "Mime-Version", "Subject", "To"}
	replies := `"reply_to":"=?utf-8?q?Eve=0D=0ABcc=3A_eve=40example.org?= <eve@example.org>"`
	for name, j := range map[string]processor.Job{
		"encoded word in reply_to": job(5, `{"to":"bob@example.org",`+replies+`,"list_unsubscribe":"https://example.org/%0d%0aBcc:eve@example.org"}`),
		"encoded word in name":     job(1, `{"to":"=?utf-8?q?Bob=0D=0ABcc=3A_eve=40example.org?= <bob@example.org>"}`),
		"encoded word in subject":  job(2, `{"to":"bob@example.org","subject":"=?utf-8?q?Hi=0D=0ABcc:_eve@example.org?="}`),
		"unicode line breaks":      job(3, `{"to":"bob@example.org","subject":"Hi\u2028Bcc: eve@example.org\u0085X-A: b"}`),
		"body that looks like it":  job(4, `{"to":"bob@example.org","body":"Bcc: eve@example.org\r\n\r\nHi"}`),
		"group of a forged job":    {Group: "x>\r\nBcc: eve@example.org\r\nX: <", Payload: json.RawMessage(toBob)},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := p.Process(t.Context(), j)
			require.NoError(t, err)
			envelope, header, _ := got.last(t)
			var names []string
			for name := range header {
				names = append(names, name)
			}
			if j.Ordinal == 5 {
				want := append([]string{"Reply-To", "List-Unsubscribe", "List-Unsubscribe-Post"}, want...)
				require.ElementsMatch(t, want, names)
			} else {
				require.ElementsMatch(t, want, names)
			}
			require.Equal(t, "bob@example.org", envelope.To)
		})
	}
	require.Zero(t, sink.ReceivedByRecipient("eve@example.org"))
}

func TestMessageIDsAreValidAndDistinct(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	p := start(t, config(t, sink.Addr()))
	for group, want := range map[string]string{
		"promo":  "<promo.0@example.com>",
		"a.b-c":  "<a.b-c.0@example.com>",
		"a..b":   "<a.~2eb.0@example.com>",
		".a":     "<~2ea.0@example.com>",
		"a.":     "<a.~2e0@example.com>",
		"a~2eb":  "<a~7e2eb.0@example.com>",
		"a>\r\n": "<a~3e~0d~0a.0@example.com>",
	} {
		for range 2 {
			result, err := p.Process(t.Context(), processor.Job{Group: group, Payload: json.RawMessage(toBob)})
			require.NoError(t, err)
			require.Equal(t, email.Result{MessageID: want, To: "bob@example.org", Subject: "Message from Shop"}, result)
		}
		require.Equal(t, 2, sink.ReceivedByMessageID(want))
	}
	require.EqualValues(t, 7, sink.Duplicates())
}

func TestAddressesThatAreNotASCII(t *testing.T) {
	var got captured
	sink := startSink(t, smtpsink.Options{OnMail: got.add, SMTPUTF8: true})
	p := start(t, config(t, sink.Addr()))
	_, err := p.Process(t.Context(), job(1, `{"to":"bøb@exämple.org"}`))
	require.NoError(t, err)
	require.Equal(t, 1, sink.ReceivedByRecipient("bøb@xn--exmple-cua.org"))
}

// TestDomainsWithUmlauts: a domain that is not ASCII becomes xn--, which a server without SMTPUTF8
// takes; in the envelope, the headers, the result and the Message-ID.
func TestDomainsWithUmlauts(t *testing.T) {
	var got captured
	sink := startSink(t, smtpsink.Options{OnMail: got.add})
	c := config(t, sink.Addr())
	c.From = "Büro <office@Büro.example>"
	result, err := start(t, c).Process(t.Context(), job(1, `{"to":"Bob <bob@BÜCHER.example>","reply_to":"Eve <eve@straße.example>"}`))
	require.NoError(t, err)
	require.Equal(t, email.Result{MessageID: "<promo.1@xn--bro-hoa.example>", To: "bob@xn--bcher-kva.example", Subject: "Message from Büro"}, result)
	envelope, header, _ := got.last(t)
	require.Equal(t, []string{"office@xn--bro-hoa.example", "bob@xn--bcher-kva.example"}, []string{envelope.From, envelope.To})
	require.Equal(t, []string{`"Bob" <bob@xn--bcher-kva.example>`}, header["To"])
	require.Equal(t, []string{`"Eve" <eve@xn--strae-oqa.example>`}, header["Reply-To"])
}

// TestCampaignMails: text and HTML, an address for replies, and how to unsubscribe.
func TestCampaignMails(t *testing.T) {
	var got captured
	sink := startSink(t, smtpsink.Options{OnMail: got.add})
	p := start(t, config(t, sink.Addr()))
	send := func(fields string) (map[string][]string, string) {
		t.Helper()
		_, err := p.Process(t.Context(), job(1, `{"to":"bob@example.org",`+fields+`}`))
		require.NoError(t, err)
		_, header, body := got.last(t)
		return header, body
	}
	const html = `<p>Half <b>price</b>: ünï &amp; more</p>`
	header, _ := send(`"body":"Half price","html":"` + html + `"`)
	media, params, err := mime.ParseMediaType(header["Content-Type"][0])
	require.NoError(t, err)
	require.Equal(t, "multipart/alternative", media)
	mails, err := mail.ReadMessage(bytes.NewReader(got.mails[len(got.mails)-1].Data))
	require.NoError(t, err)
	parts := multipart.NewReader(mails.Body, params["boundary"])
	for _, want := range [][]string{{"text/plain", "Half price"}, {"text/html", html}} {
		part, err := parts.NextPart() // decodes quoted-printable
		require.NoError(t, err)
		content, err := io.ReadAll(part)
		require.NoError(t, err)
		media, _, err := mime.ParseMediaType(part.Header.Get("Content-Type"))
		require.NoError(t, err)
		require.Equal(t, want, []string{media, string(content)})
	}
	_, err = parts.NextPart()
	require.ErrorIs(t, err, io.EOF)

	header, body := send(`"html":"` + html + `"`)
	require.Equal(t, []string{"text/html; charset=UTF-8"}, header["Content-Type"])
	require.Equal(t, html, body)

	for text, want := range map[string][2]string{
		"https://example.com/u?id=7,8":                    {"<https://example.com/u?id=7,8>", "List-Unsubscribe=One-Click"},
		"mailto:u@example.com?subject=stop":               {"<mailto:u@example.com?subject=stop>", ""},
		"mailto:u@example.com HTTPS://example.com/u":      {"<https://example.com/u>, <mailto:u@example.com>", "List-Unsubscribe=One-Click"},
		"<https://example.com/u>, <mailto:u@example.com>": {"<https://example.com/u>, <mailto:u@example.com>", "List-Unsubscribe=One-Click"},
		"https://example.com/" + strings.Repeat("u", 880): {"<https://example.com/" + strings.Repeat("u", 880) + ">", "List-Unsubscribe=One-Click"},
		"": {"", ""},
	} {
		header, _ := send(`"reply_to":"Shop <help@example.com>","list_unsubscribe":"` + text + `"`)
		require.Equal(t, []string{`"Shop" <help@example.com>`}, header["Reply-To"])
		require.Equal(t, want, [2]string{strings.Join(header["List-Unsubscribe"], ""), strings.Join(header["List-Unsubscribe-Post"], "")}, text)
	}
}

func TestRepliesBecomeVerdicts(t *testing.T) {
	replies := map[string]string{
		"full@example.org": "452 4.2.2 mailbox <full@example.org> is full",
		"gone@example.org": "550 5.1.1 no such user\ngone@example.org",
		"busy@example.org": "450 4.7.1 slow down",
	}
	sink := startSink(t, smtpsink.Options{Reply: func(to string) (int, string) {
		code, text, _ := strings.Cut(replies[to], " ")
		number, _ := strconv.Atoi(code)
		return number, text
	}})
	p := start(t, config(t, sink.Addr()))
	for to, want := range map[string]processor.Verdict{
		"full@example.org": {Kind: processor.RetryLater, Code: "SMTP_452", Message: "mailbox <[address]> is full"},
		"gone@example.org": {Kind: processor.Fail, Code: "SMTP_550", Message: "no such user"},
		"busy@example.org": {Kind: processor.RetryLater, Code: "SMTP_450", Message: "slow down"},
	} {
		_, err := p.Process(t.Context(), job(1, `{"to":"`+to+`"}`))
		got := processor.Classify(err)
		require.Equal(t, want.Kind, got.Kind, "%v", err)
		require.Equal(t, want.Code, got.Code)
		require.Contains(t, got.Message, want.Message)
		require.NotContains(t, got.Message, to)

		_, err = p.Process(t.Context(), job(2, toBob))
		require.NoError(t, err, "a refusal leaves the connection fit")
	}
	require.EqualValues(t, 1, sink.Connections())
	require.EqualValues(t, 3, sink.Received())
}

func TestConnectionsAreReusedAndBounded(t *testing.T) {
	const most, jobs = 3, 60
	entered, release := make(chan struct{}, jobs), make(chan struct{})
	sink := startSink(t, smtpsink.Options{Reply: func(string) (int, string) {
		entered <- struct{}{}
		<-release
		return 250, ""
	}})
	c := config(t, sink.Addr())
	c.MaxConnections = most
	p := start(t, c)

	var running sync.WaitGroup
	errs := make([]error, jobs)
	for i := range jobs {
		running.Go(func() { _, errs[i] = p.Process(t.Context(), job(int64(i), toBob)) })
	}
	for range most {
		<-entered // MaxConnections mails are being sent now
	}
	close(release)
	running.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.EqualValues(t, jobs, sink.Received())
	require.EqualValues(t, most, sink.Connections())
}

func TestConnectionIsReplacedAfterItsShareOfMails(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	c := config(t, sink.Addr())
	c.MaxMessagesPerConnection = 2
	p := start(t, c)
	for i := range int64(5) {
		_, err := p.Process(t.Context(), job(i, toBob))
		require.NoError(t, err)
	}
	require.EqualValues(t, 3, sink.Connections())
}

func TestWaitingForAConnectionEndsWithTheContext(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	sink := startSink(t, smtpsink.Options{Reply: func(string) (int, string) {
		close(entered)
		<-release
		return 250, ""
	}})
	c := config(t, sink.Addr())
	c.MaxConnections = 1
	p := start(t, c)

	var running sync.WaitGroup
	running.Go(func() { _, _ = p.Process(t.Context(), job(1, toBob)) })
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := p.Process(ctx, job(2, toBob))
	require.ErrorIs(t, err, context.Canceled)
	close(release)
	running.Wait()
}

func TestCloseEndsTheConnections(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	p, err := email.New(config(t, sink.Addr()))
	require.NoError(t, err)
	_, err = p.Process(t.Context(), job(1, toBob))
	require.NoError(t, err)

	require.NoError(t, p.Close())
	_, err = p.Process(t.Context(), job(2, toBob))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, email.CodeUnreachable, v.Code)
	require.NoError(t, p.Close(), "closing twice does no harm")
}

func BenchmarkProcess(b *testing.B) {
	for _, connections := range []int{1, 10} {
		b.Run(fmt.Sprintf("connections=%d", connections), func(b *testing.B) {
			sink := startSink(b, smtpsink.Options{})
			c := config(b, sink.Addr())
			c.MaxConnections = connections
			p := start(b, c)
			payload := `{"to":"bob@example.org","subject":"Our offer","body":"Dear Bob,\n\nall is half price.\n"}`
			work := make(chan int64)
			var workers sync.WaitGroup
			for range connections {
				workers.Go(func() {
					for i := range work {
						if _, err := p.Process(b.Context(), job(i, payload)); err != nil {
							b.Error(err)
						}
					}
				})
			}
			b.ReportAllocs()
			var n int64
			for b.Loop() {
				work <- n
				n++
			}
			close(work)
			workers.Wait()
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "mails/s")
			require.Equal(b, n, sink.Received())
		})
	}
}

// limits are the limits of an account if no variable sets them.
var limits = credential.Limits{
	Rate: credential.Rate{Permits: 80, Window: 10 * time.Minute}, Limiter: credential.Sliding,
	Breaker: credential.Breaker{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}, Concurrency: 1,
}

func parse(t *testing.T, vars map[string]string) email.Config {
	var c email.Config
	require.NoError(t, env.ParseWithOptions(&c, env.Options{Prefix: "SMTP_", Environment: vars}))
	return c
}

func TestConfigDefaults(t *testing.T) {
	c := parse(t, map[string]string{})
	require.NoError(t, c.Validate())
	require.Equal(t, email.Config{
		Host: "127.0.0.1", Port: 25, From: "bulkaction@localhost", TLS: email.TLSOpportunistic, Auth: email.AuthAuto,
		Timeout: 30 * time.Second, MaxConnections: 10, MaxMessagesPerConnection: 100, IdleTimeout: 30 * time.Second,
		Limits: limits,
	}, c)
}

func TestConfigFromTheEnvironment(t *testing.T) {
	c := parse(t, map[string]string{
		"SMTP_HOST": "mail.example.com", "SMTP_PORT": "465", "SMTP_USERNAME": "u", "SMTP_PASSWORD": "p",
		"SMTP_FROM": "Shop <shop@example.com>", "SMTP_TLS": "implicit", "SMTP_AUTH": "plain", "SMTP_TIMEOUT": "5s",
		"SMTP_MAX_CONNECTIONS": "3", "SMTP_MAX_MESSAGES_PER_CONNECTION": "0", "SMTP_IDLE_TIMEOUT": "1m", "SMTP_HELO": "here",
		"SMTP_ACCOUNTS_FILE": "accounts.yaml", "SMTP_ACCOUNT_CONCURRENCY": "3",
	})
	own := limits
	own.Concurrency = 3
	require.NoError(t, c.Validate())
	require.Equal(t, email.Config{
		Host: "mail.example.com", Port: 465, Username: "u", Password: "p", From: "Shop <shop@example.com>",
		TLS: email.TLSImplicit, Auth: email.AuthPlain, Timeout: 5 * time.Second,
		MaxConnections: 3, IdleTimeout: time.Minute, HELO: "here",
		AccountsFile: "accounts.yaml", Limits: own,
	}, c)
}

func TestValidateNamesEveryBadField(t *testing.T) {
	notPEM := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(notPEM, []byte("hello"), 0o600))
	bad := email.Config{
		Host: "a b", Port: 70000, Password: "hunter2", From: "nobody", TLS: "maybe",
		TLSCAFile: notPEM, Auth: "magic", Timeout: -1, MaxConnections: 0, MaxMessagesPerConnection: -1, HELO: "a\nb",
	}
	err := bad.Validate()
	for _, field := range []string{
		"HOST", "PORT", "USERNAME", "FROM", "TLS", "TLS_CA_FILE", "AUTH", "TIMEOUT",
		"IDLE_TIMEOUT", "MAX_CONNECTIONS", "MAX_MESSAGES_PER_CONNECTION", "HELO",
	} {
		require.ErrorContains(t, err, field+": ")
	}
	require.NotContains(t, err.Error(), "hunter2")
	_, err = email.New(bad)
	require.ErrorContains(t, err, "configure e-mail: ")
}

func TestValidateRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		vars map[string]string
		want string
	}{
		"no host":              {map[string]string{"SMTP_HOST": "unix:///run/smtp"}, "HOST"},
		"password in clear":    {map[string]string{"SMTP_HOST": "mail.example.com", "SMTP_TLS": "none", "SMTP_AUTH": "plain", "SMTP_USERNAME": "u"}, "AUTH"},
		"login without a name": {map[string]string{"SMTP_AUTH": "login"}, "USERNAME"},
		"sender not ASCII":     {map[string]string{"SMTP_FROM": "ö@example.com"}, "FROM"},
		"missing authorities":  {map[string]string{"SMTP_TLS_CA_FILE": "/nowhere/ca.pem"}, "TLS_CA_FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, parse(t, tt.vars).Validate(), tt.want+": ")
		})
	}
}
