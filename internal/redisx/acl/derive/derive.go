// Command derive writes roles_gen.go of package acl: what each role does in Redis, which it reads
// from the program's code, that is, which scripts the role runs, which commands it sends, and which
// keys it names. It follows the calls from the functions that start the role (rapid type analysis),
// so it may find too much, but leaves out nothing that the role can reach without reflection. `go
// generate ./internal/redisx/acl` runs it.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/format"
	"go/types"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/callgraph"
	"golang.org/x/tools/go/callgraph/rta"
	"golang.org/x/tools/go/packages"
	"golang.org/x/tools/go/ssa"
	"golang.org/x/tools/go/ssa/ssautil"
)

const (
	module   = "github.com/bulkaction/bulkaction/"
	keyspace = module + "internal/redisx/keyspace"
	goRedis  = "github.com/redis/go-redis/v9"
)

// user is a kind of process, and the functions at which its code begins: PACKAGE.FUNCTION, or
// PACKAGE.* for all exported functions and methods of a package, or PACKAGE.TYPE.METHOD.
type user struct {
	name  string
	roots []string
}

const connect = "internal/process/roles.Connect"

// users are the kinds of processes that use Redis.
var users = []user{
	{"ingest", []string{connect, "internal/process/roles.Ingest"}},
	{"fetcher", []string{connect, "internal/process/roles.Fetcher"}},
	{"dispatcher", []string{connect, "internal/process/roles.Dispatcher"}},
	{"worker", []string{connect, "internal/process/roles.Own.Worker", "internal/process/builtin.Create"}},
	{"watcher", []string{connect, "internal/process/roles.Own.Watcher"}},
	{"aggregator", []string{connect, "internal/process/roles.Own.Aggregator"}},
	{"broker", []string{connect, "internal/process/roles.Own.Broker"}},
	{"guard", []string{"guard.*"}},
	// The functions that package cli calls, not those of cli itself: its table of commands leads to
	// every function of the program, so that the user cli would get all rights.
	{"cli", []string{
		"internal/redisx.Connect", "internal/stage.CheckPartitions", "internal/redisx/layout.*", "internal/process/roles.CheckLayouts",
		"internal/process/roles.Migrations", "internal/audit.*", "internal/audit/checkers.*",
		"internal/audit/repair.*", "internal/access/apikey.*", "internal/access/activity.*",
	}},
}

// need is what a kind of process does in Redis. All lists are sorted.
type need struct {
	scripts  []string // names of scripts
	commands []string // commands that it sends outside of scripts
	keys     []string // patterns of keys, without the prefix
	channels []string // patterns of channels, without the prefix
}

// needsOf analyses the module in the folder dir, and returns what each of users needs, by its name.
func needsOf(dir string) (map[string]need, error) {
	code, err := load(dir)
	if err != nil {
		return nil, err
	}
	all := map[string]need{}
	for _, u := range users {
		roots, err := code.roots(u.roots)
		if err != nil {
			return nil, fmt.Errorf("user %s: %w", u.name, err)
		}
		found := code.need(reachable(roots))
		if len(found.failed) > 0 {
			return nil, fmt.Errorf("user %s: %w", u.name, errors.Join(found.failed...))
		}
		all[u.name] = need{
			scripts: sorted(found.scripts), commands: sorted(found.commands),
			keys: sorted(found.keys), channels: sorted(found.channels),
		}
	}
	return all, nil
}

func sorted(set map[string]bool) []string { return slices.Sorted(maps.Keys(set)) }

// code is the program in SSA form.
type code struct {
	packages map[string]*ssa.Package // by the path of the package
	scripts  map[*ssa.Global]string  // the name of the script in a variable
}

func load(dir string) (*code, error) {
	var names []string
	for _, u := range users {
		for _, root := range u.roots {
			folder := path.Dir(root) + "/" + strings.SplitN(path.Base(root), ".", 2)[0]
			names = append(names, "./"+path.Clean(folder))
		}
	}
	slices.Sort(names)
	found, err := packages.Load(&packages.Config{Mode: packages.LoadAllSyntax, Dir: dir}, slices.Compact(names)...)
	if err != nil {
		return nil, fmt.Errorf("load packages: %w", err)
	}
	for _, p := range found {
		for _, err := range p.Errors {
			return nil, fmt.Errorf("load packages: %w", err)
		}
	}
	program, _ := ssautil.AllPackages(found, ssa.InstantiateGenerics)
	program.Build()
	c := &code{packages: map[string]*ssa.Package{}, scripts: map[*ssa.Global]string{}}
	for _, p := range program.AllPackages() {
		c.packages[p.Pkg.Path()] = p
		if strings.HasPrefix(p.Pkg.Path()+"/", module) {
			c.findScripts(p)
		}
	}
	return c, nil
}

// findScripts notes each variable of a package that holds a Lua script, with the script's name: the
// first argument of the call that initializes the variable.
func (c *code) findScripts(p *ssa.Package) {
	for _, block := range p.Func("init").Blocks {
		for _, instruction := range block.Instrs {
			store, ok := instruction.(*ssa.Store)
			if !ok {
				continue
			}
			variable, ok := store.Addr.(*ssa.Global)
			if !ok || store.Val.Type().String() != "*"+module+"internal/redisx/call.Script" {
				continue
			}
			c.scripts[variable] = path.Base(text(store.Val.(*ssa.Call).Call.Args[0]))
		}
	}
}

