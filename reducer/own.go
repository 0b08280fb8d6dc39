package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// own is the accumulator of a registered reducer. It calls the reducer's methods under guard.
type own struct {
	acc Accumulator // nil: the factory has refused a Spec that it had accepted
	err error       // why acc is nil
}

// ownFactory wraps the factory of a registered reducer. Its accumulators never panic.
func ownFactory(factory Factory) Factory {
	return func(spec Spec) (Accumulator, error) {
		o := &own{}
		if o.err = guard(func() (err error) {
			if o.acc, err = factory(spec); err == nil && o.acc == nil {
				err = fmt.Errorf("op %q made no accumulator", spec.Op)
			}
			return err
		}); o.err != nil {
			o.acc = nil
		}
		return o, o.err
	}
}

// call calls do under guard, unless there is no accumulator.
func (o *own) call(do func() error) error {
	if o.acc == nil {
		return o.err
	}
	return guard(do)
}

func (o *own) Add(r Result) error { return o.call(func() error { return o.acc.Add(r) }) }

func (o *own) Merge(other Accumulator) error {
	others, ok := other.(*own)
	switch {
	case !ok:
		return errors.New("the other is of a different reducer")
	case others.acc == nil:
		return others.err
	}
	return o.call(func() error { return o.acc.Merge(others.acc) })
}

func (o *own) MarshalJSON() ([]byte, error) {
	return o.json(func() ([]byte, error) { return o.acc.MarshalJSON() })
}

func (o *own) UnmarshalJSON(b []byte) error {
	return o.call(func() error { return o.acc.UnmarshalJSON(b) })
}

func (o *own) Value() (json.RawMessage, error) {
	return o.json(func() ([]byte, error) { return o.acc.Value() })
}

// json returns the JSON that encode returns, as valid UTF-8.
func (o *own) json(encode func() ([]byte, error)) (text []byte, err error) {
	err = o.call(func() error {
		text, err = encode()
		if err == nil && !json.Valid(text) {
			err = errors.New("its reducer wrote invalid JSON")
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(text) {
		text = bytes.ToValidUTF8(text, []byte(string(utf8.RuneError)))
	}
	return text, nil
}

func (o *own) Skipped() (n int64) {
	if s, ok := o.acc.(Skipper); ok {
		_ = guard(func() error { n = s.Skipped(); return nil })
	}
	return n
}

// guard calls code of a registered reducer. A panic, also in the methods of its error, becomes an
// error: otherwise one result could crash process after process. The errors are texts alone, without
// methods of the reducer's; that of a panic leaves the panic's value out, because it may contain a
// payload. ErrSkip stays itself.
func guard(do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the reducer's function panicked with a %T", p)
		}
	}()
	switch err = do(); {
	case err == nil:
		return nil
	case errors.Is(err, ErrSkip):
		return ErrSkip
	}
	return errors.New(err.Error())
}
