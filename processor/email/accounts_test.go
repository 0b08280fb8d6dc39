package email_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

var (
	_ processor.Gated   = (*email.Accounts)(nil)
	_ processor.Limited = (*email.Accounts)(nil)
)

// folder is the path of a folder with an accounts file and its secrets.
type folder string

func newFolder(t *testing.T, accounts ...string) folder {
	f := folder(t.TempDir())
	f.accounts(t, accounts...)
	return f
}

func (f folder) path(name string) string { return filepath.Join(string(f), name) }

func (f folder) write(t *testing.T, name, content string) {
	require.NoError(t, os.WriteFile(f.path(name), []byte(content), 0o600))
}

// accounts writes the accounts file of a test. Each argument is one account: the text between { and
// } in YAML.
func (f folder) accounts(t *testing.T, accounts ...string) {
	f.write(t, "accounts.yaml", "accounts:\n  - {"+strings.Join(accounts, "}\n  - {")+"}\n")
}

// at returns an account at the mail server with this address.
func at(t *testing.T, id, addr, more string) string {
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	return fmt.Sprintf("id: %s, host: %s, port: %s%s", id, host, port, more)
}

// config returns a configuration with the accounts file. Its own mail server can't be reached,
// because only the servers of the accounts may be used.
func (f folder) config(t *testing.T) email.Config {
	c := config(t, "192.0.2.1:25")
	c.From, c.AccountsFile = "Base <base@example.net>", f.path("accounts.yaml")
	return c
}

