package chaos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// misbehaving acts as clients that attack: they send bad requests to ingest, do not read its
// answers, or write bad entries into the streams with XADD. Bad requests must be refused, and no
// attack may change the outcome of a planned group.
type misbehaving struct {
	admin     *administrator
	producers *producers

	mu      sync.Mutex
	silent  []net.Conn     // connections of silent readers, which stay open until close
	answers map[string]int // number of answers, by the kind of the fault and the HTTP status
}

const (
	clientsAtOnce = 30               // clients of one fault
	refusedWithin = 30 * time.Second // by then the server must have let go of a client
	aliveWithin   = 20 * time.Second // by then ingest must answer while clients misbehave; it may be stopped by another fault
	endlessBytes  = 64 << 20         // a line of so many bytes must not be read
)

// close reads the status that each silent reader got, which nobody has read before, and then closes
// the reader's connection.
func (c *misbehaving) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.silent {
		status := make([]byte, len("HTTP/1.1 200"))
		_ = conn.SetReadDeadline(time.Now().Add(time.Second)) // an error would show at the read
		if _, err := io.ReadFull(conn, status); err == nil {
			c.answers[fmt.Sprintf("%s: %s", silentReaders, status[len("HTTP/1.1 "):])]++
		}
		_ = conn.Close() // the server may have closed it
	}
	c.silent = nil
}

func (c *misbehaving) violate(format string, args ...any) { c.admin.fleet.violate(format, args...) }

// run causes a fault in one ingest process, and then checks that the process still answers.
func (c *misbehaving) run(ctx context.Context, f fault) (what string, err error) {
	ingest := c.admin.fleet.of("ingest")
	server := ingest[f.n%len(ingest)].env["BULKACTION_API_ADDR"]
	switch f.kind {
	case silentReaders:
		what, err = c.readNothing(ctx, server, f.rng)
	case stalledBodies:
		err = c.each(ctx, server, c.stall)
	case endlessLine:
		err = c.writeEndlessLine(ctx, server, fmt.Sprint("endless-", f.n))
	case hostileIDs:
		what, err = c.sendHostileIDs(ctx, server, f.rng)
	}
	if err != nil {
		return what, err
	}
	return what, c.checkAlive(ctx, server)
}

// checkAlive checks that the process answers 200 within aliveWithin; otherwise it is a violation.
func (c *misbehaving) checkAlive(ctx context.Context, server string) error {
	within, cancel := context.WithTimeout(ctx, aliveWithin)
	defer cancel()
	for {
		status, err := request(within, http.MethodGet, "http://"+server+"/", "")
		if err == nil && status == http.StatusOK {
			return nil
		}
		if redisx.Sleep(within, 100*time.Millisecond) != nil {
			c.violate("ingest at %s, with clients that misbehave, has not answered for %s: %d, %v", server, aliveWithin, status, err)
			return ctx.Err()
		}
	}
}

// request sends an HTTP request with a JSON body and returns the status of the answer.
func request(ctx context.Context, method, url, body string) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// each runs the function client on clientsAtOnce connections at the same time.
func (c *misbehaving) each(ctx context.Context, server string, client func(context.Context, net.Conn)) error {
	var clients sync.WaitGroup
	for range clientsAtOnce {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", server)
		if err != nil {
			continue // another fault has ended the process
		}
		clients.Go(func() {
			defer conn.Close()
			client(ctx, conn)
		})
	}
	clients.Wait()
	return ctx.Err()
}

// readNothing makes HTTP requests for the event streams of a running group, and does not read the
// answers.
func (c *misbehaving) readNothing(ctx context.Context, server string, rng *rand.Rand) (what string, err error) {
	group := c.runningGroup(ctx, rng)
	if group == "" {
		return "", errNoEffect
	}
	for range clientsAtOnce {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", server)
		if err != nil {
			continue // another fault has ended the process
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			err = tcp.SetReadBuffer(1 << 10)
		}
		_, writeErr := fmt.Fprintf(conn, "GET /v1/groups/%s/events HTTP/1.1\r\nHost: %s\r\n\r\n", group, server)
		c.mu.Lock()
		c.silent = append(c.silent, conn)
		c.mu.Unlock()
		if err = errors.Join(err, writeErr); err != nil {
			break // another fault has ended the process
		}
	}
	return group, nil
}

