package app

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhoMayUseTheAdminServer(t *testing.T) {
	const token, local = "0123456789abcdef", "127.0.0.1:9090"
	for name, c := range map[string]struct {
		method, peer, host, token, sent string
		want                            int
	}{
		"change from here":                {http.MethodPut, "127.0.0.1:1", local, "", "", http.StatusOK},
		"change from here, IPv6":          {http.MethodPut, "[::1]:1", "[::1]:9090", "", "", http.StatusOK},
		"change from here, by name":       {http.MethodPut, "[::1]:1", "LocalHost", "", "", http.StatusOK},
		"change by DNS rebinding":         {http.MethodPut, "127.0.0.1:1", "evil.example:9090", "", "", http.StatusForbidden},
		"change from there":               {http.MethodPut, "192.0.2.1:1", local, "", "", http.StatusForbidden},
		"change from nowhere":             {http.MethodPut, "@", local, "", "", http.StatusForbidden},
		"read from there":                 {http.MethodGet, "192.0.2.1:1", "10.0.0.1:9090", "", "", http.StatusOK},
		"head from there":                 {http.MethodHead, "192.0.2.1:1", "10.0.0.1:9090", "", "", http.StatusOK},
		"change from there, token":        {http.MethodPut, "192.0.2.1:1", "10.0.0.1:9090", token, "Bearer " + token, http.StatusOK},
		"scheme in lower case":            {http.MethodPut, "192.0.2.1:1", "10.0.0.1:9090", token, "bearer " + token, http.StatusOK},
		"change from here without token":  {http.MethodPut, "127.0.0.1:1", local, token, "", http.StatusUnauthorized},
		"read from here without token":    {http.MethodGet, "127.0.0.1:1", local, token, "", http.StatusUnauthorized},
		"read from there, wrong token":    {http.MethodGet, "192.0.2.1:1", local, token, "Bearer 0123456789abcdeX", http.StatusUnauthorized},
		"read from there, part of it":     {http.MethodGet, "192.0.2.1:1", local, token, "Bearer 0123", http.StatusUnauthorized},
		"read from there, another scheme": {http.MethodGet, "192.0.2.1:1", local, token, "Basic " + token, http.StatusUnauthorized},
	} {
		p := newProcess(Config{Telemetry: TelemetryConfig{AdminToken: c.token}, Ingest: IngestConfig{AllowUnauthenticated: true}}, "worker", nil)
		p.HandleAdmin("/pool", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		request := httptest.NewRequest(c.method, "/pool", nil)
		request.RemoteAddr, request.Host = c.peer, c.host
		if c.sent != "" {
			request.Header.Set("Authorization", c.sent)
		}
		response := httptest.NewRecorder()
		p.admin.ServeHTTP(response, request)
		require.Equal(t, c.want, response.Code, name)
		require.Equal(t, c.want == http.StatusUnauthorized, response.Header().Get("WWW-Authenticate") == "Bearer", name)
	}
}

// TestAdminServer: /healthz (200) and /readyz (503) of a process that is starting answer without
// the admin token, /metrics only with it. A request with a foreign Host, as a web page sends it by
// DNS rebinding, is refused with 421.
func TestAdminServer(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600))
	p := start(t, "BULKACTION_ADMIN_TOKEN_FILE="+file)
	get := func(path, host, token string) int {
		request, err := http.NewRequest(http.MethodGet, "http://"+p.AdminAddr()+path, nil)
		require.NoError(t, err)
		request.Host = host
		request.Header.Set("Authorization", "Bearer "+token)
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := client.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	require.Equal(t, http.StatusOK, get("/healthz", p.AdminAddr(), ""))
	require.Equal(t, http.StatusServiceUnavailable, get("/readyz", p.AdminAddr(), ""), "it is open, and says starting")
	require.Equal(t, http.StatusMisdirectedRequest, get("/healthz", "evil.example", ""))
	require.Equal(t, http.StatusMisdirectedRequest, get("/metrics", "evil.example", "0123456789abcdef"))
	require.Equal(t, http.StatusUnauthorized, get("/metrics", p.AdminAddr(), ""))
	require.Equal(t, http.StatusOK, get("/metrics", p.AdminAddr(), "0123456789abcdef"))
}

// TestAdminServerReadsNoEndlessBody: the client sends one of the ten bytes that it has announced.
// The handler's read ends with an error, and its answer, 408, reaches the client.
func TestAdminServerReadsNoEndlessBody(t *testing.T) {
	t.Parallel()
	p := start(t)
	p.HandleAdmin("PUT /pool", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		http.Error(w, err.Error(), http.StatusRequestTimeout)
	}))
	conn, err := net.Dial("tcp", p.AdminAddr())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "PUT /pool HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusRequestTimeout, response.StatusCode)
}
