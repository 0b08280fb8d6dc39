package console

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// listOf is a function that parses the query of a list. It returns a function that reads this page
// of the list, and the valid parameters of the query, which are part of the name of the page's live
// topic.
type listOf func(q url.Values) (read func(context.Context) (any, error), filter url.Values, err error)

// view fills in v, whose topic is only the name of a topic: it reads the data for the query of r,
// and adds the valid parameters to the topic.
func (l listOf) view(r *http.Request, v view) (view, error) {
	read, filter, err := l(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	v.data, err = read(r.Context())
	v.topic += ":" + filter.Encode()
	return v, err
}

// open returns a function that returns the live data of a list, and reads it at most once per
// interval. arg is the part of the topic behind the colon: the parameters of the list.
func (l listOf) open(arg string, interval time.Duration) (func(context.Context) (any, error), error) {
	q, err := url.ParseQuery(arg)
	if err != nil {
		return nil, invalid("topics", "is malformed")
	}
	read, _, err := l(q)
	return every(interval, read), err
}

// every returns a function that calls read at most once per interval, and otherwise returns the
// data of the last call. After an error, the next call reads again. Only one goroutine may use the
// function.
func every[T any](
	interval time.Duration, read func(context.Context) (T, error),
) func(context.Context) (T, error) {
	var last T
	var readAt time.Time
	return func(ctx context.Context) (T, error) {
		if !readAt.IsZero() && time.Since(readAt) < interval {
			return last, nil
		}
		data, err := read(ctx)
		if err == nil {
			last, readAt = data, time.Now()
		}
		return data, err
	}
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
