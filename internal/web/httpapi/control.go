package httpapi

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

// pauseTenantOrType returns the handler that pauses or resumes a tenant or a type. root is the path
// of the collection; param is the path parameter with the id.
func (s *server) pauseTenantOrType(
	root, param string, paused bool, do func(context.Context, string) error,
) web.Handler {
	return commandOn(s, param, nil, func(ctx context.Context, id string, _ struct{}) (any, error) {
		links := map[string]string{"pause": root + id + "/pause", "resume": root + id + "/resume"}
		return api.Paused{ID: id, Paused: paused, Links: links}, do(ctx, id)
	})
}

func readWorkers(f *fields) *int64 { return f.upTo("workers", api.MaxWorkers) }

func resizeWorker(b Backend) func(context.Context, string, *int64) (any, error) {
	return func(ctx context.Context, id string, n *int64) (any, error) {
		if n == nil {
			return nil, invalidField("workers", "required")
		}
		return api.PoolSize{ID: id, Workers: int(*n)}, b.ResizeWorker(ctx, id, int(*n))
	}
}

// maxBusiest is how many of the busiest tenants an answer has if the request has no limit. No more
// of them are known in a partition.
const maxBusiest = 100

func (s *server) listTenants(r *http.Request) (l api.TenantList, err error) {
	cursor, limit, err := pageParams(r)
	if err != nil {
		return l, err
	}
	all, err := boolParam(r, "groups")
	if err != nil {
		return l, err
	}
	switch q := r.URL.Query(); q.Get("sort") {
	case "":
		l, err = s.Backend.Tenants(r.Context(), cursor, limit, all)
	case "backlog":
		for _, other := range []string{"cursor", "groups"} {
			if q.Has(other) {
				return l, invalidField(other, "can't be used with sort=backlog, which has one page of active tenants")
			}
		}
		if !q.Has("limit") {
			limit = maxBusiest
		}
		l, err = s.Backend.BusiestTenants(r.Context(), limit)
	default:
		return l, invalidField("sort", "must be backlog, or absent")
	}
	l.Tenants = orEmpty(l.Tenants)
	return l, err
}

const (
	guardProblem = "must be NAME or KIND/NAME, with the slash escaped as %2F, where KIND is pool, breaker, lock, " +
		"semaphore, limiter or key (key/NAME/KEY), and the others match ^[A-Za-z0-9._-]{1,128}$"
	kindProblem = "must be pool, breaker, lock, semaphore, limiter or key"
)

// guardName parses the name of the guard in the path, and returns it as KIND/NAME.
func guardName(r *http.Request) (string, error) {
	kind, rest, ok := guard.ParseName(r.PathValue("name"))
	if !ok {
		return "", badName("name", guardProblem)
	}
	return kind + "/" + rest, nil
}

// badName returns the problem for a path in which the parameter field is no valid name.
func badName(field, problem string) error {
	return web.NewProblem(api.BadParameter, field+": "+problem, api.FieldError{Field: field, Problem: problem})
}

func listGuards(b Backend) func(*http.Request) (api.GuardList, error) {
	return func(r *http.Request) (l api.GuardList, err error) {
		q := guard.Query{Kind: r.URL.Query().Get("kind")}
		if q.Cursor, q.Limit, err = pageParams(r); err != nil {
			return l, err
		}
		if q.Kind != "" && !slices.Contains(guard.Kinds, q.Kind) {
			return l, invalidField("kind", kindProblem)
		}
		l, err = b.Guards(r.Context(), q)
		l.Guards = orEmpty(l.Guards)
		for i := range l.Guards {
			l.Guards[i].Counters = orEmptyMap(l.Guards[i].Counters)
		}
		return l, err
	}
}