// runningGroup returns the id of an accepted group that has not ended; "" if it finds none in time.
func (c *misbehaving) runningGroup(ctx context.Context, rng *rand.Rand) string {
	ctx, cancel := context.WithTimeout(ctx, aliveWithin)
	defer cancel()
	ids := c.accepted(rng)
	for _, id := range ids[:min(len(ids), 100)] {
		if got, err := c.producers.fleet.apis[0].Group(ctx, id); err == nil && !got.Status.Ended() {
			return id
		}
	}
	return ""
}

// accepted returns the ids of the accepted groups in random order.
func (c *misbehaving) accepted(rng *rand.Rand) (ids []string) {
	c.producers.mu.Lock()
	for id := range c.producers.receipts {
		ids = append(ids, id)
	}
	c.producers.mu.Unlock()
	slices.Sort(ids)
	rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// stall begins a request with a large body, sends three bytes of the body, and then nothing more.
// Ingest must answer 408 or close the connection in time.
func (c *misbehaving) stall(_ context.Context, conn net.Conn) {
	if _, err := fmt.Fprintf(conn, "POST /v1/groups HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 8000000\r\n\r\n{\"i", conn.RemoteAddr()); err != nil {
		return
	}
	c.checkRefused(conn, stalledBodies, http.StatusRequestTimeout)
}

// checkRefused checks that ingest answers with this status or one that checkStatus always allows,
// or closes the connection, in time.
func (c *misbehaving) checkRefused(conn net.Conn, kind string, status int) {
	_ = conn.SetReadDeadline(time.Now().Add(refusedWithin)) // an error would show at the read
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	var late net.Error
	switch {
	case err == nil:
		defer resp.Body.Close()
		c.checkStatus(kind, "", resp.StatusCode, status)
	case errors.As(err, &late) && late.Timeout():
		c.violate("%s: the server has not refused it within %s", kind, refusedWithin)
	}
}

// checkStatus counts the status of an answer. It is a violation unless the status is an expected
// one, or 429 or 503: other faults fill Redis's memory or stop Redis.
func (c *misbehaving) checkStatus(kind, what string, status int, expected ...int) {
	c.mu.Lock()
	c.answers[fmt.Sprintf("%s: %d", kind, status)]++
	c.mu.Unlock()
	if !slices.Contains(append(expected, http.StatusTooManyRequests, http.StatusServiceUnavailable), status) {
		c.violate("%s: %s was answered with status %d", kind, what, status)
	}
}

// writeEndlessLine creates a group and appends a line to it that does not end. The server must
// answer 413 or close the connection before it has read endlessBytes. Then writeEndlessLine cancels
// the group.
func (c *misbehaving) writeEndlessLine(ctx context.Context, server, group string) error {
	url := "http://" + server + "/v1/groups"
	if status, err := request(ctx, http.MethodPost, url, `{"id":"`+group+`","tenant":"endless","type":"CHAOS"}`); err != nil || status >= 300 {
		return nil // another fault: Redis or the process is away
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", server)
	if err != nil {
		return nil // another fault has ended the process
	}
	defer conn.Close()
	var refused sync.WaitGroup
	refused.Go(func() { c.checkRefused(conn, endlessLine, http.StatusRequestEntityTooLarge) })
	sent, err := fmt.Fprintf(conn, "POST /v1/groups/%s/jobs HTTP/1.1\r\nHost: %s\r\nContent-Type: application/x-ndjson\r\nContent-Length: %d\r\n\r\n{\"payload\":\"", group, server, 2*endlessBytes)
	_ = conn.SetWriteDeadline(time.Now().Add(refusedWithin)) // an error would show at the write
	for more := strings.Repeat("x", 64<<10); err == nil && sent < endlessBytes; {
		var n int
		n, err = io.WriteString(conn, more)
		sent += n
	}
	if sent >= endlessBytes {
		c.violate("the server has read %d bytes of a line without an end", sent)
	}
	refused.Wait()
	for ctx.Err() == nil {
		status, err := request(ctx, http.MethodPost, url+"/"+group+"/cancel", "")
		if err == nil && status < 500 && status != http.StatusTooManyRequests {
			return nil
		}
		_ = redisx.Sleep(ctx, 100*time.Millisecond) // the loop looks at ctx
	}
	return ctx.Err()
}

// idsOfEnemies are texts that must be refused as ids, because they would name foreign keys or
// paths, or are too long.
var idsOfEnemies = []string{
	"{0}", "a{b", "bulk-action:ingest", "a:b", "a|b", "a b", "../../etc", "..", ".", "*", "größe", strings.Repeat("x", 5000), `a\u0000b`, `a\nb`, `a\"b`,
}

// sendHostileIDs sends idsOfEnemies as group id, tenant and type over HTTP, where all must be
// refused, and through the ingest stream. In both ways it submits other content under the id of a
// planned group that runs, if there is one. It calls six paths with bad ids.
func (c *misbehaving) sendHostileIDs(ctx context.Context, server string, rng *rand.Rand) (what string, err error) {
	const jobs = `"jobs":[{"payload":{"n":0}}],"seal":true`
	url := "http://" + server + "/v1/groups"
	bodies := map[string]string{}
	for _, id := range idsOfEnemies {
		bodies[fmt.Sprintf("the group id %.20q", id)] = `{"id":"` + id + `","type":"CHAOS",` + jobs + `}`
		bodies[fmt.Sprintf("the tenant %.20q", id)] = `{"tenant":"` + id + `","type":"CHAOS",` + jobs + `}`
		bodies[fmt.Sprintf("the type %.20q", id)] = `{"type":"` + id + `",` + jobs + `}`
	}
	if group := c.runningGroup(ctx, rng); group != "" {
		bodies["the id of another's group"] = `{"id":"` + group + `","tenant":"thief","type":"CHAOS",` + jobs + `}`
	}
	for what, body := range bodies {
		status, err := request(ctx, http.MethodPost, url, body)
		if err == nil { // otherwise another fault has ended the process
			c.checkStatus(hostileIDs, what, status, http.StatusUnprocessableEntity, http.StatusConflict)
		}
		message := &redis.XAddArgs{Stream: c.admin.space.Ingest(), Values: []string{"type", "group.submit", "data", body}}
		if err := c.admin.rdb.XAdd(ctx, message).Err(); err != nil && ctx.Err() != nil {
			return "", err
		}
	}
	for _, path := range []string{"%7B0%7D/seal", "%00/cancel", "..%2F..%2Fetc/seal", "a%3Ab/seal", "%F0%28%8C%28/cancel", strings.Repeat("x", 5000) + "/seal"} {
		if status, err := request(ctx, http.MethodPost, url+"/"+path, ""); err == nil {
			c.checkStatus(hostileIDs, fmt.Sprintf("the path %.40q", path), status, http.StatusUnprocessableEntity)
		}
	}
	return fmt.Sprint(len(bodies), " submissions"), ctx.Err()
}

const garbageText = "garbage"

// isGarbage says whether a group id, or a line of results, is one that the fault writeGarbage has
// written.
func isGarbage(text string) bool { return strings.HasPrefix(text, garbageText) }

// writeGarbage causes a fault: into one stream it writes entries that can't be read as jobs,
// results or messages, or that name no existing job.
func (c *misbehaving) writeGarbage(ctx context.Context, f fault) (what string, err error) {
	in := allStreams[f.n%len(allStreams)]
	key, _, _ := c.admin.key(in)
	entries := [][]string{
		{garbageText, garbageText}, {"\x00\xff", "\xff\xfe"}, {"j", ""}, {"j", "|||||||||||||||"}, {"g", ""}, {"type", "group.submit"},
		{"g", garbageText, "l", garbageText, "t", ""}, {"g", garbageText, "l", `{"ordinal":0,"data":1}`, "t", garbageText}, {"data", "{}", "data", "{}"},
		{"j", garbageText + "|CHAOS|0|0|0|0|0|0|0|0||0|0||{}"}, {garbageText + "|CHAOS|0|0|0|0|0|0|0|0||", "0|0||{"}, {"type", garbageText, "data", "{"},
		{"j", garbageText + "|" + strings.Repeat("9", 400) + "|0|0"}, {garbageText, strings.Repeat("x", 1<<20)},
	}
	if group := c.runningGroup(ctx, f.rng); group != "" && in == resultStream {
		for _, lines := range []string{garbageText, garbageText + "\n" + garbageText, `{"ordinal":99999999,"data":1}`, `{"ordinal":-1}`} {
			entries = append(entries, []string{ledger.ResultsGroup, group, ledger.ResultsLines, lines, ledger.ResultsTraces, ""})
		}
	}
	for _, fields := range entries {
		if err := c.admin.rdb.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: fields}).Err(); err != nil {
			return in, err
		}
	}
	return in, nil
}
