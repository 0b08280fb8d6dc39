package cli

import (
	"context"
	"encoding/base64"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// callbackExec returns a function that runs `bulkaction callback` with the API of a backend.
func callbackExec(t *testing.T, b httpapi.Backend) func(args ...string) run {
	t.Helper()
	s := httptest.NewServer(httpapi.New(httpapi.Options{Backend: b}))
	t.Cleanup(s.Close)
	return func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"--api", s.URL, "callback"}, args...)...)
	}
}

func TestCallbackEndpoint(t *testing.T) {
	b := apitest.NewBackend()
	exec := callbackExec(t, b)
	got := exec("set", "acme", "--url", "https://example.com/h", "--events", "group.failed, group.cancelled")
	require.Equal(t, exitOK, got.code, got)
	require.Contains(t, got.out, "group.failed, group.cancelled")
	got = exec("show", "acme")
	require.Contains(t, got.out, "Pending          7\n")
	require.NotContains(t, got.out, "Disabled")
	require.Contains(t, exec("show", "acme", "--json").out, `"secret_version":2`)
	require.Contains(t, exec("delete", "acme").out, "the callback endpoint of acme")
	exec("show", "globex").ends(t, exitError, "callback of tenant globex", "`bulkaction callback set TENANT --url URL`")
	got = exec("secret", "acme")
	require.Equal(t, run{exitOK, "whsec_c2Vjb25k\n", ""}, got)
	got = exec("secret", "acme", "--rotate")
	require.Equal(t, "whsec_dGhpcmQ=\n", got.out)
	require.Equal(t, "This is version 3. Until 2026-01-03 03:04:05Z callbacks are also signed with the previous secret.\n", got.err)
	require.Contains(t, exec("secret", "acme", "--json").out, `"secret":"whsec_c2Vjb25k"`)
	require.Equal(t, []string{
		"set callback acme https://example.com/h [group.failed group.cancelled]", "delete callback acme", "rotate acme",
	}, b.Calls)
	for _, bad := range [][]string{{"set", "acme"}, {"set", "--url", "u"}, {"show"}, {"show", "a/b"}, {"secret"}, {"set", "acme", "--url", ""}} {
		require.Equal(t, exitUsage, exec(bad...).code, bad)
	}
}

func TestDisabledCallbackEndpoint(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	table := newTable(&text)
	endpointRows(table, api.TenantCallback{FailingSince: &epoch, DisabledAt: &epoch, DisabledBecause: "it answered 410"})
	require.NoError(t, table.flush())
	require.Contains(t, text.String(), "Disabled         2030-01-02 03:04:05Z: it answered 410\n")
}

type refusingCallbacks struct{ *apitest.Backend }

func (refusingCallbacks) SetCallback(context.Context, string, api.CallbackSettings) (api.TenantCallback, error) {
	return api.TenantCallback{}, &messages.ValidationError{Fields: []messages.FieldError{
		{Field: "url", Problem: "must begin with https://"}, {Field: "events", Problem: "no"},
	}}
}

// TestRefusedCallbackEndpoint: what the API refuses is named by flags.
func TestRefusedCallbackEndpoint(t *testing.T) {
	exec := callbackExec(t, refusingCallbacks{apitest.NewBackend()})
	exec("set", "acme", "--url", "http://x", "--events", "y").ends(t, exitUsage, "--url http://x: must begin with https://; --events [y]: no")
}

func TestNewMasterKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "master")
	got := console{}.exec(t.Context(), "callback", "new-key", path)
	require.Equal(t, exitOK, got.code, got)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.Len(t, key, 32)
	require.NotContains(t, got.out+got.err, strings.TrimSpace(string(text)))
	_, err = webhook.ReadKeys(path)
	require.NoError(t, err)

	got = console{}.exec(t.Context(), "callback", "new-key", path)
	got.ends(t, exitError, path+" exists, and stays as it is")
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, text, after)
	got = console{}.exec(t.Context(), "callback", "new-key", "--json", path+"2")
	require.JSONEq(t, `{"file":"`+path+`2","created":true}`, got.out)
	console{}.exec(t.Context(), "callback", "new-key", filepath.Join(path, "x")).ends(t, exitError, "not a directory")
	console{}.exec(t.Context(), "callback", "new-key").ends(t, exitUsage, "one file")
}

func TestCallbackList(t *testing.T) {
	b := apitest.NewBackend()
	exec := callbackExec(t, b)
	got := exec("ls", "--tenant", "acme")
	require.Equal(t, exitOK, got.code, got)
	for _, want := range []string{"g.1.completed", "dead", "500 Internal Server Error", "2026-01-02 03:04:05Z", "https://example.com/hook"} {
		require.Contains(t, got.out, want)
	}
	require.Contains(t, exec("list", "--state", "pending", "--json").out, `"next_at":"2026-01-02T03:04:05Z"`)
	require.Contains(t, exec("ls", "--state", "pending", "--limit", "1").err, "Only the first 1 are printed")
	exec("ls", "--state", "delivered").ends(t, exitUsage, "--state delivered: must be one of pending, dead")
}

