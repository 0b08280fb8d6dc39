// Command gendocs writes docs/configuration.md and internal/process/app/help.txt from the structs of the
// configuration, in package app and the processors' packages, and the comments of their fields. `go
// generate ./internal/process/app` runs it.
package main

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
)

const module = "github.com/bulkaction/bulkaction"

//go:embed *.tmpl
var templates embed.FS

// outputs are the files that are written, by their templates.
var outputs = map[string]string{
	"configuration.md.tmpl": "docs/configuration.md",
	"help.txt.tmpl":         "internal/process/app/help.txt",
}

func main() {
	if err := generate(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gendocs:", err)
		os.Exit(1)
	}
}

func generate(args []string) error {
	if len(args) != 1 {
		return errors.New("give the folder of go.mod")
	}
	for name, output := range outputs {
		text, err := render(args[0], name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(args[0], output), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// variable is what a template shows of a variable.
type variable struct {
	app.Variable
	Meaning string
	First   bool // of its section
}

// render returns the output of a template. root is the folder of go.mod. A variable whose field has
// no comment is an error.
func render(root, name string) ([]byte, error) {
	var all []variable
	section := ""
	byPackage := map[string]map[string]string{}
	for _, v := range app.Variables(new(builtin.Config)) {
		pkg := v.Owner.PkgPath()
		if byPackage[pkg] == nil {
			var err error
			if byPackage[pkg], err = comments(filepath.Join(root, strings.TrimPrefix(pkg, module))); err != nil {
				return nil, err
			}
		}
		text := byPackage[pkg][v.Owner.Name()+"."+v.Field]
		if text == "" {
			return nil, fmt.Errorf("document %s.%s: give the field a comment", v.Owner, v.Field)
		}
		all = append(all, variable{v, sentence(strings.TrimPrefix(text, v.Field+" ")), v.Section != section})
		section = v.Section
	}
	cell := strings.NewReplacer("|", `\|`, "<", "&lt;").Replace
	t, err := template.New(name).Funcs(template.FuncMap{"cell": cell}).ParseFS(templates, name)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, all)
	return b.Bytes(), err
}

// comments returns the comments of the fields of a package's structs, by "Struct.Field".
func comments(dir string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", dir, err)
	}
	texts := map[string]string{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, fmt.Errorf("parse source: %w", err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					words := strings.Fields(f.Doc.Text() + f.Comment.Text())
					for _, field := range f.Names {
						texts[spec.Name.Name+"."+field.Name] = strings.Join(words, " ")
					}
				}
			}
			return false
		})
	}
	return texts, nil
}

// sentence turns "is the name of …" into "The name of …".
func sentence(s string) string {
	s = strings.TrimPrefix(strings.TrimPrefix(s, "is "), "are ")
	return strings.ToUpper(s[:1]) + s[1:]
}
