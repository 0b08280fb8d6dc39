package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestConsole runs `bulkaction console` on a real Redis: it logs in with a key, controls a guard,
// an event and a type, and finds the changes in the activity log. After the key is revoked, it is
// refused. The console process leaves the ingest stream alone.
func TestConsole(t *testing.T) {
	server := redistest.Server(t)
	at := []string{"--redis-url", server.URL()}
	got := console{}.exec(t.Context(), append([]string{"key", "create", "--role", "admin", "--json"}, at...)...)
	require.Equal(t, exitOK, got.code, got.err)
	var key struct{ Key, ID string }
	require.NoError(t, json.Unmarshal([]byte(got.out), &key))
	entry := redis.XAddArgs{Stream: "bulk-action:ingest", Values: []string{"type", "group.cancel", "data", `{"group":"x"}`}}
	require.NoError(t, server.Client().XAdd(t.Context(), &entry).Err())

	t.Setenv("BULKACTION_AUTH", "keys")
	ctx, stop := context.WithCancel(t.Context())
	started, out := io.Pipe()
	ended := make(chan run, 1)
	go func() {
		got := console{out: out}.exec(ctx, append([]string{"console", "--addr", "127.0.0.1:0", "--json"}, at...)...)
		_ = out.CloseWithError(io.EOF)
		ended <- got
	}()
	t.Cleanup(func() {
		stop()
		got := <-ended
		require.Contains(t, []int{exitOK, exitInterrupted}, got.code, got.err)
	})
	var address struct{ API, Console string }
	require.NoError(t, json.NewDecoder(started).Decode(&address))
	require.Equal(t, address.API+"/ui/", address.Console)

	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	browser := &http.Client{Jar: jar}
	ask := func(method, path string, form url.Values) (status int, at, text string) {
		r, err := http.NewRequestWithContext(t.Context(), method, address.API+path, strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Accept", "text/html")
		answer, err := browser.Do(r)
		require.NoError(t, err)
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return answer.StatusCode, answer.Request.URL.Path, string(body)
	}
	_, path, _ := ask(http.MethodGet, "/", nil)
	require.Equal(t, "/ui/login", path)
	status, path, text := ask(http.MethodPost, "/ui/login", url.Values{"key": {key.Key}})
	require.Equal(t, http.StatusOK, status, text)
	require.Equal(t, "/ui/", path)
	require.Contains(t, text, "Active tenants")
	guards := guard.New(server.Client(), guard.Prefix("bulk-action:"))
	_, err = guards.Pool(t.Context(), "smtp", guard.Spec{Members: []guard.Member{{ID: "alice"}}})
	require.NoError(t, err)
	_, _, text = ask(http.MethodPost, "/ui/guards/pool%2Fsmtp/members/alice", url.Values{"command": {"disable"}})
	require.Contains(t, text, "The member is disabled")
	view, err := guards.Inspect(t.Context(), "pool/smtp")
	require.NoError(t, err)
	require.Equal(t, "off", view.Members[0].State)
	keyFile := writeFile(t, "key", key.Key)
	got = console{}.exec(t.Context(), "room", "set", "sale", "--capacity", "3", "--api", address.API, "--api-key-file", keyFile)
	require.Equal(t, exitOK, got.code, got.err)
	_, _, text = ask(http.MethodPost, "/ui/rooms/sale/pause", nil)
	require.Contains(t, text, "The event is paused")
	_, _, text = ask(http.MethodGet, "/ui/rooms", nil)
	require.Contains(t, text, "No live process has the role <b>broker</b>")
	_, _, text = ask(http.MethodPost, "/ui/types/NOOP/pause", nil)
	require.Contains(t, text, "The type is paused")

	got = console{}.exec(t.Context(), "activity", "--json", "--api", address.API, "--api-key-file", keyFile)
	require.Equal(t, exitOK, got.code, got.err)
	var entries []api.Activity
	for line := range strings.Lines(got.out) {
		var a api.Activity
		require.NoError(t, json.Unmarshal([]byte(line), &a))
		entries = append(entries, a)
	}
	require.Equal(t, "type.pause", entries[0].Action)
	require.Equal(t, "event.mode", entries[1].Action)
	require.Equal(t, "event.set", entries[2].Action)
	require.Equal(t, "guard.disable", entries[3].Action)
	require.Equal(t, api.ViaUI, entries[0].Via)
	require.Equal(t, key.ID, entries[0].Actor)
	require.NotEmpty(t, entries[0].RequestID)
	require.NotEmpty(t, entries[0].IP)

	sessions, err := server.Client().Keys(t.Context(), "bulk-action:auth:session:*").Result()
	require.NoError(t, err)
	require.Len(t, sessions, 1)
	got = console{}.exec(t.Context(), append([]string{"key", "revoke", key.ID}, at...)...)
	require.Equal(t, exitOK, got.code, got.err)
	require.Eventually(t, func() bool {
		_, path, _ := ask(http.MethodGet, "/ui/groups", nil)
		return path == "/ui/login"
	}, time.Minute, 100*time.Millisecond)
	require.EqualValues(t, 1, server.Client().XLen(t.Context(), "bulk-action:ingest").Val())
	require.Zero(t, server.Client().Exists(t.Context(), "bulk-action:stages").Val(), "it is no ingest")
}

func TestMistakesOfConsole(t *testing.T) {
	for args, says := range map[string]string{
		"console --redis-url localhost:6379":        "--redis-url ",
		"console --addr localhost":                  `--addr "localhost": must be host:port`,
		"console --addr 127.0.0.1:0 --key-prefix {": "BULKACTION_KEY_PREFIX",
		"console x": "",
	} {
		var log bytes.Buffer
		got := console{out: &log}.exec(t.Context(), strings.Fields(args)...)
		require.Equal(t, exitUsage, got.code, args)
		require.Contains(t, got.err, says)
	}
	t.Setenv("BULKACTION_API_SERVE", "ui,web")
	got := console{}.exec(t.Context(), "console", "--addr", "127.0.0.1:0")
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, `BULKACTION_API_SERVE="ui,web": must be api, ui, or api,ui`)
}
