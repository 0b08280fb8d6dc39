package call

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"

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

// NewScript returns the script with the source src. Errors and spans show its name. Call it only to
// initialize package variables: it also registers the script for [Named], for ever.
func NewScript(name, src string) *Script {
	sum := sha1.Sum([]byte(src))
	s := &Script{name: name, src: src, sha: hex.EncodeToString(sum[:])}
	known.Lock()
	defer known.Unlock()
	known.byName[name] = append(known.byName[name], s)
	return s
}

// known registers all scripts of the program by name. Package acl reads from their sources which
// commands they call.
var known = struct {
	sync.Mutex
	byName map[string][]*Script
}{byName: map[string][]*Script{}}

// Named returns the scripts of the program with this name. Scripts of different packages may share
// a name.
func Named(name string) []*Script {
	known.Lock()
	defer known.Unlock()
	return slices.Clone(known.byName[name])
}

// Name returns the name that NewScript got: for a script of package lua, its file name without
// folder and ending.
func (s *Script) Name() string { return s.name }

// Source returns the text of the script, as it is sent.
func (s *Script) Source() string { return s.src }

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