func startAccounts(t *testing.T, c email.Config, options ...email.Option) *email.Accounts {
	a, err := email.NewAccounts(c, options...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

// lender is a fake source of accounts. It lends them in turn, or, if only is not "", always the one
// with this id. It records the outcomes.
type lender struct {
	mu       sync.Mutex
	only     string
	pool     string
	accounts []credential.Account
	source   credential.Source
	outcomes []credential.Outcome
}

func (l *lender) choose(pool string, accounts []credential.Account) (credential.Source, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pool, l.accounts = pool, accounts
	l.source, _ = credential.TakeTurns(pool, accounts)
	return l, nil
}

func (l *lender) Borrow(ctx context.Context) (credential.Loan, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	source := l.source
	if l.only != "" {
		source = credential.InTurn(l.only)
	}
	loan, err := source.Borrow(ctx)
	return recorded{loan, l}, err
}

type recorded struct {
	credential.Loan
	lender *lender
}

func (r recorded) Return(o credential.Outcome) {
	r.lender.mu.Lock()
	defer r.lender.mu.Unlock()
	r.lender.outcomes = append(r.lender.outcomes, o)
}

// take returns the outcomes since the last call.
func (l *lender) take() []credential.Outcome {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := l.outcomes
	l.outcomes = nil
	return taken
}

func TestMistakesOfTheFileAreReportedTogether(t *testing.T) {
	f := newFolder(t,
		"id: a, host: mail.example.com, username: u, colour: red",
		"id: a, host: mail.example.com, username: u, password: hunter2, rate: 0, port: 0",
		"id: b, host: mail.example.com, username: u, password: hunter2, password_file: ok, tls: maybe, from: nobody",
		"id: c, host: mail.example.com, username: u, password_file: open, concurrency: 0, auth: magic",
		"id: d, host: mail.example.com, username: u, password_file: gone",
		"id: e, username: u, password_file: empty, port: 70000",
		"id: f, host: mail.example.com, password: hunter2",
		"id: g, host: mail.example.com, auth: login",
		"id: h, host: mail.example.com, auth: plain, tls: none, username: u, password: hunter2",
		"host: mail.example.com",
		"id: i, host: mail.example.com, password: [hunter2]",
		"id: j, host: mail.example.com, username: u, auth: none",
	)
	f.write(t, "ok", "hunter2\n")
	f.write(t, "empty", "\n")
	f.write(t, "open", "hunter2")
	require.NoError(t, os.Chmod(f.path("open"), 0o644))
	_, err := email.NewAccounts(f.config(t))
	require.Error(t, err)
	lines := strings.Split(err.Error(), "\n")
	require.Equal(t, "read e-mail accounts in "+f.path("accounts.yaml")+":", lines[0])
	want := []string{
		"line 2: unknown field colour",
		"line 12: cannot unmarshal !!seq into string",
		"account a: password or password_file is missing",
		"account a: the id is used twice",
		`account a: rate: "0" is neither a number above 0 with a time of at most 24h, such as 80/10m, nor none`,
		"account a: port: 0 is not between 1 and 65535",
		"account b: password: set either it or password_file, not both",
		`account b: tls: "maybe" is not one of none, opportunistic, mandatory, implicit`,
		`account b: from: "nobody" is not an e-mail address in ASCII`,
		`account c: concurrency: "0" is neither a number above 0 nor unbounded`,
		"account c: password_file: " + f.path("open") + ": others may read it (mode 0644); run chmod o-r on it",
		`account c: auth: "magic" is not one of none, plain, login, cram-md5, auto`,
		"account d: password_file: open " + f.path("gone") + ": no such file or directory",
		"account e: password_file: has no password",
		"account e: host: must be a host name or an IP address",
		"account e: port: 70000 is not between 1 and 65535",
		"account f: username is missing",
		"account g: username: needed to authenticate by login",
		"account h: auth: plain would show the password to the network; set TLS, or use cram-md5",
		"account 10: id is not 1 to 128 letters, digits, dots, underscores or dashes",
	}
	require.ElementsMatch(t, want, lines[1:])
	require.NotContains(t, err.Error(), "hunter2")
}

func TestFilesThatListNoAccount(t *testing.T) {
	f := newFolder(t)
	for _, content := range []string{"", "accounts: []\n"} {
		f.write(t, "accounts.yaml", content)
		_, err := email.NewAccounts(f.config(t))
		require.ErrorContains(t, err, "the file lists no account under accounts")
	}
	require.NoError(t, os.Remove(f.path("accounts.yaml")))
	_, err := email.NewAccounts(f.config(t))
	require.ErrorIs(t, err, os.ErrNotExist)
	c := f.config(t)
	c.Timeout = 0
	_, err = email.NewAccounts(c)
	require.ErrorContains(t, err, "configure e-mail: TIMEOUT: ")
}

func TestAccountsHaveTheirOwnCredentialsAndSenders(t *testing.T) {
	var gotA, gotB captured
	sinkA := startSink(t, smtpsink.Options{OnMail: gotA.add, Username: "ann", Password: "secret-a"})
	sinkB := startSink(t, smtpsink.Options{OnMail: gotB.add, Username: "bea", Password: "secret-b"})
	f := newFolder(t,
		at(t, "a", sinkA.Addr(), ", username: ann, password: secret-a, from: Ann <ann@example.com>, rate: 5/1m, concurrency: 2"),
		at(t, "b", sinkB.Addr(), ", username: bea, password_file: b.txt, auth: cram-md5"))
	f.write(t, "b.txt", "secret-b\r\n")
	c := f.config(t)
	c.Auth, c.Username, c.Password = email.AuthPlain, "base", "wrong"
	var l lender
	a := startAccounts(t, c, email.WithChoice(l.choose))
	require.Equal(t, "smtp", l.pool)
	require.Equal(t, []credential.Account{
		{ID: "a", Rate: &credential.Rate{Permits: 5, Window: time.Minute}, Concurrency: 2}, {ID: "b"},
	}, l.accounts)
	require.Equal(t, email.Type, a.Type())
	require.Equal(t, -1, a.Availability().Free)

	for i := range int64(4) {
		result, err := processor.Run(t.Context(), a, job(i, toBob))
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("<promo.%d@example.net>", i), result.(email.Result).MessageID,
			"it does not depend on the account, so that a mail that is sent twice has one Message-ID")
	}
	success := credential.Outcome{Kind: credential.Success}
	require.Equal(t, []credential.Outcome{success, success, success, success}, l.take())
	for sink, got := range map[*smtpsink.Sink]*captured{sinkA: &gotA, sinkB: &gotB} {
		require.EqualValues(t, 2, sink.Received())
		require.EqualValues(t, 1, sink.Connections())
		envelope, header, _ := got.last(t)
		want := map[*smtpsink.Sink][2]string{
			sinkA: {"ann@example.com", `"Ann" <ann@example.com>`}, sinkB: {"base@example.net", `"Base" <base@example.net>`},
		}[sink]
		require.Equal(t, want[0], envelope.From)
		require.Equal(t, []string{want[1]}, header["From"])
	}
}

// converse plays a mail server: it sends the first reply as the greeting, and each further reply
// after it has read a command, or after a reply 354 the mail.
func converse(c *textproto.Conn, replies []string) {
	for i, reply := range replies {
		switch {
		case i == 0:
		case strings.HasPrefix(replies[i-1], "354"):
			_, _ = c.ReadDotBytes()
		default:
			_, _ = c.ReadLine()
		}
		_ = c.PrintfLine("%s", reply)
	}
}

func TestRepliesDecideAboutTheJobAndTheAccount(t *testing.T) {
	const (
		hello = "250-hello\r\n250 AUTH PLAIN"
		in    = "235 welcome"
		ok    = "250 ok"
		data  = "354 go on"
	)
	neutral, success, failure := credential.Outcome{}, credential.Outcome{Kind: credential.Success}, credential.Outcome{Kind: credential.Failure}
	throttled := credential.Outcome{Kind: credential.Throttled, After: time.Minute}
	for name, tt := range map[string]struct {
		replies []string // after 220 the server answers each command; then it closes the connection
		kind    processor.Kind
		code    string
		outcome credential.Outcome
	}{
		"accepted":          {[]string{"220 hi", hello, in, ok, ok, data, ok}, processor.Done, "", success},
		"no greeting":       {nil, processor.RetryLater, email.CodeUnreachable, failure},
		"greeting 554":      {[]string{"554 no"}, processor.RetryLater, "SMTP_554", failure},
		"greeting 421":      {[]string{"421 busy"}, processor.RetryLater, "SMTP_421", failure},
		"greeting too many": {[]string{"421 4.7.0 Too many connections"}, processor.Defer, processor.CodeResourceBusy, throttled},
		"AUTH not offered":  {[]string{"220 hi", ok}, processor.RetryLater, email.CodeUnreachable, failure},
		"AUTH 535":          {[]string{"220 hi", hello, "535 bad password"}, processor.RetryLater, "SMTP_535", failure},
		"AUTH 454":          {[]string{"220 hi", hello, "454 later"}, processor.RetryLater, "SMTP_454", failure},
		"AUTH too many":     {[]string{"220 hi", hello, "421 too many logins"}, processor.Defer, processor.CodeResourceBusy, throttled},
		"MAIL 421":          {[]string{"220 hi", hello, in, "421 bye"}, processor.RetryLater, "SMTP_421", failure},
		"MAIL too many":     {[]string{"220 hi", hello, in, "421 too many mails"}, processor.Defer, processor.CodeResourceBusy, throttled},
		"MAIL 451":          {[]string{"220 hi", hello, in, "451 later"}, processor.RetryLater, "SMTP_451", failure},
		"MAIL 550":          {[]string{"220 hi", hello, in, "550 bad sender"}, processor.RetryLater, "SMTP_550", failure},
		"MAIL 552":          {[]string{"220 hi", hello, in, "552 too large"}, processor.Fail, "SMTP_552", neutral},
		"MAIL lost":         {[]string{"220 hi", hello, in}, processor.RetryLater, email.CodeUnreachable, failure},
		"RCPT 450":          {[]string{"220 hi", hello, in, ok, "450 too many mails to you"}, processor.RetryLater, "SMTP_450", neutral},
		"RCPT 550":          {[]string{"220 hi", hello, in, ok, "550 unknown"}, processor.Fail, "SMTP_550", neutral},
		"RCPT 421":          {[]string{"220 hi", hello, in, ok, "421 bye"}, processor.RetryLater, "SMTP_421", failure},
		"RCPT too many":     {[]string{"220 hi", hello, in, ok, "421 too many recipients"}, processor.Defer, processor.CodeResourceBusy, throttled},
		"DATA 451":          {[]string{"220 hi", hello, in, ok, ok, "451 later"}, processor.RetryLater, "SMTP_451", neutral},
		"DATA 554":          {[]string{"220 hi", hello, in, ok, ok, "554 no"}, processor.Fail, "SMTP_554", neutral},
		"mail 452":          {[]string{"220 hi", hello, in, ok, ok, data, "452 full"}, processor.RetryLater, "SMTP_452", neutral},
		"mail 552":          {[]string{"220 hi", hello, in, ok, ok, data, "552 too big"}, processor.Fail, "SMTP_552", neutral},
		"mail lost":         {[]string{"220 hi", hello, in, ok, ok, data}, processor.RetryLater, email.CodeUnreachable, failure},
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, func(c *textproto.Conn, _ int) { converse(c, tt.replies) })
			f := newFolder(t, at(t, "a", addr, ", username: u, password: p4ss"))
			var l lender
			_, err := processor.Run(t.Context(), startAccounts(t, f.config(t), email.WithChoice(l.choose)), job(1, toBob))
			v := processor.Classify(err)
			require.Equal(t, tt.kind, v.Kind, "%v", err)
			require.Equal(t, tt.code, v.Code)
			require.Equal(t, []credential.Outcome{tt.outcome}, l.take())
			if v.Kind == processor.Throttle {
				require.Equal(t, time.Minute, v.After)
			}
		})
	}
}

