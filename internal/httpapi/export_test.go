package httpapi

import "github.com/bulkaction/bulkaction/internal/auth"

// Route is a route as tests of the whole API see it.
type Route struct {
	Method, Path string
	Scope        auth.Scope
	Object       string
	Stream       bool
}

// Routes returns all routes.
func Routes() []Route {
	var all []Route
	for _, rt := range newServer(roomOptions(newFakeRooms())).routes() {
		all = append(all, Route{rt.method, rt.path, rt.scope, string(rt.object), rt.stream})
	}
	return all
}

// NewFakeRooms returns a waiting room in memory.
func NewFakeRooms() Rooms { return newFakeRooms() }