func TestRedeliver(t *testing.T) {
	b := apitest.NewBackend()
	exec := callbackExec(t, b)
	got := exec("redeliver", "g.1.completed", "g.1.completed")
	require.Equal(t, exitOK, got.code, got)
	require.Equal(t, 2, strings.Count(got.out, "pending"))
	require.Equal(t, []string{"redeliver g.1.completed", "redeliver g.1.completed"}, b.Calls)
	b.Calls = nil
	got = exec("redeliver", "g.2.completed", "g.1.completed", "g.3.completed", "h", "g.1.completed", "--json")
	got.ends(t, exitError, "redeliver callback g.2.completed: 404", "redeliver callback g.3.completed: 404", `"h": must be that of an event`,
		"One that was delivered is forgotten", "`bulkaction callback ls`")
	require.NotContains(t, got.err, "callback set")
	require.Equal(t, 2, strings.Count(got.out, `"id":"g.1.completed"`))
	require.Len(t, b.Calls, 2)
	exec("redeliver", "g").ends(t, exitError, "must be that of an event")
	for _, bad := range [][]string{{}, {"--all", "g.1.failed"}, {"--tenant", "acme"}, {"--tenant", "acme", "g.1.failed"}} {
		require.Equal(t, exitUsage, exec(append([]string{"redeliver"}, bad...)...).code, bad)
	}
}

// manyDead has three dead callbacks.
type manyDead struct{ *apitest.Backend }

func (manyDead) Callbacks(context.Context, api.CallbackQuery) (api.CallbackList, error) {
	c := apitest.CallbackView(api.CallbackDead)
	return api.CallbackList{Callbacks: []api.Callback{c, c, c}}, nil
}

// TestRedeliverAll: it goes on while there is more, waits for a full endpoint, and ends when as many
// are sent as were dead.
func TestRedeliverAll(t *testing.T) {
	for name, c := range map[string]struct {
		steps []api.Redelivered
		calls int
		sent  string
		waits bool
	}{
		"all at once":       {[]api.Redelivered{{Redelivered: 3}}, 1, "3 callbacks", false},
		"more":              {[]api.Redelivered{{Redelivered: 1, More: true}, {Redelivered: 2}}, 2, "3 callbacks", false},
		"full":              {[]api.Redelivered{{Redelivered: 1, Full: true}, {Full: true}, {Redelivered: 2}}, 3, "3 callbacks", true},
		"some are gone":     {[]api.Redelivered{{Redelivered: 1}}, 1, "1 callback", false},
		"none can be sent":  {[]api.Redelivered{{Redelivered: 1, More: true}, {More: true}, {More: true}}, 2, "1 callback", false},
		"they die at once":  {[]api.Redelivered{{Redelivered: 2, More: true}, {Redelivered: 2, More: true}, {Redelivered: 2, More: true}}, 2, "4 callbacks", false},
		"full when all are": {[]api.Redelivered{{Redelivered: 3, Full: true}}, 1, "3 callbacks", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := manyDead{apitest.NewBackend()}
			b.Redelivered = c.steps
			got := callbackExec(t, b)("redeliver", "--all", "--tenant", "acme")
			require.Equal(t, exitOK, got.code, got)
			require.Len(t, b.Calls, c.calls)
			require.Equal(t, "redeliver dead acme", b.Calls[0])
			require.Contains(t, got.out, "Sent again   "+c.sent)
			require.Equal(t, c.waits, strings.Contains(got.err, "1 of 3 dead callbacks sent again. An endpoint has as many"), got.err)
		})
	}
	b := manyDead{apitest.NewBackend()}
	b.Redelivered = []api.Redelivered{{Redelivered: 1, Refused: 1, More: true}, {Redelivered: 1, Refused: 1}}
	got := callbackExec(t, b)("redeliver", "--all", "--json")
	require.JSONEq(t, `{"redelivered":2,"full":false,"refused":1,"more":false}`, got.out)
	require.Contains(t, got.err, "Left out: 1 dead callback, because the endpoint is disabled or deleted. First set it again")
}

// fullThen is always full, and calls then.
type fullThen struct {
	manyDead
	then func()
}

func (f fullThen) RedeliverDead(context.Context, string) (api.Redelivered, error) {
	f.then()
	return api.Redelivered{Full: true}, nil
}

// TestRedeliverAllIsInterrupted: it says how far it was.
func TestRedeliverAllIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := httptest.NewServer(httpapi.New(httpapi.Options{Backend: fullThen{manyDead{apitest.NewBackend()}, cancel}}))
	t.Cleanup(s.Close)
	got := console{terminal: true}.exec(ctx, "--api", s.URL, "callback", "redeliver", "--all")
	got.ends(t, exitInterrupted, "0 of 3 dead callbacks sent again. The same command sends the others.")
}

func TestSubmitWithCallback(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "NOOP", "--id", "g", "--payload", "1", "--callback-url", "https://example.com/h")
	require.Equal(t, exitOK, got.code, got)
	require.Equal(t, "https://example.com/h", f.groupByID(t, "g").submitted.CallbackURL)
	got = f.exec(t.Context(), console{}, "submit", "--help")
	require.Regexp(t, `--callback-url string +a URL that is called`, got.out+got.err)
}
