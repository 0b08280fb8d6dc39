package roomapi

import (
	"context"
	_ "embed"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/web"
)

const (
	statusAge   = time.Second // an answer is repeated for so long
	maxStatuses = 4096        // answers that are kept
)

// statuses caches the state of each event for a second, and also an error, such as that the event
// does not exist. The call is open to everyone, so this bounds its load on the store.
type statuses struct {
	read    func(context.Context, string) (api.EventStatus, error)
	calls   singleflight.Group
	answers *redisx.Cache[string, statusAnswer]
}

type statusAnswer struct {
	status api.EventStatus
	body   []byte // as JSON
	err    error
}

func newStatuses(read func(context.Context, string) (api.EventStatus, error)) *statuses {
	return &statuses{read: read, answers: redisx.NewCache[string, statusAnswer](statusAge, maxStatuses)}
}

// of returns the state of an event, at most statusAge old. Concurrent calls share one read; the end
// of one caller's request does not cancel it.
func (s *statuses) of(ctx context.Context, event string) statusAnswer {
	if answer, _, ok := s.answers.Get(event); ok {
		return answer
	}
	v, _, _ := s.calls.Do(event, func() (any, error) {
		return s.answers.GetOr(event, func() (answer statusAnswer, err error) {
			answer.status, answer.err = s.read(context.WithoutCancel(ctx), event)
			if answer.err == nil {
				answer.body = append(web.Encode(answer.status), '\n')
			}
			return answer, nil
		})
	})
	return v.(statusAnswer)
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
