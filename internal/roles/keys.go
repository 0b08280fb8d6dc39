package roles

import (
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/auth/apikey"
)

// apiKeys returns what checks the API keys of requests, nil if the API asks for none.
func apiKeys(p *app.Process, b Base) (*apikey.Authenticator, error) {
	c := p.Config
	if c.OpenToAll() {
		p.Tel.Log.Warn("THE API ASKS FOR NO KEYS: everyone who reaches it may submit, read and change everything; "+
			"set BULKACTION_AUTH=keys, see docs/security.md", "addr", c.Ingest.APIAddr)
	}
	if c.AuthMode() == app.AuthOff {
		return nil, nil //nolint:nilnil // nil is what the caller passes on
	}
	hasher, err := auth.ReadHasher(c.Auth.PepperFile)
	if err != nil {
		return nil, fmt.Errorf("%w: BULKACTION_AUTH_PEPPER_FILE: %w", app.ErrConfig, err)
	}
	var file *apikey.File
	if c.Auth.KeysFile != "" {
		if file, err = apikey.OpenFile(c.Auth.KeysFile); err != nil {
			return nil, fmt.Errorf("%w: BULKACTION_AUTH_KEYS_FILE: %w", app.ErrConfig, err)
		}
	}
	return apikey.New(apikey.Options{
		Store: apikey.NewStore(b.Conn.Cmd, b.Space, hasher, time.Now), File: file, Log: p.Tel.Log, Now: time.Now,
	}), nil
}
