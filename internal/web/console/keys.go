package console

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	keysOnPage = 50
	maxDays    = 3650 // longest lifetime of a key that the form can create, in days
	maxFormID  = 64   // most bytes of the id of a copy of the form, see keysData.FormID
)

// keysPage serves the page of API keys: it lists keys without their secrets, creates keys and
// revokes them.
type keysPage struct{ *Console }

// keysData is the data of the page of API keys.
type keysData struct {
	Off      bool // the console asks for no keys
	Keys     []keyRow
	Unusable []string // what is wrong with records that can't be used
	Roles    []auth.Role
	MaxDays  int
	Next     string // path of the next page
	First    bool   // this is the first page
}

// FormID returns a new random id for each rendering of the form. A form that is sent twice creates
// one key, and two copies of the form create two, even if an outage shows the same data in both.
func (keysData) FormID() string { return rand.Text() }

type keyRow struct {
	api.Key
	State string // valid, expired or replaced
	Own   bool   // the reader has logged in with it
}

func (c keysPage) list(r *http.Request) (view, error) {
	v := view{name: "keys", title: "Keys", data: keysData{Off: true}}
	if c.KeyStore == nil {
		return v, nil
	}
	cursor, err := cursorOf(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	all, unusable, err := c.KeyStore.List(r.Context())
	if err != nil {
		return view{}, err
	}
	l, err := httpapi.KeyPage(all, cursor, keysOnPage)
	if err != nil {
		return view{}, err
	}
	d := keysData{
		Roles: auth.Roles, MaxDays: maxDays, Next: nextPage(root+"/keys", nil, l.Cursor), First: cursor == "",
	}
	who, _ := auth.From(r.Context())
	for _, k := range l.Keys {
		row := keyRow{Key: k, State: "valid", Own: k.ID == who.KeyID}
		switch {
		case k.ExpiresAt != nil && !time.Now().Before(*k.ExpiresAt):
			row.State = "expired"
		case k.ReplacedBy != "":
			row.State = "replaced"
		}
		d.Keys = append(d.Keys, row)
	}
	for _, err := range unusable {
		d.Unusable = append(d.Unusable, err.Error())
	}
	v.data = d
	return v, nil
}

var errKeysOff = fmt.Errorf("the console asks for no keys (BULKACTION_AUTH=off), so it does not manage them: %w",
	api.ErrConflict)

// create creates the API key that the form describes, and returns the page with its secret. No
// later page shows the secret.
func (c keysPage) create(ctx context.Context, r *http.Request) (view, error) {
	if c.KeyStore == nil {
		return view{}, errKeysOff
	}
	field := func(name string) string { return strings.TrimSpace(r.PostForm.Get(name)) }
	form := field("form_id")
	if form == "" || len(form) > maxFormID {
		return view{}, invalid("The form", "is incomplete: load the page of keys again")
	}
	asked := api.KeyRequest{Role: field("role"), Tenant: field("tenant"), Name: field("name")}
	switch text := field("payloads"); text {
	case "":
	case "true", "false":
		yes := text == "true"
		asked.Payloads = &yes
	default:
		return view{}, invalid("payloads", "must be true or false, or empty for the default of the role")
	}
	if text := field("days"); text != "" {
		days, err := strconv.Atoi(text)
		if err != nil || days < 1 || days > maxDays {
			return view{}, invalid("days", "must be 1 to %d, or empty for a key that does not expire", maxDays)
		}
		asked.ExpiresInSeconds = int64((time.Duration(days) * 24 * time.Hour).Seconds())
	}
	request, err := httpapi.KeyRequestOf(asked)
	if err != nil {
		return view{}, err
	}
	first, err := c.Sessions.FirstUse(ctx, form)
	switch {
	case errors.Is(err, session.ErrUnavailable):
		return view{}, fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	case err != nil:
		return view{}, err
	case !first:
		return view{}, fmt.Errorf("this form was sent before. If it has created a key, the list of keys has that key, "+
			"and its secret is not shown again. To create another key, load the page of keys again: %w", api.ErrConflict)
	}
	who, _ := auth.From(ctx)
	request.CreatedBy = who.KeyID
	created, err := c.KeyStore.Create(ctx, request)
	return view{name: "newkey", title: "New key", data: created}, err
}

func (c keysPage) revoke(ctx context.Context, r *http.Request) (string, error) {
	if c.KeyStore == nil {
		return "", errKeysOff
	}
	id, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	return root + "/keys?done=key-revoked", c.KeyStore.Revoke(ctx, id)
}
