package roomapi

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bulkaction/bulkaction/api"
)

const (
	statusAge   = time.Second // an answer is repeated for so long
	maxStatuses = 4096        // answers that are kept
)

// statuses caches the state of each event for a second, and also an error, such as that the event
// does not exist. The call is open to everyone, so this bounds its load on the store.
type statuses struct {
	read  func(context.Context, string) (api.EventStatus, error)
	now   func() time.Time
	calls singleflight.Group

	mu      sync.Mutex
	answers map[string]statusAnswer
}

type statusAnswer struct {
	status api.EventStatus
	body   []byte // as JSON
	err    error
	at     time.Time
}

func newStatuses(read func(context.Context, string) (api.EventStatus, error)) *statuses {
	return &statuses{read: read, now: time.Now, answers: map[string]statusAnswer{}}
}

// of returns the state of an event, at most statusAge old. Concurrent calls share one read; the end
// of one caller's request does not cancel it.
func (s *statuses) of(ctx context.Context, event string) statusAnswer {
	if answer, ok := s.recent(event); ok {
		return answer
	}
	v, _, _ := s.calls.Do(event, func() (any, error) {
		if answer, ok := s.recent(event); ok {
			return answer, nil
		}
		var answer statusAnswer
		answer.status, answer.err = s.read(context.WithoutCancel(ctx), event)
		if answer.err == nil {
			answer.body, answer.err = json.Marshal(answer.status)
			answer.body = append(answer.body, '\n')
		}
		s.keep(event, answer)
		return answer, nil
	})
	return v.(statusAnswer)
}

func (s *statuses) recent(event string) (statusAnswer, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer, ok := s.answers[event]
	return answer, ok && s.now().Sub(answer.at) < statusAge
}

func (s *statuses) keep(event string, answer statusAnswer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer.at = s.now()
	if len(s.answers) >= maxStatuses {
		maps.DeleteFunc(s.answers, func(_ string, a statusAnswer) bool { return answer.at.Sub(a.at) >= statusAge })
	}
	if len(s.answers) < maxStatuses {
		s.answers[event] = answer
	}
}

// getStatus serves GET /events/{event}. Pages of all origins may read the answer (CORS).
func (a *API) getStatus(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Access-Control-Allow-Origin", "*")
	event, err := eventOf(r)
	if err != nil {
		return err
	}
	answer := a.statuses.of(r.Context(), event)
	if answer.err != nil {
		return answer.err
	}
	writeShared(w, "application/json", statusAge, answer.body)
	return nil
}

// jwksAge is how long verifiers may cache the JWKS. A new key is published longer than this before
// it signs.
const jwksAge = 5 * time.Minute

func (a *API) jwks(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Access-Control-Allow-Origin", "*")
	writeShared(w, "application/json", jwksAge, a.room.JWKS())
	return nil
}

// writeShared answers with what is the same for everybody, so that caches may keep it for age.
func writeShared(w http.ResponseWriter, contentType string, age time.Duration, body []byte) {
	h := w.Header()
	h.Set("Cache-Control", fmt.Sprintf("public, max-age=%d", int(age/time.Second)))
	h.Set("Content-Type", contentType)
	_, _ = w.Write(body) // an error means that the client has left
}

//go:embed openapi.yaml
var openapiDocument []byte

func getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	writeShared(w, "application/yaml", time.Minute, openapiDocument)
	return nil
}
