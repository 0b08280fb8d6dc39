package console

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// refusal says why a form was refused, and what was typed into it.
type refusal struct {
	failure
	values url.Values
	cause  error // why the view of a page refused its query; servePage then makes the failure of it
}

// formError is an error with the values of the form's fields. Forms with a file need it, because
// http.Request has not parsed their fields.
type formError struct {
	fields map[string]string
	err    error
}

func (e *formError) Error() string { return e.err.Error() }
func (e *formError) Unwrap() error { return e.err }

// refuse answers a form that was not accepted. It shows the page of the form again, with the
// problem and with what was typed. If the page can't be read now, it shows the page's last data,
// which it finds only for a form that is sent to the path of its page. refuse answers with an error
// page if it finds no last data, if the form has no page, or if err is api.ErrNotFound. A chosen
// file must be chosen again, because browsers do not keep it.
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
		last, _, ok := c.last.Get(keyOf(r))
		if !ok {
			c.fail(w, r, err)
			return
		}
		v = last
	}
	c.renderRefused(w, r, v, values, err)
}

// renderRefused answers with the page of the form that was refused. It makes the page static: an
// update would replace what was typed.
func (c *Console) renderRefused(w http.ResponseWriter, r *http.Request, v view, values url.Values, err error) {
	f, status := c.failureOf(w, r, err)
	v.topic, v.refused = "", &refusal{failure: f, values: values}
	c.render(w, r, status, v, time.Time{})
}

// Refused returns why the form that was sent to this page was refused; nil: no form was refused.
// The layout shows it as an error.
func (f frame) Refused() *failure {
	if f.refused == nil {
		return nil
	}
	return &f.refused.failure
}

// Value returns the initial value of a form's field: what was typed if the form was refused,
// otherwise value.
func (f frame) Value(name, value string) string {
	if f.refused == nil || !f.refused.values.Has(name) {
		return value
	}
	return f.refused.values.Get(name)
}
