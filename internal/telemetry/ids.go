package telemetry

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync/atomic"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

type presetKey struct{}

// preset holds ids that are chosen before their span starts, as a value of the context. Only the
// first span that starts with the context gets them: its children inherit the context, and must not
// get the same ids.
type preset struct {
	trace trace.TraceID // zero: the generator chooses
	span  trace.SpanID
	taken atomic.Bool
}

// WithSpanID gives the next span that is started with ctx, or with a context derived from it, the
// given id. Lua scripts choose the ids of spans that the process creates after the script has run.
func WithSpanID(ctx context.Context, id trace.SpanID) context.Context {
	if !id.IsValid() {
		return ctx
	}
	return context.WithValue(ctx, presetKey{}, &preset{span: id})
}

func withTraceID(ctx context.Context, id trace.TraceID) context.Context {
	return context.WithValue(ctx, presetKey{}, &preset{trace: id})
}

// idGenerator makes the ids of spans for the SDK: random ones, or those of the preset in the
// context.
type idGenerator struct{}

var _ sdktrace.IDGenerator = idGenerator{}

func (idGenerator) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	p := takePreset(ctx)
	tid, sid := p.trace, p.span
	if !tid.IsValid() {
		tid = randomTraceID()
	}
	if !sid.IsValid() {
		sid = randomSpanID()
	}
	return tid, sid
}

func (idGenerator) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	if p := takePreset(ctx); p.span.IsValid() {
		return p.span
	}
	return randomSpanID()
}

var noPreset preset

func takePreset(ctx context.Context) *preset {
	p, ok := ctx.Value(presetKey{}).(*preset)
	if !ok || !p.taken.CompareAndSwap(false, true) {
		return &noPreset
	}
	return p
}

func randomTraceID() (id trace.TraceID) {
	for !id.IsValid() {
		binary.NativeEndian.PutUint64(id[:8], rand.Uint64())
		binary.NativeEndian.PutUint64(id[8:], rand.Uint64())
	}
	return id
}

func randomSpanID() (id trace.SpanID) {
	for !id.IsValid() {
		binary.NativeEndian.PutUint64(id[:], rand.Uint64())
	}
	return id
}
