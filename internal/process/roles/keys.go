package roles

import (
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/process/app"
)

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
