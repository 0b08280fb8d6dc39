package console

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// refusal is why a form was not accepted, and what its user had typed.
type refusal struct {
	failure
	values url.Values
	cause  error // of a form that a page itself has refused, which has what was typed; nil: there is values
}

// formError is an error with the fields of a form that http.Request does not have, because the form
// has a file.
type formError struct {
	fields map[string]string
	err    error
}

func (e *formError) Error() string { return e.err.Error() }
func (e *formError) Unwrap() error { return e.err }

// refuse answers a form that was not accepted. The answer is the page of the form, with the problem
// and with what was typed, so that nobody has to type it again. If there is no such page, or it
// can't be read, the answer is the page of the error. A chosen file is lost: browsers keep none.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, a action, err error) {
	if a.page == nil || errors.Is(err, api.ErrNotFound) {
		c.fail(w, r, err)
		return
	}
	values := r.PostForm
	if form, ok := errors.AsType[*formError](err); ok {
		values = url.Values{}
		for name, value := range form.fields {
			values.Set(name, value)
		}
	}
	if errors.Is(err, api.ErrConflict) {
		values.Del("form_id") // it was used: the form that is shown now is another one
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), readTimeout)
	defer cancel()
	v, readErr := a.page(r.WithContext(ctx))
	if readErr != nil {
		last, _, ok := c.last.find(r)
		if !ok {
			c.fail(w, r, err)
			return
		}
		v = last
	}
	c.renderRefused(w, r, v, values, err)
}

// renderRefused answers with a page whose form was not accepted. The page does not follow live
// data: that would load it again without what was typed.
func (c *Console) renderRefused(w http.ResponseWriter, r *http.Request, v view, values url.Values, err error) {
	f, status := c.failureOf(w, r, err)
	v.topic, v.refused = "", &refusal{failure: f, values: values}
	c.render(w, r, status, v, time.Time{})
}

// Refused says why the form of the page was not accepted; nil: no form was sent.
func (f frame) Refused() *failure {
	if f.refused == nil {
		return nil
	}
	return &f.refused.failure
}

// Value returns what was typed into a field of a form that was not accepted, otherwise value.
func (f frame) Value(name, value string) string {
	if f.refused == nil || !f.refused.values.Has(name) {
		return value
	}
	return f.refused.values.Get(name)
}
