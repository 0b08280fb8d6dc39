package reducer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
)

// maxNameBytes bounds an aggregate's name.
const maxNameBytes = 128

// Registry holds reducers by the name of their op. Call Register only before the registry is
// shared; afterwards it is safe for concurrent use.
type Registry struct {
	factories map[string]Factory
}

// NewRegistry returns a registry with the built-in ops.
func NewRegistry() *Registry {
	r := &Registry{factories: make(map[string]Factory, len(builtins))}
	for op, b := range builtins {
		r.factories[op] = b.factory
	}
	return r
}

// Register adds a reducer. It refuses a name that is already used or that is no valid id.
func (r *Registry) Register(op string, factory Factory) error {
	switch {
	case !api.ValidID(op):
		return fmt.Errorf("register reducer %q: the name must "+api.IDRule, op)
	case factory == nil:
		return fmt.Errorf("register reducer %q: it has no factory", op)
	case r.factories[op] != nil:
		return fmt.Errorf("register reducer %q: the name is taken", op)
	}
	r.factories[op] = ownFactory(factory)
	return nil
}

// Ops returns the names of all registered ops, sorted.
func (r *Registry) Ops() []string { return slices.Sorted(maps.Keys(r.factories)) }

// Compile checks the specs and makes a plan for many results. The error names every invalid spec. A
// plan without specs is valid; its states only count results.
func (r *Registry) Compile(specs []Spec) (*Plan, error) {
	p := &Plan{specs: slices.Clone(specs), fields: newExtractor()}
	seen := make(map[string]bool, len(specs))
	var errs []error
	for i, spec := range specs {
		if err := r.compile(p, spec, seen[spec.As]); err != nil {
			errs = append(errs, fmt.Errorf("compile aggregate %d %q: %w", i, spec.As, err))
		}
		seen[spec.As] = true
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return p, nil
}

func (r *Registry) compile(p *Plan, spec Spec, duplicate bool) error {
	if err := checkName(spec.As); err != nil {
		return err
	}
	if duplicate {
		return errors.New("the name is used twice")
	}
	if !slices.Contains([]string{"", OverDone, OverFailed, OverEnded}, spec.Over) {
		return fmt.Errorf("over %q is unknown, use done, failed or ended", spec.Over)
	}
	factory, ok := r.factories[spec.Op]
	if !ok {
		return fmt.Errorf("op %q is unknown, use one of %s", spec.Op, strings.Join(r.Ops(), ", "))
	}
	acc, err := factory(spec)
	if err != nil {
		return err
	}
	part := part{make: factory, slot: noSlot}
	if f, ok := acc.(*fieldAccumulator); ok {
		part.slot = p.fields.slot(f.path)
	}
	p.parts = append(p.parts, part)
	return nil
}

func checkName(as string) error {
	switch {
	case as == "":
		return errors.New("it has no name, set as")
	case len(as) > maxNameBytes:
		return fmt.Errorf("the name is longer than %d bytes", maxNameBytes)
	case !utf8.ValidString(as) || strings.ContainsFunc(as, unicode.IsControl):
		return errors.New("the name has bytes that are not printable UTF-8")
	}
	return nil
}
