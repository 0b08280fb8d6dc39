package httpapi

import (
	"net/http"

	"github.com/bulkaction/bulkaction/api"
)

// listRejected answers with a page of rejected messages. They have their data only with data=true,
// because the data of a message may have personal data, and a whole page of it is large.
func listRejected(b Backend) func(*http.Request) (api.RejectedList, error) {
	return func(r *http.Request) (l api.RejectedList, err error) {
		cursor, limit, err := pageParams(r)
		if err != nil {
			return l, err
		}
		data := r.URL.Query().Get("data")
		if data != "" && data != "true" && data != "false" {
			return l, invalidField("data", "must be true or false")
		}
		l, err = b.Rejected(r.Context(), cursor, limit, data == "true")
		l.Rejected = orEmpty(l.Rejected)
		return l, err
	}
}
