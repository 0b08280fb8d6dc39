package main

import (
	"fmt"
	"go/constant"
	"go/token"
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"

	"github.com/bulkaction/bulkaction/internal/redisx/acl"
)

// found collects what functions do in Redis.
type found struct {
	scripts, commands, keys, channels map[string]bool
	failed                            []error
}

func (c *code) need(functions map[*ssa.Function]bool) *found {
	n := &found{
		scripts: map[string]bool{}, commands: map[string]bool{}, keys: map[string]bool{}, channels: map[string]bool{},
	}
	for f := range functions {
		p := home(f)
		if p == nil || p.Pkg.Path() == goRedis || p.Pkg.Path() == module+"internal/redisx/acl" {
			continue
		}
		if p.Pkg.Path() == keyspace {
			n.addKey(f)
		}
		isInit := f.Synthetic == "package initializer"
		for _, block := range f.Blocks {
			for _, instruction := range block.Instrs {
				c.addCommands(n, p.Pkg.Path(), instruction)
				for _, operand := range instruction.Operands(nil) {
					if script, ok := c.scripts[global(*operand)]; ok && !isInit {
						n.scripts[script] = true
					}
				}
			}
		}
	}
	return n
}

func global(v ssa.Value) *ssa.Global {
	g, _ := v.(*ssa.Global)
	return g
}

func (c *code) addCommands(n *found, pkg string, instruction ssa.Instruction) {
	add := func(names []string) {
		for _, name := range names {
			n.commands[name] = true
		}
	}
	if call, ok := instruction.(ssa.CallInstruction); ok && call.Common().IsInvoke() {
		if call.Common().Method.Pkg() != nil && isClient(call.Common().Value.Type()) {
			add(acl.CommandsOfMethod(call.Common().Method.Name()))
			if call.Common().Method.Name() == "Do" {
				n.failed = append(n.failed, fmt.Errorf("%s: Do hides its command", instruction.Parent()))
			}
		}
	}
	for _, operand := range instruction.Operands(nil) {
		switch v := (*operand).(type) {
		case *ssa.Function:
			if v.Object() == nil || v.Object().Pkg() == nil || v.Object().Pkg().Path() != goRedis {
				continue
			}
			// Signature comes from the method's object: the function of a method value has no
			// receiver.
			method, _ := v.Object().(*types.Func)
			if method != nil && method.Signature().Recv() != nil && isClient(method.Signature().Recv().Type()) {
				add(acl.CommandsOfMethod(method.Name()))
			}
		case *ssa.Const:
			if source := text(v); strings.Contains(source, "redis.call(") && !isInit(instruction) {
				add(acl.CommandsOf(source)) // a script that is not a variable
			}
		}
	}
	// In package redisx and below it, a constant string in an interface may be a word of a command,
	// as in Do(ctx, "xreadgroup", "group"). Each one that is the name of a command counts.
	if word, ok := instruction.(*ssa.MakeInterface); ok && strings.HasPrefix(pkg, module+"internal/redisx") {
		if name := text(word.X); acl.IsCommand(name) {
			add([]string{name})
		}
	}
}

func isInit(i ssa.Instruction) bool { return i.Parent().Synthetic == "package initializer" }

// clients lists the go-redis types whose methods send commands, except for those whose name ends
// with cmdable.
var clients = []string{
	"UniversalClient", "Pipeliner", "Client", "ClusterClient", "Pipeline", "Tx", "Conn", "AutoPipeliner", "PubSub",
}

func isClient(t types.Type) bool {
	if pointer, ok := t.(*types.Pointer); ok {
		t = pointer.Elem()
	}
	named, ok := types.Unalias(t).(*types.Named)
	if !ok || named.Obj().Pkg() == nil || named.Obj().Pkg().Path() != goRedis {
		return false
	}
	name := named.Obj().Name()
	return slices.Contains(clients, name) || strings.HasSuffix(strings.ToLower(name), "cmdable")
}

// text returns the value of a constant string, and "" for any other value.
func text(v ssa.Value) string {
	if c, ok := v.(*ssa.Const); ok && c.Value != nil && c.Value.Kind() == constant.String {
		return constant.StringVal(c.Value)
	}
	return ""
}

// prefixMark stands for the prefix of all keys in a pattern.
const prefixMark = "\x00"

// addKey adds the patterns of the keys or channels that a function of package keyspace returns.
func (n *found) addKey(f *ssa.Function) {
	for _, block := range f.Blocks {
		for _, instruction := range block.Instrs {
			returned, ok := instruction.(*ssa.Return)
			if !ok {
				continue
			}
			for _, value := range returned.Results {
				pattern, ok := strings.CutPrefix(patternOf(value), prefixMark)
				switch {
				case !ok || pattern == "":
				case strings.HasPrefix(f.Name(), "GuardWake"):
					n.channels[pattern] = true
				case strings.HasSuffix(pattern, ":"): // the base of keys
					n.keys[pattern+"*"] = true
				default:
					n.keys[pattern] = true
				}
			}
		}
	}
	if f.Name() == "Partition" { // all other keys begin with the base of a partition
		n.keys["{*}:*"] = true
	}
}

// patternOf returns the pattern of the strings that a value may be, with * for each part that
// depends on an argument, and prefixMark for the prefix of all keys.
func patternOf(value ssa.Value) string {
	switch v := value.(type) {
	case *ssa.Const:
		return text(v)
	case *ssa.BinOp:
		if v.Op == token.ADD {
			return patternOf(v.X) + patternOf(v.Y)
		}
	case *ssa.Parameter:
		if v.Name() == "prefix" {
			return prefixMark
		}
	case *ssa.Field:
		if field(v.X.Type(), v.Field) == "prefix" {
			return prefixMark
		}
	case *ssa.UnOp:
		if address, ok := v.X.(*ssa.FieldAddr); ok && field(address.X.Type(), address.Field) == "prefix" {
			return prefixMark
		}
	case *ssa.Call:
		return patternOfCall(v)
	}
	return "*"
}

// patternOfCall returns the pattern of a call inside a function of package keyspace to another
// function of that package; "*" for any other call, and for a function that returns strings of
// different patterns. The called function must not be recursive.
func patternOfCall(call *ssa.Call) string {
	f := call.Common().StaticCallee()
	if f == nil || home(f) == nil || home(f).Pkg.Path() != keyspace {
		return "*"
	}
	pattern := ""
	for _, block := range f.Blocks {
		for _, instruction := range block.Instrs {
			returned, ok := instruction.(*ssa.Return)
			if !ok {
				continue
			}
			switch found := patternOf(returned.Results[0]); pattern {
			case "", found:
				pattern = found
			default:
				return "*"
			}
		}
	}
	return pattern
}

func field(t types.Type, i int) string {
	if pointer, ok := t.Underlying().(*types.Pointer); ok {
		t = pointer.Elem()
	}
	return t.Underlying().(*types.Struct).Field(i).Name()
}
