package roomadmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	placeholder = "{event}"
	maxAnswer   = 64 << 10 // bytes
	maxConns    = 16       // connections to the service at once
)

// errNoAnswer means that the service gave no usable answer. A later call may succeed.
var errNoAnswer = errors.New("the seat service gave no usable answer")

// SeatService asks a seat service, over HTTP, how many seats an event has. It protects the caller
// from a service that is slow or sends too much. The service's address may be a private one,
// because only the operator configures it. Several goroutines may use it.
type SeatService struct {
	template string
	timeout  time.Duration
	http     *http.Client
}

// NewSeatService returns the service at template, a URL that contains {event} in its path or query,
// such as http://127.0.0.1:9000/events/{event}/seats. A call takes at most timeout.
func NewSeatService(template string, timeout time.Duration) (*SeatService, error) {
	if err := checkTemplate(template); err != nil {
		return nil, err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxConnsPerHost = maxConns
	transport.MaxResponseHeaderBytes = maxAnswer
	return &SeatService{template: template, timeout: timeout, http: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// checkTemplate returns an error unless template is a URL as NewSeatService needs it. The error does
// not show the URL, which may contain a password.
func checkTemplate(template string) error {
	u, err := url.Parse(strings.ReplaceAll(template, placeholder, "e"))
	_, rest, _ := strings.Cut(template, "://")
	path := strings.IndexAny(rest, "/?#") // the name and the port of the host end here
	switch {
	case err != nil || u.Hostname() == "" || (u.Scheme != "http" && u.Scheme != "https"):
		return errors.New("must be an address such as http://127.0.0.1:9000/events/{event}/seats")
	case !strings.Contains(template, placeholder):
		return errors.New("must contain {event}, which stands for the event's id")
	case path < 0 || strings.Contains(rest[:path], placeholder):
		return errors.New("may contain {event} only after the host")
	}
	return nil
}

// Seats asks for the number of seats of an event. An error that wraps waitingroom.ErrUnknown
// means that the service does not know the event: it answered 404 or 410. Errors do not show the
// service's URL.
func (c *SeatService) Seats(ctx context.Context, event string) (int64, error) {
	n, err := c.ask(ctx, event)
	if err != nil {
		return 0, fmt.Errorf("ask for the seats of event %s: %w", event, err)
	}
	return n, nil
}

// Close closes the connections that are not in use.
func (c *SeatService) Close() { c.http.CloseIdleConnections() }

func (c *SeatService) ask(ctx context.Context, event string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	// The id needs no escape: ids of events have only characters that may stand in a path or a
	// query.
	target := strings.ReplaceAll(c.template, placeholder, event)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, target, http.NoBody)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNoAnswer, withoutURL(err))
	}
	r.Header.Set("Accept", "application/json")
	resp, err := c.http.Do(r)
	if err != nil {
		return 0, c.noAnswer(ctx, err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound, http.StatusGone:
		return 0, fmt.Errorf("the seat service does not know it (status %d): %w", resp.StatusCode, waitingroom.ErrUnknown)
	default:
		return 0, fmt.Errorf("%w: status %d", errNoAnswer, resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return 0, c.noAnswer(ctx, err)
	case len(body) > maxAnswer:
		return 0, fmt.Errorf("%w: it has more than %d bytes", errNoAnswer, maxAnswer)
	}
	return parse(body)
}

// noAnswer returns an errNoAnswer for a call that failed in the network or by its timeout.
func (c *SeatService) noAnswer(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w: nothing came within %s", errNoAnswer, c.timeout)
	}
	return fmt.Errorf("%w: %w", errNoAnswer, withoutURL(err))
}

// parse reads the answer {"seats": n}; other fields are ignored. It parses the number from its
// text, because a float would turn 10,000,000.4 or 1e300 into a wrong integer.
func parse(body []byte) (int64, error) {
	var answer struct {
		Seats json.RawMessage `json:"seats"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, fmt.Errorf(`%w: it is not {"seats": n}`, errNoAnswer)
	}
	n, err := strconv.ParseInt(string(answer.Seats), 10, 64)
	if err != nil || n < 0 || n > maxCapacity {
		return 0, fmt.Errorf("%w: seats must be a whole number from 0 to 10,000,000", errNoAnswer)
	}
	return n, nil
}

// withoutURL returns the cause of an error of net/http.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
