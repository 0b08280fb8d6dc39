package httpapi

import (
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/joblines"
)

// Route is a route as tests of the whole API see it.
type Route struct {
	Method, Path string
	Scope        auth.Scope
	Object       string
	Query        []string
}

// Routes returns all routes, also those of the waiting room and of the activity log.
func Routes() []Route {
	var all []Route
	o := Options{Backend: struct{ Backend }{}, Rooms: struct{ Rooms }{}, Activity: struct{ Activity }{}}
	for _, rt := range newServer(o).routes() {
		all = append(all, Route{rt.method, rt.path, rt.scope, string(rt.object), rt.query})
	}
	return all
}

// OpenAPIDocument is what GET /openapi.yaml serves.
var OpenAPIDocument = openapiDocument

// NewCalls is New, with methods of tests.
func NewCalls(opt Options) *server { return newServer(opt) }

func (s *server) TakeMemory() bool       { return s.bodyMemory.free.TryAcquire(maxBodyMemory) }
func (s *server) FreeMemory()            { s.bodyMemory.free.Release(maxBodyMemory) }
func (s *server) SetMostStreams(n int64) { s.streams.Max = n }

// Limits and times that tests use.
const (
	AbortTimeout, BodyMemoryWait, BodyTimeout, IdleTimeout = abortTimeout, bodyMemoryWait, bodyTimeout, idleTimeout
	SlowStart, StillInterval, StoreTimeout, StreamBuffer   = slowStart, stillInterval, storeTimeout, streamBuffer
	MaxAppends, MaxBatchLines, MaxEventAggregate, MaxLine  = maxAppends, maxBatchLines, maxEventAggregate, joblines.MaxLine
	MaxKeyStreams, MaxListedLines, MaxSkipped, SmallBody   = maxKeyStreams, maxListedLines, joblines.MaxSkipped, smallBody
	JSONType, MergePatchType, Open                         = jsonType, mergePatchType, open
)
