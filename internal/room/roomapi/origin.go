package roomapi

import (
	"net/http"
	"strings"

	"github.com/bulkaction/bulkaction/api"
)

var (
	errCrossSite = newProblem(api.CrossSite, "cross_site",
		"a page of another site can't enter or leave for its visitors: open the waiting page")
	errPrefetch = newProblem(api.CrossSite, "cross_site", "a prefetch does not enter")
)

// checkChange refuses requests with a method other than GET and HEAD that a page of another origin
// makes (CSRF).
func (a *API) checkChange(r *http.Request) error {
	if a.csrf.Check(r) != nil {
		return errCrossSite
	}
	return nil
}

// checkEntry refuses requests that must not enter their user: a POST or DELETE from another origin,
// a HEAD, and a GET that another site causes, for example by a link or an image, or that only
// prefetches a page.
func (a *API) checkEntry(r *http.Request) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return a.checkChange(r)
	}
	if r.Method == http.MethodHead || isPrefetch(r.Header) {
		return errPrefetch
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "same-origin", "same-site", "none":
		return nil
	case "": // an old browser, or no browser
		if origin := r.Header.Get("Origin"); origin == "" || origin == a.origin {
			return nil
		}
	}
	return errCrossSite
}

// isPrefetch reports whether the browser loads a page in advance: its user may never look at it.
func isPrefetch(h http.Header) bool {
	for _, name := range []string{"Sec-Purpose", "Purpose", "X-Purpose", "X-Moz"} {
		v := strings.ToLower(h.Get(name))
		if strings.Contains(v, "prefetch") || strings.Contains(v, "prerender") || strings.Contains(v, "preview") {
			return true
		}
	}
	return false
}
