package console

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// listOf returns a function that reads the list which a query asks for, and the valid parameters of
// the query, which name the page's live topic.
type listOf func(q url.Values) (read func(context.Context) (any, error), filter url.Values, err error)

// view reads the list that a request asks for. v has the rest of the page, with the kind of its
// topic.
func (l listOf) view(r *http.Request, v view) (view, error) {
	read, filter, err := l(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	v.data, err = read(r.Context())
	v.topic += ":" + filter.Encode()
	return v, err
}

// open returns what reads the list of a topic, at most once per interval.
func (l listOf) open(arg string, interval time.Duration) (func(context.Context) (any, error), error) {
	q, err := url.ParseQuery(arg)
	if err != nil {
		return nil, invalid("topics", "is malformed")
	}
	read, _, err := l(q)
	return every(interval, read), err
}

// chosen returns a query of the values that are not empty.
func chosen(values map[string]string) url.Values {
	q := url.Values{}
	for name, value := range values {
		if value != "" {
			q.Set(name, value)
		}
	}
	return q
}
