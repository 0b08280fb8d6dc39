package roomload

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"

// parseInPieces feeds an answer to a new parser in pieces of n bytes, until the first error. It
// returns the parser, the frames as "event|id|data", and that error.
func parseInPieces(t *testing.T, answer string, n int) (p *parser, frames []string, err error) {
	t.Helper()
	p = &parser{}
	for len(answer) > 0 && err == nil {
		piece := answer[:min(n, len(answer))]
		answer = answer[len(piece):]
		err = p.feed([]byte(piece), func(f frame) {
			frames = append(frames, fmt.Sprintf("%s|%s|%s", f.Event, f.ID, f.Data))
		})
	}
	return p, frames, err
}

// chunks encodes each text as a chunk.
func chunks(texts ...string) string {
	var b strings.Builder
	for _, text := range texts {
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(text), text)
	}
	return b.String()
}

func TestParserReadsFrames(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 5000)
	body := []string{
		"retry: 2500\n\nevent: state\ndata: {}\n\n", "event: pos", "ition\ndata: {\"position\":1}\n\n",
		": heartbeat\n\n", "event: admitted\ndata: " + long + "\n\nevent: ended\nid: ended\ndata: {\"reason\":\"left\"}\n\n",
	}
	want := []string{"state||{}", `position||{"position":1}`, "admitted||" + long, `ended|ended|{"reason":"left"}`}
	for name, answer := range map[string]string{
		"chunked":           streamHead + "Transfer-Encoding: chunked\r\n\r\n" + chunks(body...) + "0\r\n\r\n",
		"without chunks":    streamHead + "\r\n" + strings.Join(body, ""),
		"CR and LF":         streamHead + "\r\n" + strings.ReplaceAll(strings.Join(body, ""), "\n", "\r\n"),
		"CR alone":          streamHead + "\r\n" + strings.ReplaceAll(strings.Join(body, ""), "\n", "\r"),
		"byte order mark":   streamHead + "\r\n" + string(byteOrderMark) + strings.Join(body, ""),
		"100 Continue":      "HTTP/1.1 100 Continue\r\n\r\n" + streamHead + "\r\n" + strings.Join(body, ""),
		"chunk's extension": streamHead + "transfer-encoding: Chunked\r\n\r\n" + strings.Replace(chunks(body...), "\r\n", ";a=b\r\n", 1) + "0\r\nTrailer: x\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, n := range []int{1, 2, 3, 7, 64, readBuffer, len(answer)} {
				p, frames, err := parseInPieces(t, answer, n)
				if strings.Contains(strings.ToLower(answer), "chunked") {
					require.ErrorIs(t, err, errEnded)
				} else {
					require.NoError(t, err)
				}
				require.Equal(t, want, frames, "in pieces of %d bytes", n)
				require.Equal(t, 200, p.Status)
				require.Equal(t, "text/event-stream", p.Type)
				require.Equal(t, 2500*time.Millisecond, p.Retry)
				require.Equal(t, 1, p.Comments)
				require.LessOrEqual(t, cap(p.line), readBuffer, "the buffer has shrunk after a long line")
				require.LessOrEqual(t, cap(p.data), readBuffer)
			}
		})
	}
}

func TestParserFollowsTheStandard(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body string
		want []string
	}{
		"lines of data are joined":           {"data: a\ndata: b\n\n", []string{"||a\nb"}},
		"one space is removed":               {"data:  a\n\ndata:b\n\n", []string{"|| a", "||b"}},
		"a frame without data is dropped":    {"event: x\n\ndata: y\n\n", []string{"||y"}},
		"a field without a colon":            {"data\n\n", []string{"||"}},
		"an unknown field is ignored":        {"color: red\ndata: a\n\n", []string{"||a"}},
		"an unfinished frame is not emitted": {"data: a\n\ndata: b\n", []string{"||a"}},
		"a name belongs to one frame":        {"event: x\nid: 1\ndata: a\n\ndata: b\n\n", []string{"x|1|a", "||b"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, frames, err := parseInPieces(t, streamHead+"\r\n"+c.body, 5)
			require.NoError(t, err)
			require.Equal(t, c.want, frames)
		})
	}
}

func TestParserRefusesWhatIsNoStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ answer, says string }{
		"another protocol":  {"SSH-2.0-OpenSSH\r\n", `the answer begins with "SSH-2.0-OpenSSH"`},
		"a bad chunk size":  {streamHead + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", `the size of a chunk is "zz"`},
		"a bad chunk end":   {streamHead + "Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", `a chunk ends with "bc"`},
		"endless headers":   {streamHead + strings.Repeat("A: b\r\n", longestHead), "the headers have more than"},
		"an endless header": {streamHead + strings.Repeat("A", 2*longestHead), "a line of the answer has more than"},
		"an endless line":   {streamHead + "\r\ndata: " + strings.Repeat("x", longestLine+readBuffer), "a line of the stream has more than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, err := parseInPieces(t, c.answer, readBuffer)
			require.ErrorContains(t, err, c.says)
		})
	}
	p, _, err := parseInPieces(t, "HTTP/1.1 204 No Content\r\n\r\n", 9)
	require.ErrorIs(t, err, errEnded)
	require.Equal(t, 204, p.Status)
}

// TestParserReadsGoServers: the parser understands the event stream that a server of net/http
// writes.
func TestParserReadsGoServers(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = fmt.Fprintf(w, "event: position\ndata: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	defer server.Close()
	conn := dialTest(t, server.Listener.Addr().String())
	_, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	var p parser
	var frames []string
	buf := make([]byte, readBuffer)
	for {
		n, err := conn.Read(buf)
		require.NoError(t, err)
		if err = p.feed(buf[:n], func(f frame) { frames = append(frames, f.Event+string(f.Data)) }); err != nil {
			require.ErrorIs(t, err, errEnded)
			break
		}
	}
	require.Equal(t, []string{"position0", "position1", "position2"}, frames)
}

func FuzzParser(f *testing.F) {
	f.Add([]byte(streamHead+"\r\ndata: a\n\n"), 3)
	f.Add([]byte(streamHead+"Transfer-Encoding: chunked\r\n\r\n"+chunks("data: a\r\n\r\n")+"0\r\n\r\n"), 1)
	f.Fuzz(func(t *testing.T, answer []byte, n int) {
		n = min(max(1, n), 4096)
		_, whole, err := parseInPieces(t, string(answer), max(1, len(answer)))
		_, pieces, errPieces := parseInPieces(t, string(answer), n)
		if err == nil && errPieces == nil {
			require.Equal(t, whole, pieces, "the pieces do not matter")
		}
	})
}