// roots returns the functions with these names (see User), and the function literals inside of
// them, because a root may return one that is called later.
func (c *code) roots(names []string) ([]*ssa.Function, error) {
	var all []*ssa.Function
	for _, name := range names {
		folder, member, _ := strings.Cut(path.Base(name), ".")
		p := c.packages[module+path.Join(path.Dir(name), folder)]
		if p == nil {
			return nil, fmt.Errorf("no package for %s", name)
		}
		before := len(all)
		for _, f := range functions(p) {
			if f.name == member || member == "*" && f.exported {
				all = append(all, f.Function)
				all = append(all, f.AnonFuncs...)
			}
		}
		if len(all) == before {
			return nil, fmt.Errorf("no function %s", name)
		}
	}
	return all, nil
}

type function struct {
	*ssa.Function
	name     string // FUNCTION or TYPE.METHOD
	exported bool
}

func functions(p *ssa.Package) []function {
	var all []function
	for name, member := range p.Members {
		switch m := member.(type) {
		case *ssa.Function:
			all = append(all, function{m, name, m.Object() != nil && m.Object().Exported()})
		case *ssa.Type:
			methods := types.NewMethodSet(types.NewPointer(m.Type()))
			for selection := range methods.Methods() {
				// generic types have no methods before they are instantiated
				if f := p.Prog.MethodValue(selection); f != nil {
					exported := m.Object().Exported() && f.Object().Exported()
					all = append(all, function{f, name + "." + f.Name(), exported})
				}
			}
		}
	}
	return all
}

// reachable returns the functions that the roots may call, directly or not. It takes each function
// in a package variable, such as a table of functions, for called once the package is reached. It
// leaves out methods that only reflection could call.
func reachable(roots []*ssa.Function) map[*ssa.Function]bool {
	for read := map[*ssa.Package]bool{}; ; {
		graph := rta.Analyze(roots, true).CallGraph
		all := map[*ssa.Function]bool{}
		var visit func(*callgraph.Node)
		visit = func(n *callgraph.Node) {
			if n == nil || all[n.Func] {
				return
			}
			all[n.Func] = true
			for _, edge := range n.Out {
				visit(edge.Callee)
			}
		}
		for _, f := range roots {
			visit(graph.Nodes[f])
		}
		more := false
		for f := range all {
			p := home(f)
			if p == nil || read[p] || !strings.HasPrefix(p.Pkg.Path()+"/", module) {
				continue
			}
			read[p] = true
			for _, f := range inVariables(p) {
				if !all[f] {
					roots, more = append(roots, f), true
				}
			}
		}
		if !more {
			return all
		}
	}
}

// inVariables returns the functions that the variables of a package may hold: functions that its
// initializer uses as values, and the methods of values that it stores in interfaces.
func inVariables(p *ssa.Package) []*ssa.Function {
	var all []*ssa.Function
	for _, block := range p.Func("init").Blocks {
		for _, instruction := range block.Instrs {
			if made, ok := instruction.(*ssa.MakeInterface); ok {
				for selection := range p.Prog.MethodSets.MethodSet(made.X.Type()).Methods() {
					if f := p.Prog.MethodValue(selection); f != nil && home(f) == p {
						all = append(all, f)
					}
				}
			}
			for i, operand := range instruction.Operands(nil) {
				f, ok := (*operand).(*ssa.Function)
				if _, call := instruction.(*ssa.Call); ok && !(call && i == 0) {
					all = append(all, f)
				}
			}
		}
	}
	return all
}

// home returns the function's package; for an instance of a generic function, the package of the
// generic one.
func home(f *ssa.Function) *ssa.Package {
	if f.Pkg == nil && f.Origin() != nil {
		return f.Origin().Pkg
	}
	return f.Pkg
}

func main() {
	if err := generate(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "derive:", err)
		os.Exit(1)
	}
}

func generate(args []string) error {
	if len(args) != 1 {
		return errors.New("give the folder of go.mod")
	}
	needs, err := needsOf(args[0])
	if err != nil {
		return err
	}
	text, err := render(needs)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(args[0], "internal/redisx/acl/roles_gen.go"), text, 0o644)
}

func render(needs map[string]need) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("// Code generated by derive; DO NOT EDIT.\n\npackage acl\n\n")
	b.WriteString("// needs is what each kind of process does in Redis, read from the code.\n")
	b.WriteString("var needs = map[string]need{\n")
	for _, u := range users {
		n := needs[u.name]
		fmt.Fprintf(&b, "%q: {\n", u.name)
		for _, part := range []struct {
			name string
			list []string
		}{{"scripts", n.scripts}, {"commands", n.commands}, {"keys", n.keys}, {"channels", n.channels}} {
			if len(part.list) > 0 {
				fmt.Fprintf(&b, "%s: []string{\n", part.name)
				for line := range slices.Chunk(part.list, 6) {
					for _, word := range line {
						fmt.Fprintf(&b, "%q, ", word)
					}
					b.WriteString("\n")
				}
				b.WriteString("},\n")
			}
		}
		b.WriteString("},\n")
	}
	b.WriteString("}\n")
	text, err := format.Source(b.Bytes())
	if err != nil {
		return nil, fmt.Errorf("format: %w", err)
	}
	return text, nil
}
