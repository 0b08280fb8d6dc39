package httpapi

import "github.com/bulkaction/bulkaction/internal/access/auth"

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
	o := roomOptions(newFakeRooms())
	o.Activity = &fakeActivity{}
	for _, rt := range newServer(o).routes() {
		all = append(all, Route{rt.method, rt.path, rt.scope, string(rt.object), rt.query})
	}
	return all
}

// NewFakeRooms returns a waiting room in memory.
func NewFakeRooms() Rooms { return newFakeRooms() }

// NewFakeBackend returns a backend in memory.
func NewFakeBackend() Backend { return newFakeBackend() }
