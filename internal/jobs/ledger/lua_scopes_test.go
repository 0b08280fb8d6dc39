package ledger_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/yuin/gopher-lua/ast"
	"github.com/yuin/gopher-lua/parse"
)

// luaFunc holds the numbers of locals and upvalues of one function of a Lua chunk, or of the chunk
// itself.
type luaFunc struct {
	parent   *luaFunc
	line     int
	active   int // locals that are active where the walk is
	locals   int // the most that are active at one point
	upvalues map[*luaVar]bool
}

// luaVar is a local variable of a Lua chunk. line is the line of its declaration, read and written
// are the lines of its uses, in the chunk.
type luaVar struct {
	name     string
	function *luaFunc
	line     int
	outer    bool // declared in the chunk itself, outside of any block
	read     []int
	written  []int
}

// luaChunk is what a walk over a chunk has found.
type luaChunk struct {
	funcs   []*luaFunc // the chunk itself first
	outer   []*luaVar
	globals map[string]int // name and first line
	library map[string]int // fields of globals that are read, such as string.format, and first line
	reads   map[string]int // fields of other tables that are read by name, and first line
	sets    map[string]bool
	scopes  []map[string]*luaVar
	f       *luaFunc
}

// walkLua parses a Lua chunk and counts its local variables by the rules of Lua 5.1 (lparser.c): a
// for loop has three hidden locals, a function with ... has one (arg).
func walkLua(t *testing.T, source string) *luaChunk {
	t.Helper()
	stmts, err := parse.Parse(strings.NewReader(source), "chunk")
	require.NoError(t, err)
	w := &luaChunk{globals: map[string]int{}, library: map[string]int{}, reads: map[string]int{}, sets: map[string]bool{}}
	w.function(1, nil, 0, stmts)
	return w
}

func (w *luaChunk) function(line int, params []string, hidden int, stmts []ast.Stmt) {
	w.f = &luaFunc{parent: w.f, line: line, upvalues: map[*luaVar]bool{}}
	w.funcs = append(w.funcs, w.f)
	w.block(line, params, hidden, stmts, nil)
	w.f = w.f.parent
}

// block walks Lua statements in a scope of their own. names are the scope's first locals, hidden
// the number of its unnamed ones. The condition of a repeat-until belongs to the scope of its loop.
func (w *luaChunk) block(line int, names []string, hidden int, stmts []ast.Stmt, until ast.Expr) {
	before := w.f.active
	w.scopes = append(w.scopes, map[string]*luaVar{})
	w.f.active += hidden
	w.declare(line, names...)
	for _, s := range stmts {
		w.statement(s)
	}
	w.expressions(until)
	w.scopes = w.scopes[:len(w.scopes)-1]
	w.f.active = before
}

func (w *luaChunk) declare(line int, names ...string) {
	for _, name := range names {
		v := &luaVar{name: name, function: w.f, line: line, outer: len(w.scopes) == 1}
		w.scopes[len(w.scopes)-1][name] = v
		if v.outer {
			w.outer = append(w.outer, v)
		}
	}
	w.f.active += len(names)
	w.f.locals = max(w.f.locals, w.f.active)
}

// use records the use of a variable. If an outer function declares the variable, every function
// between the two holds it as an upvalue.
func (w *luaChunk) use(name string, line int, write bool) {
	v := w.local(name)
	if v == nil {
		noteFirst(w.globals, name, line)
		return
	}
	for f := w.f; f != v.function; f = f.parent {
		f.upvalues[v] = true
	}
	if write {
		v.written = append(v.written, line)
	} else {
		v.read = append(v.read, line)
	}
}

// local returns the local variable that a name refers to; nil if the name is a global.
func (w *luaChunk) local(name string) *luaVar {
	for i := len(w.scopes) - 1; i >= 0; i-- {
		if v := w.scopes[i][name]; v != nil {
			return v
		}
	}
	return nil
}

// field records the read or the assignment of a table's field, if its name is a constant in the
// code.
func (w *luaChunk) field(e *ast.AttrGetExpr, write bool) {
	key, ok := e.Key.(*ast.StringExpr)
	if !ok {
		return
	}
	if object, ok := e.Object.(*ast.IdentExpr); ok && w.local(object.Value) == nil {
		noteFirst(w.library, object.Value+"."+key.Value, e.Line())
	} else if write {
		w.sets[key.Value] = true
	} else {
		noteFirst(w.reads, key.Value, e.Line())
	}
}

func noteFirst(lines map[string]int, name string, line int) {
	if lines[name] == 0 {
		lines[name] = line
	}
}

func (w *luaChunk) statement(s ast.Stmt) {
	switch s := s.(type) {
	case *ast.AssignStmt:
		w.expressions(s.Rhs...)
		for _, left := range s.Lhs {
			w.assign(left)
		}
	case *ast.LocalAssignStmt:
		if f, ok := singleFunction(s); ok { // it may call itself
			w.declare(s.Line(), s.Names...)
			w.expressions(f)
			return
		}
		w.expressions(s.Exprs...)
		w.declare(s.Line(), s.Names...)
	case *ast.FuncCallStmt:
		w.expressions(s.Expr)
	case *ast.DoBlockStmt:
		w.block(s.Line(), nil, 0, s.Stmts, nil)
	case *ast.WhileStmt:
		w.expressions(s.Condition)
		w.block(s.Line(), nil, 0, s.Stmts, nil)
	case *ast.RepeatStmt:
		w.block(s.Line(), nil, 0, s.Stmts, s.Condition)
	case *ast.IfStmt:
		w.expressions(s.Condition)
		w.block(s.Line(), nil, 0, s.Then, nil)
		w.block(s.Line(), nil, 0, s.Else, nil)
	case *ast.NumberForStmt:
		w.expressions(s.Init, s.Limit, s.Step)
		w.block(s.Line(), []string{s.Name}, 3, s.Stmts, nil)
	case *ast.GenericForStmt:
		w.expressions(s.Exprs...)
		w.block(s.Line(), s.Names, 3, s.Stmts, nil)
	case *ast.FuncDefStmt:
		w.assign(s.Name.Func)
		w.expressions(s.Name.Receiver, s.Func)
	case *ast.ReturnStmt:
		w.expressions(s.Exprs...)
	}
}

