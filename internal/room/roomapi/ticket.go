package roomapi

import (
	"net/http"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// enter returns the user of a request that may enter. For a new visitor it makes an id. Unless a
// header names the user, it sets or renews the cookie before the caller enters the user: if the
// answer is an error and the client repeats the request, it is the same user.
func (a *API) enter(w http.ResponseWriter, r *http.Request) (user string, err error) {
	if err := a.checkEntry(r); err != nil {
		return "", err
	}
	v, err := a.identity.of(r, a.clients.proxies.Sent(r))
	if err != nil {
		return "", err
	}
	if v.id == "" {
		if err := a.clients.newVisitor(a.clients.proxies.ClientOf(r)); err != nil {
			return "", err
		}
		v.id = newID()
	}
	if a.identity.header == "" && !v.native {
		http.SetCookie(w, a.identity.cookie(v.id))
	}
	return v.id, nil
}

// known returns the event and the user of a request that does not enter. user is "" if the request
// identifies none. It refuses a change that a page of another origin makes.
func (a *API) known(r *http.Request) (event, user string, err error) {
	if event, err = eventOf(r); err != nil {
		return "", "", err
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		if err := a.checkChange(r); err != nil {
			return "", "", err
		}
	}
	v, err := a.identity.of(r, a.clients.proxies.Sent(r))
	return event, v.id, err
}

func (a *API) enterTicket(w http.ResponseWriter, r *http.Request) error {
	event, err := eventOf(r)
	if err != nil {
		return err
	}
	user, err := a.enter(w, r)
	if err != nil {
		return a.refuse(r, err)
	}
	t, created, err := a.room.Poll(r.Context(), event, user, true)
	if err != nil {
		return a.refuse(r, err)
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	web.WriteJSON(w, status, "application/json", a.complete(event, t))
	return nil
}

func (a *API) getTicket(w http.ResponseWriter, r *http.Request) error {
	event, user, err := a.known(r)
	if err != nil {
		return err
	}
	if user == "" {
		return ErrNoTicket
	}
	t, _, err := a.room.Poll(r.Context(), event, user, false)
	if err != nil {
		return err
	}
	web.WriteJSON(w, http.StatusOK, "application/json", a.complete(event, t))
	return nil
}

// complete fills in the ticket's field Stream, an address that the room does not know.
func (a *API) complete(event string, t api.Ticket) api.Ticket {
	t.Stream = a.publicURL + "/events/" + event + "/tickets/waiting"
	return t
}

// leave serves DELETE …/ticket and POST …/ticket/leave. The form on the waiting page adds the
// parameter page: then the browser is redirected to the waiting page with ?left, and an error of
// the room is shown as the waiting page.
func (a *API) leave(w http.ResponseWriter, r *http.Request) error {
	event, user, err := a.known(r)
	if err != nil {
		return err
	}
	byForm := r.Method == http.MethodPost && r.URL.Query().Has("page")
	if user != "" {
		if err := a.room.Leave(r.Context(), event, user); err != nil && byForm {
			return a.showProblem(w, r, a.page.view(r, event), err)
		} else if err != nil {
			return err
		}
	}
	http.SetCookie(w, a.identity.forget(event))
	if byForm {
		http.Redirect(w, r, a.page.path(event, "left", r.URL.Query().Get("lang")), http.StatusSeeOther)
		return nil
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) token(w http.ResponseWriter, r *http.Request) error {
	event, user, err := a.known(r)
	if err != nil {
		return err
	}
	if user == "" {
		return ErrNoTicket
	}
	t, _, err := a.room.Token(r.Context(), event, user)
	if err != nil {
		return err
	}
	t.ExpiresAt = t.ExpiresAt.UTC()
	http.SetCookie(w, a.identity.entryCookie(event, t))
	web.WriteJSON(w, http.StatusOK, "application/json", t)
	return nil
}
