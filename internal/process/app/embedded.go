package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Host is what a surrounding program gives to a process (role) that runs inside it.
type Host struct {
	Role     string
	Settings map[string]string // values of variables, by their names without BULKACTION_
	Log      *slog.Logger
	Tracers  trace.TracerProvider // nil: no traces
	Meters   metric.MeterProvider // nil: the admin server alone shows metrics
}

// RunEmbedded runs a role inside another program until run returns. It reads no environment and no
// arguments, handles no signals, and has an admin server only if Settings names ADMIN_ADDR. Wrong
// settings are an ErrConfig.
func RunEmbedded(ctx context.Context, h Host, run func(context.Context, *Process) error) error {
	cfg, err := LoadSettings(h.Settings)
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	p := newProcess(cfg, h.Role, fail)
	p.Embedded = true
	p.Tel, err = telemetry.Given(h.Log.With("instance", p.Instance), h.Tracers, h.Meters)
	if err != nil {
		return err
	}
	p.OnStop("telemetry", p.Tel.Shutdown)
	p.hasAdmin = h.Settings["ADMIN_ADDR"] != ""
	return errors.Join(p.run(ctx, run), p.stop(stopTimeout))
}

// LoadSettings returns the configuration of a process that runs inside another program. settings
// are values of variables, by their names without BULKACTION_. Wrong and unknown settings are an
// ErrConfig.
func LoadSettings(settings map[string]string) (Config, error) {
	environ := make([]string, 0, len(settings))
	for name, value := range settings {
		environ = append(environ, envPrefix+name+"="+value)
	}
	slices.Sort(environ) // so that errors have an order
	cfg, unknown, err := Load(environ)
	for _, u := range unknown {
		problem := fmt.Errorf("%s: there is no such setting", u.Name)
		if name := strings.TrimPrefix(u.Name, envPrefix); strings.HasPrefix(name, envPrefix) {
			problem = fmt.Errorf("%s: leave out %s in the names of settings", name, envPrefix)
		} else if u.DidYouMean != "" {
			problem = fmt.Errorf("%w; did you mean %s?", problem, u.DidYouMean)
		}
		err = errors.Join(err, problem)
	}
	if err != nil {
		return Config{}, fmt.Errorf("%w:\n%w", ErrConfig, err)
	}
	return cfg, nil
}