func (w *luaChunk) assign(left ast.Expr) {
	switch left := left.(type) {
	case *ast.IdentExpr:
		w.use(left.Value, left.Line(), true)
	case *ast.AttrGetExpr:
		w.field(left, true)
		w.expressions(left.Object, left.Key)
	}
}

func singleFunction(s *ast.LocalAssignStmt) (*ast.FunctionExpr, bool) {
	if len(s.Names) != 1 || len(s.Exprs) != 1 {
		return nil, false
	}
	f, ok := s.Exprs[0].(*ast.FunctionExpr)
	return f, ok
}

func (w *luaChunk) expressions(all ...ast.Expr) {
	for _, e := range all {
		switch e := e.(type) {
		case *ast.IdentExpr:
			w.use(e.Value, e.Line(), false)
		case *ast.AttrGetExpr:
			w.field(e, false)
			w.expressions(e.Object, e.Key)
		case *ast.TableExpr:
			for _, f := range e.Fields {
				if key, ok := f.Key.(*ast.StringExpr); ok {
					w.sets[key.Value] = true
				}
				w.expressions(f.Key, f.Value)
			}
		case *ast.FuncCallExpr:
			w.expressions(e.Func, e.Receiver)
			w.expressions(e.Args...)
		case *ast.LogicalOpExpr:
			w.expressions(e.Lhs, e.Rhs)
		case *ast.RelationalOpExpr:
			w.expressions(e.Lhs, e.Rhs)
		case *ast.StringConcatOpExpr:
			w.expressions(e.Lhs, e.Rhs)
		case *ast.ArithmeticOpExpr:
			w.expressions(e.Lhs, e.Rhs)
		case *ast.UnaryMinusOpExpr:
			w.expressions(e.Expr)
		case *ast.UnaryNotOpExpr:
			w.expressions(e.Expr)
		case *ast.UnaryLenOpExpr:
			w.expressions(e.Expr)
		case *ast.FunctionExpr:
			hidden := 0
			if e.ParList.HasVargs {
				hidden = 1
			}
			w.function(e.Line(), e.ParList.Names, hidden, e.Stmts)
		}
	}
}

func TestLocalsOfLua(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, source     string
		locals, upvalues []int // of the chunk, then of its functions
	}{
		{"the chunk's", "local a, b = 1\nlocal c", []int{3}, []int{0}},
		{"a name that is declared twice", "local a\nlocal a", []int{2}, []int{0}},
		{"of blocks only the largest counts", "local a\ndo local b, c end\ndo local d end\nif a then local e, f, g else local h end", []int{4}, []int{0}},
		{"a loop's hidden ones", "for i = 1, 2 do local a end\nfor k, v in pairs({}) do end", []int{5}, []int{0}},
		{"while and repeat", "while true do local a end\nrepeat local b, c until c", []int{2}, []int{0}},
		{"parameters and ...", "local function f(a, b, ...) local c end", []int{1, 4}, []int{0, 0}},
		{"a chunk's in a function", "local a, b, c\nlocal function f() return a, b, a end", []int{4, 0}, []int{0, 2}},
		{"through a function", "local a\nlocal function f() return function() return a end end", []int{2, 0, 0}, []int{0, 1, 1}},
		{"a function that calls itself", "local function f() return f() end", []int{1, 0}, []int{0, 1}},
		{"a hidden name", "local a\nlocal function f() local a\n return a end", []int{2, 1}, []int{0, 0}},
		{"fields and globals", "local t = {}\nfunction t.f(a) t.x = a.t + y end", []int{1, 1}, []int{0, 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var locals, upvalues []int
			for _, f := range walkLua(t, test.source).funcs {
				locals, upvalues = append(locals, f.locals), append(upvalues, len(f.upvalues))
			}
			require.Equal(t, test.locals, locals, "locals")
			require.Equal(t, test.upvalues, upvalues, "upvalues")
		})
	}
}

func TestFieldsOfLua(t *testing.T) {
	t.Parallel()
	chunk := walkLua(t, `
local t, string = { a = 1, ['b'] = 2, 3, [t] = 4 }, {}
function t.c() t.d, t[e] = t.x.y, math.abs end
string.f = t.a(table.concat, t['z'], t[i])
`)
	require.Equal(t, map[string]bool{"a": true, "b": true, "c": true, "d": true, "f": true}, chunk.sets)
	require.Equal(t, map[string]int{"x": 3, "y": 3, "a": 4, "z": 4}, chunk.reads)
	require.Equal(t, map[string]int{"math.abs": 3, "table.concat": 4}, chunk.library)
}