func TestAServerThatIsAwayIsAFailureOfTheAccount(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f := newFolder(t, at(t, "a", listener.Addr().String(), ""))
	require.NoError(t, listener.Close())
	var l lender
	_, err = processor.Run(t.Context(), startAccounts(t, f.config(t), email.WithChoice(l.choose)), job(1, toBob))
	require.Equal(t, email.CodeUnreachable, processor.Classify(err).Code)
	require.Equal(t, []credential.Outcome{{Kind: credential.Failure}}, l.take())
}

func TestPayloadsThatMakeNoMailAreNotTheAccountsFault(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	f := newFolder(t, at(t, "a", sink.Addr(), ""))
	var l lender
	a := startAccounts(t, f.config(t), email.WithChoice(l.choose))
	for payload, want := range map[string][]credential.Outcome{
		`{"to":7}`:                 nil, // no account is borrowed
		`{"to":"bøb@example.org"}`: {{}},
	} {
		_, err := processor.Run(t.Context(), a, job(1, payload))
		v := processor.Classify(err)
		require.Equal(t, processor.Fail, v.Kind)
		require.Equal(t, processor.CodeInvalidPayload, v.Code)
		require.Equal(t, want, l.take())
	}
	_, err := a.Process(t.Context(), job(1, toBob))
	require.ErrorContains(t, err, "Admit was not called")
	require.Zero(t, sink.Received())
}

