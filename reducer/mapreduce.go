package reducer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// Option adjusts MapReduce.
type Option[T any] func(*mapReduce[T])

// Finish is an option of MapReduce. finish converts the reduced value to the value that the group
// shows, each time the value is read. finish must not change its argument.
func Finish[T any](finish func(T) (any, error)) Option[T] {
	return func(m *mapReduce[T]) { m.finish = finish }
}

// MapReduce makes a reducer for [Registry.Register] from two functions. mapper turns a result into
// a T. If mapper returns an error, or mapper or reduce panics, the result is left out and counted
// as skipped; Add returns the error, except [ErrSkip]. reduce combines two Ts into one. It must be
// associative and commutative; it may change and return its first argument, and must not change the
// second. T must survive a round trip through JSON unchanged, because partial states are stored as
// JSON. Without any result the value is null. The reducer's aggregates take no field.
func MapReduce[T any](mapper func(Result) (T, error), reduce func(a, b T) T, options ...Option[T]) Factory {
	return func(spec Spec) (Accumulator, error) {
		if spec.Field != "" {
			return nil, fmt.Errorf("op %q takes no field", spec.Op)
		}
		if mapper == nil || reduce == nil {
			return nil, fmt.Errorf("op %q lacks a function", spec.Op)
		}
		m := &mapReduce[T]{op: spec.Op, mapper: mapper, reduce: reduce}
		for _, option := range options {
			option(m)
		}
		return m, nil
	}
}

type mapReduce[T any] struct {
	op      string
	mapper  func(Result) (T, error)
	reduce  func(a, b T) T
	finish  func(T) (any, error) // nil: the reduced value is shown unchanged
	count   int64
	skipped int64
	reduced T // valid if count > 0
}

func (m *mapReduce[T]) Add(r Result) error {
	err := guard(func() error {
		mapped, err := m.mapper(r)
		if err == nil {
			m.join(mapped)
			m.count++
		}
		return err
	})
	if err == nil {
		return nil
	}
	m.skipped++
	if errors.Is(err, ErrSkip) {
		return nil
	}
	return err
}

func (m *mapReduce[T]) join(other T) {
	if m.count == 0 {
		m.reduced = other
		return
	}
	m.reduced = m.reduce(m.reduced, other)
}

func (m *mapReduce[T]) Skipped() int64 { return m.skipped }

func (m *mapReduce[T]) Merge(other Accumulator) error {
	o, ok := other.(*mapReduce[T])
	if !ok || o.op != m.op {
		return errors.New("the other is of a different reducer")
	}
	m.skipped += o.skipped
	if o.count == 0 {
		return nil
	}
	m.join(o.reduced)
	m.count += o.count
	return nil
}

type encodedMapReduce struct {
	Count   int64           `json:"count"`
	Skipped int64           `json:"skipped"`
	Reduced json.RawMessage `json:"reduced"`
}

func (m *mapReduce[T]) MarshalJSON() ([]byte, error) {
	out := strconv.AppendInt([]byte(`{"count":`), m.count, 10)
	out = strconv.AppendInt(append(out, `,"skipped":`...), m.skipped, 10)
	if m.count > 0 {
		reduced, err := json.Marshal(m.reduced)
		if err != nil {
			return nil, err
		}
		out = append(append(out, `,"reduced":`...), reduced...)
	}
	return append(out, '}'), nil
}

func (m *mapReduce[T]) UnmarshalJSON(b []byte) error {
	var e encodedMapReduce
	if err := unmarshalStrict(b, &e); err != nil {
		return err
	}
	if !validCount(e.Count) || !validCount(e.Skipped) || (e.Count > 0) != (len(e.Reduced) > 0) {
		return errCount
	}
	var reduced T
	if e.Count > 0 {
		if err := json.Unmarshal(e.Reduced, &reduced); err != nil {
			return err
		}
	}
	m.count, m.skipped, m.reduced = e.Count, e.Skipped, reduced
	return nil
}

func (m *mapReduce[T]) Value() (json.RawMessage, error) {
	if m.count == 0 {
		return null(), nil
	}
	if m.finish == nil {
		return json.Marshal(m.reduced)
	}
	shown, err := m.finish(m.reduced)
	if err != nil {
		return nil, err
	}
	return json.Marshal(shown)
}
