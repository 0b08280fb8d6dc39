package cli

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
)

// usageError is the error for a mistake in the command line or in an environment variable. Its exit
// code is 2, as that of the flag library's own errors.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// flagError replaces the flag library's error about an invalid value by one that says which values
// are valid. It returns other errors unchanged, and that of a flag whose valid values it does not
// know.
func flagError(err error) error {
	if own, ok := errors.AsType[*usageError](err); ok {
		return own
	}
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag := bad.GetFlag()
	if values := flag.Annotations[valuesOf]; len(values) > 0 {
		return usagef("--%s %q: must be %s", flag.Name, bad.GetValue(), values[0])
	}
	must, ok := map[string]string{
		"float64":  "a number",
		"int":      "a whole number",
		"int64":    "a whole number",
		"uint64":   "a whole number from 0",
		"duration": "a duration such as 30s",
		"bool":     "true or false",
	}[flag.Value.Type()]
	if !ok {
		return err
	}
	return usagef("--%s %q: must be %s", flag.Name, bad.GetValue(), must)
}

// valuesOf is the annotation of a flag that says which values it takes.
const valuesOf = "values"

// setValues says which values a flag takes, for errors.
func setValues(flags *pflag.FlagSet, name, values string) {
	_ = flags.SetAnnotation(name, valuesOf, []string{values}) // it fails only for a flag that does not exist
}

// hintedError is an error with its own hint, which says what the user can do.
type hintedError struct {
	error
	hint string
}

func (e *hintedError) Unwrap() error { return e.error }

func withHint(err error, format string, args ...any) error {
	return &hintedError{err, fmt.Sprintf(format, args...)}
}

// refusedError is another error, such as one of the API, with a text of its own.
type refusedError struct {
	text string
	err  error
}

func (e *refusedError) Error() string { return e.text }
func (e *refusedError) Unwrap() error { return e.err }

// failedJobsError is the error for one or several groups that ended with failed jobs. Its exit code
// is 3.
type failedJobsError struct {
	group      string // "" if the jobs are of several groups
	failed, of int64
	lost       int64 // how many of them vanished from Redis
}

func (e *failedJobsError) Error() string {
	if e.group == "" {
		return counted(e.failed, "job") + " failed"
	}
	return fmt.Sprintf("group %s has ended: %s of %s jobs failed", e.group, thousands(e.failed), thousands(e.of))
}

// failedJobs returns a failedJobsError if the group has ended with failed jobs, otherwise nil.
func failedJobs(g api.Group) error {
	if !g.Status.Ended() || (g.Counts.Failed == 0 && g.Status != api.StatusFailed) {
		return nil
	}
	return &failedJobsError{
		group: g.ID, failed: g.Counts.Failed, of: g.Counts.Accepted,
		lost: g.FailuresByCode["LOST"] + g.FailuresByCode["PAYLOAD_LOST"],
	}
}

func (o IO) printError(err error) {
	o.Notef("bulkaction: %s", printable(err.Error()))
	o.printAdvice(err)
}

// printAdvice prints the hint for an error, which says what the user can do, if there is one.
func (o IO) printAdvice(err error) {
	if hint := advice(err); hint != "" {
		o.Notef("%s", hint)
	}
}

// isOtherServer reports whether err is the 404 of a server that does not know the call at all, such
// as a broker.
func isOtherServer(err error) bool {
	e, ok := errors.AsType[*client.Error](err)
	return ok && e.Status == http.StatusNotFound && strings.HasPrefix(e.Problem.Detail, "no such path")
}

func advice(err error) string {
	if e, ok := errors.AsType[*hintedError](err); ok {
		return e.hint
	}
	if e, ok := errors.AsType[*failedJobsError](err); ok && e.group != "" {
		if e.lost > 0 {
			return fmt.Sprintf("See them with `bulkaction failures %[1]s`. %[2]d of them vanished from Redis: their "+
				"errors say which must be submitted again in a new group. "+
				"`bulkaction retry %[1]s` runs the others again.",
				e.group, e.lost)
		}
		return fmt.Sprintf("See them with `bulkaction failures %[1]s`, run them again with `bulkaction retry %[1]s`.",
			e.group)
	}
	if err == nil {
		return ""
	}
	if hint := tlsAdvice(err); hint != "" {
		return hint
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "dial" {
		return "Is it running? Start it with `bulkaction dev`, or give its address with --api or BULKACTION_API."
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "Is this the API's port? The API is ingest, by default " + defaultAddress + " (--api or BULKACTION_API)."
	}
	e, ok := errors.AsType[*client.Error](err)
	if !ok {
		return ""
	}
	if isOtherServer(err) {
		return "This may be a broker; the API is ingest, by default http://127.0.0.1:8080 (--api or BULKACTION_API)."
	}
	switch e.Problem.Code {
	case api.NotAllowed:
		return "Use an API key with another role or tenant: docs/security.md says which role may make which calls."
	case api.WrongTenant:
		return "Leave out --tenant, which is then that of the API key, or use a key of the tenant."
	}
	switch e.Status {
	case http.StatusUnauthorized:
		return "Give an API key with --api-key-file, BULKACTION_API_KEY_FILE or BULKACTION_API_KEY."
	case http.StatusNotFound:
		if strings.HasPrefix(e.Problem.Detail, "operation ") {
			return "`bulkaction operation ls` lists those that the API key may see. Ended ones are kept for a week."
		}
		if strings.Contains(e.Problem.Detail, "callback") {
			return "`bulkaction callback set TENANT --url URL` stores an endpoint."
		}
		return "Check the group's id and the server's address (--api or BULKACTION_API). If it was sent " +
			"through Redis, `bulkaction rejected` says whether it was rejected, and why."
	case http.StatusTooManyRequests:
		if strings.Contains(e.Problem.Detail, "memory") {
			return `Raise Redis's maxmemory, or cancel groups: docs/operations.md, "Memory is full".`
		}
		return "The server has more work than it can take. Try again later."
	case http.StatusServiceUnavailable:
		return "The server can't reach its Redis, or is shutting down. Try again in a moment."
	case http.StatusInternalServerError:
		return "The server's log says more."
	}
	return ""
}

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
	cmd.SuggestionsMinimumDistance = 2
	near, path := cmd.SuggestionsFor(name), cmd.CommandPath()
	switch {
	case !cmd.HasAvailableSubCommands():
		return usagef("%s takes no argument %q", cmd.Name(), name)
	case len(near) > 0:
		return usagef("unknown command %q for %q; did you mean `%s %s`?", name, path,
			path, strings.Join(near, "` or `"+path+" "))
	case cmd.HasParent():
		return usagef("unknown command %q for %q; there are: %s", name, path, namesOf(cmd.Commands()))
	}
	return usagef("unknown command %q for %q; `bulkaction --help` lists the commands", name, path)
}

// namesOf returns the names of commands, without hidden ones.
func namesOf(commands []*cobra.Command) string {
	var names []string
	for _, c := range commands {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return strings.Join(names, ", ")
}

// namedByFlags returns an API error about fields with the names of the flags that set these fields.
// It returns err if no field belongs to a flag of cmd that was given.
func namedByFlags(cmd *cobra.Command, refused *client.Error, err error) error {
	found := false
	problems := make([]string, len(refused.Problem.Fields))
	for i, f := range refused.Problem.Fields {
		name := strings.TrimPrefix(strings.TrimPrefix(f.Field, "global."), "filter.")
		if name = strings.ReplaceAll(name, "_", "-"); name == "tags" {
			name = "tag"
		}
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