func TestACancelledMailSaysNothingAboutItsAccount(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	addr := serve(t, func(c *textproto.Conn, _ int) {
		cancel()
		_, _ = c.ReadLine()
	})
	f := newFolder(t, at(t, "a", addr, ""))
	var l lender
	_, err := processor.Run(ctx, startAccounts(t, f.config(t), email.WithChoice(l.choose)), job(1, toBob))
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []credential.Outcome{{}}, l.take())
}

// blockingSink starts a mail server that holds each mail until release is closed. When a mail has
// arrived, it sends to entered.
func blockingSink(t *testing.T) (sink *smtpsink.Sink, entered, release chan struct{}) {
	entered, release = make(chan struct{}, 10), make(chan struct{})
	return startSink(t, smtpsink.Options{Reply: func(string) (int, string) {
		entered <- struct{}{}
		<-release
		return 250, ""
	}}), entered, release
}

func TestAMailThatFindsNoFreeConnectionDoesNotUseItsAccount(t *testing.T) {
	sink, entered, release := blockingSink(t)
	f := newFolder(t, at(t, "a", sink.Addr(), ""))
	c := f.config(t)
	c.MaxConnections = 1
	var l lender
	a := startAccounts(t, c, email.WithChoice(l.choose))
	var running sync.WaitGroup
	running.Go(func() { _, _ = processor.Run(t.Context(), a, job(1, toBob)) })
	<-entered
	pass, err := a.Admit(t.Context(), job(2, toBob))
	require.NoError(t, err)
	ctx, cancel := context.WithDeadline(pass.Into(t.Context()), time.Now())
	defer cancel()
	_, err = a.Process(ctx, job(2, toBob))
	require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code)
	pass.Return(err)
	require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, l.take())
	close(release)
	running.Wait()
}

