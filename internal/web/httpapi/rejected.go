package httpapi

import (
	"net/http"

	"github.com/bulkaction/bulkaction/api"
)

// listRejected returns the function that reads a page of the messages that ingest has rejected. The
// page has their data only with data=true, because the data may be personal, and a page of it is
// large.
func listRejected(b Backend) func(*http.Request) (api.RejectedList, error) {
	return func(r *http.Request) (l api.RejectedList, err error) {
		cursor, limit, err := pageParams(r)
		if err != nil {
			return l, err
		}
		data, err := boolParam(r, "data")
		if err != nil {
			return l, err
		}
		l, err = b.Rejected(r.Context(), cursor, limit, data)
		l.Rejected = orEmpty(l.Rejected)
		return l, err
	}
}

// boolParam returns a query parameter that is true or false; false if it is absent.
func boolParam(r *http.Request, name string) (bool, error) {
	v := r.URL.Query().Get(name)
	if v != "" && v != "true" && v != "false" {
		return false, invalidField(name, "must be true or false")
	}
	return v == "true", nil
}
