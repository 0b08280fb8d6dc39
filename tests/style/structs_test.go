package style_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The largest number of methods and of mutexes that a type may have: a larger type is too hard to
// understand.
const (
	mostMethods = 20
	mostMutexes = 3
)

// TestTypesFitInAHead requires that no type outside of tests has more than mostMethods methods or
// more than mostMutexes mutexes. Methods of embedded types do not count.
func TestTypesFitInAHead(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	found := typeSizes{}
	for _, file := range trackedFiles(t, root, ".go") {
		if strings.HasSuffix(file, "_test.go") || slices.Contains(strings.Split(file, "/"), "testdata") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		found.add(t, file, text)
	}
	require.Greater(t, len(found), 300)
	var offences []string
	for _, name := range slices.Sorted(maps.Keys(found)) {
		size := found[name]
		if size.methods > mostMethods {
			offences = append(offences,
				fmt.Sprintf("%s has %d methods, at most %d are allowed", name, size.methods, mostMethods))
		}
		if size.mutexes > mostMutexes {
			offences = append(offences, fmt.Sprintf("%s has %d mutexes, at most %d are allowed", name, size.mutexes, mostMutexes))
		}
	}
	require.Empty(t, strings.Join(offences, "\n"), "types that are too large")
}

// TestTypeSizesAreFound tests the check of TestTypesFitInAHead: what counts as a method and as a
// mutex of a type.
func TestTypeSizesAreFound(t *testing.T) {
	t.Parallel()
	found := typeSizes{}
	found.add(t, "a/b/one.go", []byte(`package b
		type T struct {
			mu, other sync.Mutex
			deep struct{ sync.RWMutex; byKey map[string]*sync.Mutex }
			inner *Inner
		}
		type Inner struct{ mu sync.Mutex }
		type List[V any] struct{}
		func (t *T) One() {}
		func (T) Two() {}
		func (l *List[V]) Three() {}
		func function(t *T) { var mu sync.Mutex; _ = &mu }`))
	found.add(t, "a/b/two.go", []byte(`package b
		func (t *T) Four() {}`))
	found.add(t, "a/c/one.go", []byte(`package c
		type T int
		func (t T) Five() {}`))
	require.Equal(t, typeSizes{
		"a/b.T": {methods: 3, mutexes: 4}, "a/b.Inner": {mutexes: 1}, "a/b.List": {methods: 1}, "a/c.T": {methods: 1},
	}, found)
}

// typeSizes holds the size of each type, by folder and name.
type typeSizes map[string]typeSize

type typeSize struct{ methods, mutexes int }

// add adds the types and methods of a Go file.
func (s typeSizes) add(t *testing.T, file string, text []byte) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	require.NoError(t, err)
	grow := func(typ string, by typeSize) {
		name := path.Dir(file) + "." + typ
		s[name] = typeSize{s[name].methods + by.methods, s[name].mutexes + by.mutexes}
	}
	for _, d := range parsed.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv != nil {
				grow(receiverName(d.Recv.List[0].Type), typeSize{methods: 1})
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if typ, ok := spec.(*ast.TypeSpec); ok {
					grow(typ.Name.Name, typeSize{mutexes: mutexes(typ.Type)})
				}
			}
		}
	}
}

// receiverName returns the name of the type in a method's receiver, without a pointer and type
// parameters.
func receiverName(e ast.Expr) string {
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.IndexListExpr:
			e = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// mutexes returns the number of mutexes among the fields of a type; a slice or map of mutexes
// counts as one.
func mutexes(e ast.Expr) int {
	n := 0
	ast.Inspect(e, func(node ast.Node) bool {
		f, ok := node.(*ast.Field)
		if !ok {
			return true
		}
		if _, nested := f.Type.(*ast.StructType); nested {
			return true
		}
		ast.Inspect(f.Type, func(node ast.Node) bool {
			sel, ok := node.(*ast.SelectorExpr)
			if ok && (sel.Sel.Name == "Mutex" || sel.Sel.Name == "RWMutex") {
				n += max(1, len(f.Names))
			}
			return !ok
		})
		return false
	})
	return n
}
