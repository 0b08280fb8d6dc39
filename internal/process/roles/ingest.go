package roles

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ingest"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/web/gateway"
	"github.com/bulkaction/bulkaction/reducer"
)

// Ingest returns the role that accepts submissions over HTTP and from the ingest stream. It needs
// the reducers written in Go to check the aggregates that a group asks for. The role calls
// listening, unless it is nil, with the API's address before it accepts submissions.
func Ingest(reducers *reducer.Registry, listening func(addr string)) Role {
	return serveAPI(reducers, listening, true)
}

// Console returns the role of a process that serves the API, the web console or both, as API_SERVE
// says, and leaves the ingest streams to other processes. listening is used as by [Ingest].
func Console(listening func(addr string)) Role {
	return serveAPI(reducer.NewRegistry(), listening, false)
}

func serveAPI(reducers *reducer.Registry, listening func(addr string), consume bool) Role {
	return func(ctx context.Context, p *app.Process, b Base) error {
		batched, ok := b.Conn.Cmd.(interface {
			AutoPipelineWithOptions(*redis.AutoPipelineOptions) (*redis.AutoPipeliner, error)
		})
		var appender redis.Cmdable
		if ok {
			opt := redis.DefaultBlockingAutoPipelineOptions()
			pipe, err := batched.AutoPipelineWithOptions(opt)
			if err != nil {
				return fmt.Errorf("gather appends: %w", err)
			}
			defer func() { _ = pipe.Close() }()
			appender = pipe
		}
		ops := map[string]bool{}
		for _, op := range reducers.Ops() {
			ops[op] = true
		}
		rooms, stop, err := roomAdmin(ctx, p, b)
		if err != nil {
			return err
		}
		defer stop()
		keys, keyStore, sessions, err := apiKeys(p, b)
		if err != nil {
			return err
		}
		told, err := callbacksOf(p.Config.Callback)
		if err != nil {
			return err
		}
		c := p.Config.Ingest
		addrSetting := ""
		if p.Embedded {
			addrSetting = "API_ADDR in Settings"
		}
		var tlsConfig *tls.Config
		if c.TLSCertFile != "" {
			files := app.TLSFiles{CertFile: c.TLSCertFile, KeyFile: c.TLSKeyFile, ClientCAFile: c.TLSClientCAFile}
			if tlsConfig, err = app.ServerTLS(files, p.Tel.Log); err != nil {
				return err
			}
		}
		groups, decoder := store(p, b, reducers, appender, told), messages.Decoder{Ops: ops}
		g, err := gateway.New(ctx, b.of(p), gateway.Config{
			Addr:           c.APIAddr,
			AddrSetting:    addrSetting,
			Listen:         HooksOf(ctx).Listen,
			TLS:            tlsConfig,
			MaxConnections: c.MaxConnections,
			DrainDelay:     c.DrainDelay,
			Grace:          p.Config.Worker.ShutdownGracePeriod,
			Store:          groups,
			Decoder:        decoder,
			Guards:         b.Guards,
			Rooms:          rooms,
			Keys:           keys,
			KeyStore:       keyStore,
			KeyRPS:         p.Config.Auth.KeyRPS,
			Proxies:        p.Config.Auth.Proxies(),
			KeepActivity:   p.Config.Retention.Activity,
			NoAPI:          !slices.Contains(c.Serve, "api"),
			UI:             slices.Contains(c.Serve, "ui"),
			Sessions:       sessions,
			Secure:         p.Config.SecureUI(),
			Prefix:         c.ConsolePrefix,
			TraceURL:       c.TraceURLTemplate,
		})
		if err != nil {
			return err
		}
		b.listening()
		if listening != nil {
			if err := p.Guard("Listening", func() error { listening(g.Addr()); return nil }); err != nil {
				return err
			}
		}
		if !consume {
			return g.Run(ctx)
		}
		streams := ingest.Config{
			Lease:   p.Config.Worker.Lease,
			Grace:   p.Config.Worker.ShutdownGracePeriod,
			Gateway: g.Run,
		}
		for _, s := range c.IngestStreams() {
			streams.Streams = append(streams.Streams, ingest.Stream{Name: s.Name, Tenant: s.Tenant})
		}
		return ingest.New(b.of(p), streams, groups, decoder).Run(ctx)
	}
}