func getGuard(b Backend) func(*http.Request) (api.Guard, error) {
	return func(r *http.Request) (v api.Guard, err error) {
		name, err := guardName(r)
		if err != nil {
			return v, err
		}
		keys, err := boolParam(r, "keys")
		if err == nil && keys && !strings.HasPrefix(name, "limiter/") {
			err = invalidField("keys", "only a limiter has keys")
		}
		if err != nil {
			return v, err
		}
		if v, err = b.Guard(r.Context(), name); err == nil && keys {
			v.Keys, v.MoreKeys, err = b.GuardKeys(r.Context(), name)
		}
		v.Members, v.Counters = orEmpty(v.Members), orEmptyMap(v.Counters)
		return v, err
	}
}

// controlGuard returns the handler of an operator's action on a member of a guard. The action runs
// to its end even if the client disconnects.
func controlGuard(s *server, do guard.Action) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		name, err := guardName(r)
		if err != nil {
			return err
		}
		member := r.PathValue("id")
		if !api.ValidID(member) {
			return badName("id", idProblem)
		}
		if err := noFields(s, r); err != nil {
			return err
		}
		err = s.write(r.Context(), func(ctx context.Context) error {
			return s.Backend.ControlGuard(ctx, name, member, do)
		})
		if err != nil {
			return err
		}
		accept(w, api.GuardAction{Guard: name, Member: member, Action: string(do)})
		return nil
	}
}

// KeyStore is the store of the API keys that admins manage. *apikey.Store implements it.
type KeyStore interface {
	// List returns all keys, the oldest first. unusable has an error for each record that can't be
	// read as a key.
	List(ctx context.Context) (keys []apikey.Record, unusable []error, err error)
	// Create stores a new key.
	Create(ctx context.Context, r apikey.Request) (apikey.NewKey, error)
	// Revoke deletes a key. If there is no key with this id, it returns apikey.ErrNoKey.
	Revoke(ctx context.Context, id string) error
}

// recordedKeys is a KeyStore that writes each change to the activity log before it carries it out.
type recordedKeys struct {
	KeyStore
	log Activity
}

func (k recordedKeys) Create(ctx context.Context, r apikey.Request) (apikey.NewKey, error) {
	return recordedCall(ctx, k.log, entry("key.create", cmp.Or(r.Name, string(r.Role)), nil, r.Asked()),
		func(ctx context.Context) (apikey.NewKey, error) { return k.KeyStore.Create(ctx, r) })
}

func (k recordedKeys) Revoke(ctx context.Context, id string) error {
	return k.log.Do(ctx, entry("key.revoke", id, nil, nil),
		func(ctx context.Context) error { return k.KeyStore.Revoke(ctx, id) })
}

type keyCalls struct{ *server }

func (s keyCalls) routes() []route {
	const keys = "/v1/keys"
	return []route{
		{method: http.MethodGet, path: keys, scope: auth.System, object: noTenant, serve: show(s.list),
			query: []string{"cursor", "limit"}},
		{method: http.MethodPost, path: keys, scope: auth.System, object: noTenant, serve: s.create},
		{method: http.MethodDelete, path: keys + "/{id}", scope: auth.System, object: noTenant,
			serve: showByID(s.revoke)},
	}
}

var errNoKeys = web.NewProblem(api.Conflict,
	"this API asks for no keys (BULKACTION_AUTH=off), so it does not manage them; `bulkaction key` does, in Redis")

// list answers with a page of the keys in Redis.
func (s keyCalls) list(r *http.Request) (api.KeyList, error) {
	list := api.KeyList{Keys: []api.Key{}}
	if s.KeyStore == nil {
		return list, errNoKeys
	}
	cursor, limit, err := pageParams(r)
	if err != nil {
		return list, err
	}
	all, _, err := s.KeyStore.List(r.Context())
	if err != nil {
		return list, err
	}
	return KeyPage(all, cursor, limit)
}

