package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/go/ssa"
	"golang.org/x/tools/go/ssa/ssautil"
)

// TestPatternOfKey: a key's pattern is found even if the function that returns the key calls
// another function for a part of it.
func TestPatternOfKey(t *testing.T) {
	t.Parallel()
	const source = `package keyspace
type Space struct{ prefix string }
type Partition string
func Base(prefix, name string) string { return prefix + "base:" + name }
func (s Space) Own(id string) string { return s.prefix + "own:" + id + ":x" }
func (s Space) Pointer(id string) string { return (&s).below(id) + ":y" }
func (s *Space) below(id string) string { return s.prefix + "below:" + id }
func (s Space) OfBase(name string) string { return Base(s.prefix, name) + ":more" }
func (s Space) Twice(name string) string { return s.OfBase(name) + ":" + name }
func (s Space) Either(b bool) string { if b { return s.Own("a") }; return s.OfBase("b") }
func (s Space) OfEither() string { return s.Either(true) + ":z" }
func (p Partition) Key(id string) string { return string(p) + "key:" + id }
func (p Partition) OfKey(id string) string { return p.Key(id) + ":w" }
`
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "keyspace.go", source, 0)
	require.NoError(t, err)
	p, _, err := ssautil.BuildPackage(&types.Config{}, files, types.NewPackage(keyspace, "keyspace"), []*ast.File{file},
		ssa.SanityCheckFunctions)
	require.NoError(t, err)
	keys := map[string][]string{}
	for f := range ssautil.AllFunctions(p.Prog) {
		if f.Synthetic != "" {
			continue
		}
		n := &found{keys: map[string]bool{}, channels: map[string]bool{}}
		n.addKey(f)
		keys[f.Name()] = sorted(n.keys)
	}
	require.Equal(t, map[string][]string{
		"Base": {"base:*"}, "Own": {"own:*:x"}, "Pointer": {"below:*:y"}, "below": {"below:*"}, "OfBase": {"base:*:more"},
		"Twice": {"base:*:more:*"}, "Either": {"base:*:more", "own:*:x"}, "OfEither": nil,
		"Key": nil, "OfKey": nil, // its keys begin with the base of a partition
	}, keys)
}