func TestAChangedFile(t *testing.T) {
	var got captured
	sinkA, sinkB := startSink(t, smtpsink.Options{}), startSink(t, smtpsink.Options{OnMail: got.add})
	inA := at(t, "a", sinkA.Addr(), "")
	f := newFolder(t, inA, at(t, "b", sinkB.Addr(), ", username: u, password_file: b.txt, auth: none"))
	f.write(t, "b.txt", "one")
	a := startAccounts(t, f.config(t))
	// sends sends two mails, and then checks how many connections each of the two servers has seen
	// so far.
	sends := func(connectionsA, connectionsB int64) {
		t.Helper()
		for i := range int64(2) {
			_, err := processor.Run(t.Context(), a, job(i, toBob))
			require.NoError(t, err)
		}
		require.Equal(t, []int64{connectionsA, connectionsB}, []int64{sinkA.Connections(), sinkB.Connections()})
	}
	reloads := func(want bool) {
		t.Helper()
		changed, err := a.Reload()
		require.NoError(t, err)
		require.Equal(t, want, changed)
	}
	sends(1, 1)
	reloads(false)

	f.accounts(t, inA+", rate: 5/1m", at(t, "b", sinkB.Addr(), ", username: u, password_file: b.txt, auth: none, from: new@example.com"))
	reloads(true)
	sends(1, 2)
	envelope, _, _ := got.last(t)
	require.Equal(t, "new@example.com", envelope.From)

	f.write(t, "b.txt", "two")
	reloads(true)
	sends(1, 3)

	f.write(t, "accounts.yaml", "accounts: [")
	_, err := a.Reload()
	require.Error(t, err)
	sends(1, 3)
	reloads(false) // a mistake is returned once

	f.accounts(t, inA)
	reloads(true)
	before := sinkB.Received()
	sends(1, 3)
	require.Equal(t, before, sinkB.Received())
}

func TestIdleConnectionsOfARemovedAccountAreClosed(t *testing.T) {
	lastCommand := make(chan string, 1)
	addr := serve(t, func(c *textproto.Conn, _ int) {
		greet(c)
		takeMail(c)
		lastCommand <- answer(c, "221 bye")
	})
	sink := startSink(t, smtpsink.Options{})
	f := newFolder(t, at(t, "gone", addr, ""))
	l := lender{only: "gone"}
	a := startAccounts(t, f.config(t), email.WithChoice(l.choose))
	_, err := processor.Run(t.Context(), a, job(1, toBob))
	require.NoError(t, err)
	pass, err := a.Admit(t.Context(), job(2, toBob))
	require.NoError(t, err)

	f.accounts(t, at(t, "other", sink.Addr(), ""))
	changed, err := a.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, "QUIT", <-lastCommand)

	l.take()
	_, err = a.Process(pass.Into(t.Context()), job(2, toBob))
	pass.Return(err)
	require.Equal(t, processor.Defer, processor.Classify(err).Kind, "the job was admitted before the account was removed")
	require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, l.take())
	_, err = a.Admit(t.Context(), job(3, toBob))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind, "other processes may still have the account")
	unknown := credential.Outcome{Kind: credential.Unknown}
	require.Equal(t, []credential.Outcome{unknown, unknown, unknown}, l.take())
	require.Zero(t, sink.Received())
}

func TestAConnectionInUseEndsWithItsMail(t *testing.T) {
	sink, entered, release := blockingSink(t)
	f := newFolder(t, at(t, "a", sink.Addr(), ""))
	c := f.config(t)
	c.MaxConnections = 1
	var l lender
	a := startAccounts(t, c, email.WithChoice(l.choose))
	var running sync.WaitGroup
	var errs [2]error
	send := func(i int) { _, errs[i] = processor.Run(t.Context(), a, job(int64(i), toBob)) }
	running.Go(func() { send(0) })
	<-entered
	pass, err := a.Admit(t.Context(), job(1, toBob))
	require.NoError(t, err)
	running.Go(func() { // waits for the connection, or comes too late for it
		_, errs[1] = a.Process(pass.Into(t.Context()), job(1, toBob))
		pass.Return(errs[1])
	})

	f.accounts(t, at(t, "a", sink.Addr(), ", from: new@example.com"))
	changed, err := a.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	close(release)
	running.Wait()
	require.NoError(t, errs[0])
	if errs[1] != nil { // it waited for the old connection
		require.Equal(t, processor.Defer, processor.Classify(errs[1]).Kind)
	}
	received := sink.Received()

	_, err = processor.Run(t.Context(), a, job(2, toBob))
	require.NoError(t, err)
	require.EqualValues(t, received+1, sink.Received())
	require.EqualValues(t, 2, sink.Connections(), "the old connection is not used again")
}