// KeyPage returns a page of `all`, the keys that KeyStore.List has returned, and may change the
// elements of `all`. The cursor is TIME,ID of the last key on the previous page.
func KeyPage(all []apikey.Record, cursor string, limit int) (api.KeyList, error) {
	list := api.KeyList{Keys: []api.Key{}}
	after, id, ok := strings.Cut(cursor, ",")
	from, err := time.Parse(time.RFC3339Nano, after)
	if cursor != "" && (!ok || err != nil) {
		return list, invalidField("cursor", "must be the cursor of an earlier page")
	}
	if cursor != "" {
		all = slices.DeleteFunc(all, func(k apikey.Record) bool {
			return cmp.Or(k.CreatedAt.Compare(from), strings.Compare(k.ID, id)) <= 0
		})
	}
	if len(all) > limit {
		all = all[:limit]
		last := all[limit-1]
		list.Cursor = last.CreatedAt.Format(time.RFC3339Nano) + "," + last.ID
	}
	for _, k := range all {
		list.Keys = append(list.Keys, keyView(k))
	}
	return list, nil
}

func keyView(k apikey.Record) api.Key {
	v := api.Key{
		ID: k.ID, Role: string(k.Role), Tenant: k.Tenant, Payloads: k.Payloads, Name: k.Name, CreatedAt: k.CreatedAt,
		CreatedBy: k.CreatedBy, LastUsedDay: k.LastUsedDay, ReplacedBy: k.ReplacedBy,
	}
	if !k.ExpiresAt.IsZero() {
		v.ExpiresAt = &k.ExpiresAt
	}
	return v
}

// create serves POST /v1/keys. Only this answer has the secret of the new key.
func (s keyCalls) create(w http.ResponseWriter, r *http.Request) error {
	if s.KeyStore == nil {
		return errNoKeys
	}
	f, err := readFields(s.server, r)
	if err != nil {
		return err
	}
	asked := api.KeyRequest{
		Role: f.text("role"), Tenant: f.text("tenant"), Payloads: f.optionalBoolean("payloads"), Name: f.text("name"),
	}
	if n := f.count("expires_in_seconds"); n != nil {
		asked.ExpiresInSeconds = *n
	}
	if err := f.err(); err != nil {
		return err
	}
	request, err := KeyRequestOf(asked)
	if err != nil {
		return err
	}
	if p, ok := auth.From(r.Context()); ok {
		request.CreatedBy = p.KeyID
	}
	var created apikey.NewKey
	err = s.write(r.Context(), func(ctx context.Context) (err error) {
		created, err = s.KeyStore.Create(ctx, request)
		return err
	})
	if err != nil {
		return err
	}
	web.WriteJSON(w, http.StatusCreated, jsonType, api.NewKey{Secret: created.Token, Key: keyView(created.Record)})
	return nil
}

// maxKeySeconds is larger than every allowed lifetime of a key. It keeps a lifetime in nanoseconds
// from overflowing before the exact check.
const maxKeySeconds = 1 << 31

// KeyRequestOf checks the fields of a new key by the rules of POST /v1/keys, and returns them as
// the request to the key store.
func KeyRequestOf(asked api.KeyRequest) (apikey.Request, error) {
	if s := asked.ExpiresInSeconds; s < 0 || s > maxKeySeconds {
		return apikey.Request{}, invalidField("expires_in_seconds", "must be from 60 to 315360000, or 0 for never")
	}
	request := apikey.Request{
		Role: auth.Role(asked.Role), Tenant: asked.Tenant, Payloads: asked.Payloads, Name: asked.Name,
		Lifetime: time.Duration(asked.ExpiresInSeconds) * time.Second,
	}
	if err := request.Check(); err != nil {
		// The text of Check begins with the name of the field.
		field, _, _ := strings.Cut(err.Error(), " ")
		field = strings.TrimSuffix(field, ":")
		if field == "expires" {
			field = "expires_in_seconds"
		}
		bad := api.FieldError{Field: field, Problem: err.Error()}
		return apikey.Request{}, web.NewProblem(api.Invalid, err.Error(), bad)
	}
	return request, nil
}

func (s keyCalls) revoke(ctx context.Context, id string) (api.KeyRevoked, error) {
	if s.KeyStore == nil {
		return api.KeyRevoked{}, errNoKeys
	}
	err := s.write(ctx, func(ctx context.Context) error { return s.KeyStore.Revoke(ctx, id) })
	return api.KeyRevoked{ID: id, Revoked: true}, err
}
