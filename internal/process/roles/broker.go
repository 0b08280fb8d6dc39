package roles

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/room/broker"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/seats"
	"github.com/bulkaction/bulkaction/internal/room/settings"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Broker returns the role that runs the waiting room. The role calls listening, unless it is nil,
// with the public URL as soon as its server answers requests.
func Broker(listening func(publicURL string)) BasedRole {
	return func(ctx context.Context, p *app.Process, b Base) error {
		c := p.Config.Broker
		if c.TokenKeysFile == "" {
			return fmt.Errorf("%w: BULKACTION_BROKER_TOKEN_KEYS_FILE is required: a file with an Ed25519 key, "+
				"such as `openssl genpkey -algorithm ed25519` makes", app.ErrConfig)
		}
		keys, err := entrytoken.Read(c.TokenKeysFile, p.Tel.Log)
		if err != nil {
			return tokenKeysError(c.TokenKeysFile, err)
		}
		server, err := p.Listen(ctx, "broker", c.Addr, app.ServeOptions{
			TLS: app.TLSFiles{CertFile: c.TLSCertFile, KeyFile: c.TLSKeyFile}, MaxHeaderBytes: roomapi.MaxHeaderBytes,
			KeepAlive: net.KeepAliveConfig{
				Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3,
			},
		})
		if err != nil {
			return fmt.Errorf("%w: set BULKACTION_BROKER_ADDR to another address", err)
		}
		publicURL := c.PublicURLOf(server.Addr())
		var capacity int64 // of an event that is created because the seat service knows it
		cfg := broker.Config{
			PublicURL: publicURL, Audience: c.TokenAudience, PromoteInterval: c.PromoteInterval,
			PositionInterval: c.PositionInterval, Drain: c.Drain,
			Defaults: RoomRules(c).Fill(api.EventSettings{Capacity: &capacity}),
		}
		if c.SeatsURL != "" {
			service, err := seats.New(c.SeatsURL, c.SeatsTimeout)
			if err != nil {
				return fmt.Errorf("%w: BULKACTION_BROKER_SEATS_URL: %w", app.ErrConfig, err)
			}
			cfg.Seats = service.Seats
		}
		role, err := broker.New(b.of(p), cfg, keys)
		if err != nil {
			return err
		}
		// A broker that stops is not ready, so that load balancers send no new visitors.
		defer context.AfterFunc(ctx, p.Ready.SetDraining)()
		options := roomapi.Options{
			Room: role, Log: p.Tel.Log, PublicURL: publicURL, CookieKeys: keys.CookieKeys,
			TrustedProxies: c.Proxies(), Heartbeat: c.Heartbeat, WriteTimeout: c.WriteTimeout,
			MaxConnections: c.MaxConnections, MaxConnectionsPerIP: c.MaxConnectionsPerIP,
			EnterRatePerIP: c.EnterRatePerIP,
			Metrics: roomapi.Metrics{
				SlowReader: func(event string) { role.Metrics().Count(telemetry.RoomSlowReaders, event, 1) },
				Refused:    role.Metrics().Refused,
			},
		}
		if c.Identity == "header" {
			options.IdentityHeader = c.IdentityHeader
		}
		server.Serve(roomapi.New(options))
		b.listening()
		if listening != nil {
			listening(publicURL)
		}
		return role.Run(ctx)
	}
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
func RoomRules(c app.BrokerConfig) settings.Rules {
	return settings.Rules{
		Defaults: waitingroom.Settings{
			MaxWaiting: int64(c.MaxWaiting), TokenTTL: c.TokenTTL, Leeway: c.TokenLeeway, MaxSession: c.MaxSession,
			Ready: c.Ready, Grace: c.Grace, OnClose: c.OnClose, NoShow: c.NoShow, Retention: c.Retention,
		},
		ReturnHosts: c.ReturnHosts,
	}
}

// blockingReadsOfBroker is how many blocking reads of Redis a broker does at once: three in each
// partition (of wake tokens, and of the Redis streams "entry" and "moves"), and one of its dispatch
// messages.
func blockingReadsOfBroker(partitions int) int { return 3*partitions + 1 }
