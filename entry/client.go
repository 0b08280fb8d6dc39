package entry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const maxAnswerBytes = 1 << 20

// Client makes the calls of the API (role ingest) about entry tokens: a protected service verifies
// and renews tokens with it, and completes entries. It may be used by several goroutines.
//
// All calls can return ErrUnavailable: it is not known whether the call had an effect. Each call
// may be repeated.
type Client struct {
	base string
	http *http.Client
}

// NewClient returns a client of the API at apiURL, such as "http://127.0.0.1:8080". It sends its
// requests with client; nil: an HTTP client with a time limit of 3 s.
func NewClient(apiURL string, client *http.Client) (*Client, error) {
	if err := checkURL("the API's URL", apiURL); err != nil {
		return nil, fmt.Errorf("entry: %w", err)
	}
	return &Client{base: strings.TrimRight(apiURL, "/"), http: httpClient(client)}, nil
}

// Verify asks whether a token is valid at this moment: it has not expired and was not given back.
// It returns ErrInvalid for a token that was not signed by a broker.
func (c *Client) Verify(ctx context.Context, token string) (valid bool, err error) {
	var answer struct{ Valid bool }
	err = c.call(ctx, "verify", map[string]any{"token": token}, &answer)
	return answer.Valid, err
}

// Renewal is the token that Renew has returned, with its expiry.
type Renewal struct {
	Token     string    `json:"token"` // a secret
	ExpiresAt time.Time `json:"expires_at"`
}

// Renew extends the user's entry, and returns a new token with a later expiry, at most the end of
// the event's max_session. Give it to the browser by Cookie. Renew returns ErrOver if max_session
// is reached or the user is gone.
func (c *Client) Renew(ctx context.Context, token string) (Renewal, error) {
	var r Renewal
	if err := c.call(ctx, "renew", map[string]any{"token": token}, &r); err != nil {
		return Renewal{}, err
	}
	if r.Token == "" {
		return Renewal{}, fmt.Errorf("renew the entry: %w: the answer has no token", ErrUnavailable)
	}
	return r, nil
}

// Complete ends the user's entry, so that the next user gets the slot. sold takes a seat from the
// event's stock. done is true for the first call alone: a repeated call, and one for a user whose
// time is over, returns false. After an error the first call may have worked.
func (c *Client) Complete(ctx context.Context, token string, sold bool) (done bool, err error) {
	var answer struct{ Done bool }
	err = c.call(ctx, "complete", map[string]any{"token": token, "sold": sold}, &answer)
	return answer.Done, err
}

func (c *Client) call(ctx context.Context, name string, body map[string]any, answer any) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s the entry: %w", name, err)
		}
	}()
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	address := c.base + "/v1/entry-tokens/" + name
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	defer response.Body.Close()
	text, err = io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if response.StatusCode != http.StatusOK {
		return statusError(response.StatusCode, text)
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%w: the answer is no JSON document: %w", ErrUnavailable, err)
	}
	return nil
}

// statusError returns the error for an answer whose status is not 200.
func statusError(status int, body []byte) error {
	var p problem
	detail := http.StatusText(status)
	if json.Unmarshal(body, &p) == nil && p.Detail != "" {
		detail = p.Detail
	}
	cause := errors.New(detail)
	switch {
	case status == http.StatusConflict:
		return fmt.Errorf("%w: %w", ErrOver, cause)
	case status == http.StatusUnprocessableEntity:
		return fmt.Errorf("%w: %w", ErrInvalid, cause)
	case status == http.StatusTooManyRequests, status >= http.StatusInternalServerError:
		return fmt.Errorf("%w: status %d: %w", ErrUnavailable, status, cause)
	}
	return fmt.Errorf("status %d: %w", status, cause)
}
