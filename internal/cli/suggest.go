package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
)

// unknownCommand matches the flag library's error about an unknown command.
var unknownCommand = regexp.MustCompile(`^unknown command "([^"]*)"`)

// explain improves two kinds of errors: for an unknown command or flag it suggests the nearest one,
// and for wrong fields in a call of the API it names the command's flags instead of the fields. It
// returns other errors unchanged.
func explain(cmd *cobra.Command, err error) error {
	if err == nil || cmd == nil {
		return err
	}
	if match := unknownCommand.FindStringSubmatch(err.Error()); match != nil {
		return unknown(cmd, match[1])
	}
	if bad, ok := errors.AsType[*pflag.NotExistError](err); ok {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := app.Nearest(bad.GetSpecifiedName(), names); near != "" {
			return usagef("%v; did you mean --%s?", err, near)
		}
		return usagef("%v; `%s --help` lists the flags", err, cmd.CommandPath())
	}
	if refused, ok := errors.AsType[*client.Error](err); ok {
		return namedByFlags(cmd, refused, err)
	}
	return err
}

// unknown returns the error for an argument that is not a subcommand of cmd.
func unknown(cmd *cobra.Command, name string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	switch near := app.Nearest(name, names); {
	case len(names) == 0:
		return usagef("%s takes no argument %q", cmd.Name(), name)
	case near != "":
		return usagef("unknown command %q for %q; did you mean `%s %s`?",
			name, cmd.CommandPath(), cmd.CommandPath(), near)
	case cmd.HasParent():
		return usagef("unknown command %q for %q; there are: %s", name, cmd.CommandPath(), strings.Join(names, ", "))
	}
	return usagef("unknown command %q for %q; `bulkaction --help` lists the commands", name, cmd.CommandPath())
}

// namedByFlags returns an API error about fields with the names of the flags that set these fields.
// It returns err if no field belongs to a flag of cmd that was given.
func namedByFlags(cmd *cobra.Command, refused *client.Error, err error) error {
	found := false
	problems := make([]string, len(refused.Problem.Fields))
	for i, f := range refused.Problem.Fields {
		name := strings.ReplaceAll(f.Field, "_", "-")
		if flag := cmd.Flags().Lookup(name); flag != nil && flag.Changed {
			value := " " + flag.Value.String()
			if flag.Value.Type() == "bool" {
				value = "" // it is given without a value
			}
			// A flag takes no number without a unit.
			problem := strings.Replace(f.Problem, " or a number of seconds", "", 1)
			problems[i], found = fmt.Sprintf("--%s%s: %s", name, value, problem), true
			continue
		}
		problems[i] = f.Field + ": " + f.Problem
	}
	if !found {
		return err
	}
	return &usageError{strings.Join(problems, "; ")}
}
