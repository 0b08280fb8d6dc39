package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// own is the accumulator of a registered reducer. It calls the reducer's methods under guard. What
// goes wrong with the state as a whole goes wrong each time, so it is kept, and the group can end.
type own struct {
	acc Accumulator
	err error // why the aggregate has failed for good; acc is not used any more
	// other says that the stored state may be right, and only this process can't use it: it must not
	// be overwritten, because a process of another version can.
	other bool
}

// ownFactory wraps the factory of a registered reducer. Its accumulators never panic.
func ownFactory(factory Factory) Factory {
	return func(spec Spec) (Accumulator, error) {
		o := &own{}
		o.keep(guard(func() (err error) {
			if o.acc, err = factory(spec); err == nil && o.acc == nil {
				err = fmt.Errorf("op %q made no accumulator", spec.Op)
			}
			return err
		}))
		return o, o.err
	}
}

// keep makes the aggregate fail for good if err is not nil.
func (o *own) keep(err error) {
	const most = 500 // bytes of a reason that is stored with the aggregate
	if err == nil {
		return
	}
	if o.err = err; len(err.Error()) > most {
		o.err = errors.New(strings.ToValidUTF8(err.Error()[:most], "") + "…")
	}
}

func (o *own) Add(r Result) error {
	if o.err != nil {
		return nil
	}
	return guard(func() error { return o.acc.Add(r) })
}

func (o *own) Merge(other Accumulator) error {
	if o.err == nil {
		o.keep(guard(func() error { return o.acc.Merge(other.(*own).acc) }))
	}
	return nil
}

func (o *own) MarshalJSON() ([]byte, error) {
	if o.err == nil {
		text, err := validJSON(func() ([]byte, error) { return o.acc.MarshalJSON() })
		if err == nil {
			return text, nil
		}
		o.keep(err)
	}
	return null(), nil
}

func (o *own) UnmarshalJSON(b []byte) error {
	if o.err == nil {
		o.keep(guard(func() error { return o.acc.UnmarshalJSON(b) }))
		o.other = o.err != nil
	}
	return nil
}

func (o *own) Value() (json.RawMessage, error) {
	if o.err != nil {
		return nil, o.err
	}
	return validJSON(func() ([]byte, error) { return o.acc.Value() })
}

// validJSON returns the JSON that encode, a method of a reducer, returns, as valid UTF-8.
func validJSON(encode func() ([]byte, error)) (text []byte, err error) {
	err = guard(func() error {
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