func TestAnAccountThatAnotherProcessLearntFirst(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	f := newFolder(t, at(t, "a", "192.0.2.1:25", ""))
	l := lender{only: "new"}
	a := startAccounts(t, f.config(t), email.WithChoice(l.choose))
	f.accounts(t, at(t, "new", sink.Addr(), ""))
	_, err := processor.Run(t.Context(), a, job(1, toBob))
	require.NoError(t, err, "the file is read again when an unknown account is lent")
	require.EqualValues(t, 1, sink.Received())
}

func TestAChoiceThatFailsKeepsTheOldAccounts(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	f := newFolder(t, at(t, "a", sink.Addr(), ""))
	var fault error
	a := startAccounts(t, f.config(t), email.WithChoice(func(pool string, accounts []credential.Account) (credential.Source, error) {
		if fault != nil {
			return nil, fault
		}
		return credential.TakeTurns(pool, accounts)
	}))
	fault = errors.New("redis is away")
	f.accounts(t, at(t, "b", "192.0.2.1:25", ""))
	_, err := a.Reload()
	require.ErrorIs(t, err, fault)
	_, err = processor.Run(t.Context(), a, job(1, toBob))
	require.NoError(t, err)
	fault = nil
	changed, err := a.Reload()
	require.NoError(t, err)
	require.True(t, changed, "it is tried again")
}

func TestNothingIsSentAfterClose(t *testing.T) {
	sink := startSink(t, smtpsink.Options{})
	f := newFolder(t, at(t, "a", sink.Addr(), ""))
	a := startAccounts(t, f.config(t))
	_, err := processor.Run(t.Context(), a, job(1, toBob))
	require.NoError(t, err)
	require.NoError(t, a.Close())
	f.accounts(t, at(t, "b", sink.Addr(), ""))
	changed, err := a.Reload()
	require.NoError(t, err)
	require.False(t, changed)
	_, err = processor.Run(t.Context(), a, job(2, toBob))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.EqualValues(t, 1, sink.Received())
}

// TestAPasswordIsInNoError: some servers repeat what they refuse. The job's error shows [password]
// in place of the password, as text and as base64.
func TestAPasswordIsInNoError(t *testing.T) {
	const password = "hunter2"
	encode := base64.StdEncoding.EncodeToString
	for name, tt := range map[string]struct{ auth, hello, reply string }{
		"plain":       {"plain", "PLAIN", "502 what is AUTH PLAIN " + encode([]byte("\x00u\x00"+password)) + "?"},
		"login":       {"login", "LOGIN", "535 not " + encode([]byte(password))},
		"clear":       {"auto", "PLAIN", "535 wrong password " + password},
		"not a reply": {"plain", "PLAIN", "wrong password " + password},
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, func(c *textproto.Conn, _ int) {
				converse(c, []string{"220 hi", "250-hello\r\n250 AUTH " + tt.hello, tt.reply})
			})
			f := newFolder(t, at(t, "a", addr, ", username: u, password: "+password+", auth: "+tt.auth))
			_, err := processor.Run(t.Context(), startAccounts(t, f.config(t)), job(1, toBob))
			require.ErrorContains(t, err, "[password]")
			require.NotContains(t, err.Error(), password)
			require.NotContains(t, err.Error(), encode([]byte(password)))
			require.NotContains(t, err.Error(), encode([]byte("\x00u\x00"+password)))
			require.Equal(t, processor.RetryLater, processor.Classify(err).Kind)
		})
	}
}
