package roles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// reducers returns the registry of the program's reducers, which has at least the built-in ones.
func (o Own) reducers() *reducer.Registry {
	if o.Reducers == nil {
		return reducer.NewRegistry()
	}
	return o.Reducers
}

func meter(c app.Config) ledger.Meter {
	return ledger.Meter{Limiter: c.Backpressure.Limiter, Window: c.Backpressure.RateLimitWindow}
}

// configured returns the global limits of the environment that can be changed while processes run.
func configured(c app.Config) api.ConfiguredLimits {
	b := c.Backpressure
	return api.ConfiguredLimits{
		RPS: int64(b.GlobalRPS), Share: b.Share,
		DefaultBackoff: b.DefaultBackoff.String(), MaxBackoff: b.MaxBackoff.String(),
	}
}

// callbacksOf returns how callbacks are signed, and their rules.
func callbacksOf(c app.CallbackConfig) (groups.Callbacks, error) {
	all := groups.Callbacks{Policy: c.Policy()}
	if c.MasterKeyFile == "" {
		return all, nil
	}
	var err error
	if all.Keys, err = webhook.ReadKeys(c.MasterKeyFile); err != nil {
		err = fmt.Errorf("%w: BULKACTION_CALLBACK_MASTER_KEY_FILE: %w", app.ErrConfig, err)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; make it with: bulkaction callback new-key %s", err, c.MasterKeyFile)
		}
	}
	return all, err
}

func store(
	p *app.Process, b Base, reducers *reducer.Registry, appender redis.Cmdable, callbacks groups.Callbacks,
) *groups.Store {
	c := p.Config
	return groups.New(groups.Config{
		MaxBacklog:          int64(c.Ingest.MaxBacklog),
		MaxMemoryRatio:      c.Ingest.MaxMemoryRatio,
		KeepIdempotencyKeys: c.Retention.IdempotencyKeys,
		Meter:               meter(c),
		Configured:          configured(c),
		RequireTenant:       c.Ingest.RequireTenant,
		FairPolicy:          c.FairQueue.Policy == "fair",
		Callbacks:           callbacks,
		WaitReplicas:        c.Redis.WaitReplicas,
		WaitTimeout:         c.Redis.CommandTimeout / 2, // so that the answer arrives before the timeout
	}, b.Conn, b.Space, p.Tel, reducers, appender)
}

// handlePool lets the admin server show a worker's slots (GET /pool) and change their number (PUT
// /pool).
func handlePool(p *app.Process, w *worker.Worker) {
	p.HandleAdmin("GET /pool", http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		writeJSON(rw, w.Status())
	}))
	p.HandleAdmin("PUT /pool", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked := api.PoolSize{Workers: -1}
		err := json.NewDecoder(http.MaxBytesReader(rw, r.Body, 1<<10)).Decode(&asked)
		if err == nil {
			err = w.Resize(asked.Workers)
		}
		if err != nil {
			http.Error(rw, `{"workers": n} is expected: `+err.Error(), http.StatusUnprocessableEntity)
			return
		}
		writeJSON(rw, w.Status())
	}))
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // fails only if the client has closed the connection
}

// tokenKeysError returns the error for a file of token keys that can't be read.
func tokenKeysError(path string, err error) error {
	err = fmt.Errorf("%w: BULKACTION_BROKER_TOKEN_KEYS_FILE: %w", app.ErrConfig, err)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; make it with: bulkaction room new-key %s", err, path)
	}
	return err
}

// RoomRules returns the rules for the settings of events.
func RoomRules(c app.BrokerConfig) roomadmin.Rules {
	return roomadmin.Rules{
		Defaults: waitingroom.Settings{
			MaxWaiting: int64(c.MaxWaiting), TokenTTL: c.TokenTTL, Leeway: c.TokenLeeway, MaxSession: c.MaxSession,
			Ready: c.Ready, Grace: c.Grace, OnClose: c.OnClose, NoShow: c.NoShow, Retention: c.Retention,
		},
		ReturnHosts: c.ReturnHosts,
	}
}

// apiKeys returns the authenticator of requests, the store of the API keys in Redis, and the store
// of the console's sessions; all nil if the API asks for no keys.
func apiKeys(p *app.Process, b Base) (*apikey.Authenticator, *apikey.Store, *session.Store, error) {
	c := p.Config
	if c.OpenToAll() {
		p.Tel.Log.Warn("THE API ASKS FOR NO KEYS: everyone who reaches it may submit, read and change everything; "+
			"set BULKACTION_AUTH=keys, see docs/security.md", "addr", c.Ingest.APIAddr)
	}
	if c.AuthMode() == app.AuthOff {
		return nil, nil, nil, nil
	}
	hasher, err := auth.ReadHasher(c.Auth.PepperFile)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("%w: BULKACTION_AUTH_PEPPER_FILE: %w", app.ErrConfig, err)
	}
	var file *apikey.File
	if c.Auth.KeysFile != "" {
		if file, err = apikey.OpenFile(c.Auth.KeysFile); err != nil {
			return nil, nil, nil, fmt.Errorf("%w: BULKACTION_AUTH_KEYS_FILE: %w", app.ErrConfig, err)
		}
	}
	store := apikey.NewStore(b.Conn.Cmd, b.Space, hasher, time.Now)
	keys := apikey.New(apikey.Options{Store: store, File: file, Log: p.Tel.Log, Now: time.Now})
	return keys, store, session.New(b.Conn.Cmd, b.Space, hasher, time.Now), nil
}

// roomAdmin returns the implementation of the API's calls on the waiting room. The caller must call
// stop when no call is served any more. Without a file of token keys, calls on entry tokens are
// refused, and all others work.
func roomAdmin(ctx context.Context, p *app.Process, b Base) (admin *roomadmin.Admin, stop func(), err error) {
	c, m := p.Config.Broker, telemetry.NewRoomMetrics(p.Tel.Meter)
	cfg := roomadmin.Config{
		Rooms:     waitingroom.New(b.Conn, b.Space, m.Script),
		Space:     b.Space,
		Rules:     RoomRules(c),
		PublicURL: c.PublicURL,
		Log:       p.Tel.Log,
		Ended:     m.Count,
	}
	if _, err := netip.ParseAddrPort(c.Addr); err == nil && c.PublicURL == "" {
		cfg.PublicURL = "http://" + c.Addr // as brokers with the same variables have it
	}
	if c.SeatsURL != "" {
		if cfg.Seats, err = roomadmin.NewSeatService(c.SeatsURL, c.SeatsTimeout); err != nil {
			return nil, nil, fmt.Errorf("%w: BULKACTION_BROKER_SEATS_URL: %w", app.ErrConfig, err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	if c.TokenKeysFile != "" {
		if cfg.Tokens, err = entrytoken.Read(c.TokenKeysFile, p.Tel.Log); err != nil {
			cancel()
			return nil, nil, tokenKeysError(c.TokenKeysFile, err)
		}
		watching.Go(func() { cfg.Tokens.Watch(ctx) })
	}
	return roomadmin.New(cfg), func() {
		cancel()
		watching.Wait()
		if cfg.Seats != nil {
			cfg.Seats.Close()
		}
	}, nil
}
