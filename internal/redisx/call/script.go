package call

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// Script is a Lua script. Redis caches scripts and runs them by their hash.
type Script struct {
	name string
	src  string
	sha  string
}

// NewScript returns the script with the source src. Errors and spans show its name.
func NewScript(name, src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{name: name, src: src, sha: hex.EncodeToString(sum[:])}
}

// Name returns the name that NewScript got: for a script of package lua, its file name without
// folder and ending.
func (s *Script) Name() string { return s.name }

// SHA returns the hash by which Redis knows the script.
func (s *Script) SHA() string { return s.sha }

// Run executes the script with keys, which choose the hash slot, and args. Redis loses its script
// cache on restart and failover: Run sends the full text of a script that Redis does not know. It
// retries nothing else, because only the caller knows what a lost reply means. A nil reply is no
// error: Run returns nil for it. If ctx has a recording span, Run adds a child span.
func (s *Script) Run(ctx context.Context, c redis.Cmdable, keys []string, args []any) (any, error) {
	parent := trace.SpanFromContext(ctx)
	if parent.IsRecording() {
		var span trace.Span
		ctx, span = parent.TracerProvider().Tracer("redisx").Start(ctx, "redis "+s.name,
			trace.WithSpanKind(trace.SpanKindClient))
		defer span.End()
		reply, err := s.run(ctx, c, keys, args)
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		return reply, err
	}
	return s.run(ctx, c, keys, args)
}

func (s *Script) run(ctx context.Context, c redis.Cmdable, keys []string, args []any) (any, error) {
	reply, err := c.EvalSha(ctx, s.sha, keys, args...).Result()
	if err != nil && IsNoScript(err) {
		reply, err = c.Eval(ctx, s.src, keys, args...).Result()
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("script %s: %w", s.name, err)
	}
	return reply, nil
}
