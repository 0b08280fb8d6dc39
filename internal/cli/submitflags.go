package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// flagValues has the values of the flags of submit.
type flagValues struct {
	typ, tenant, id, name, priority string
	maxRetries                      int
	jobTimeout                      time.Duration
	failureThreshold                float64
	runAt                           string
	basePriority                    float64
	aggregates                      []string

	fileFlags
	payloads     []string
	body         string
	noSeal, wait bool
	uniqueKeys   bool
}

func (v *flagValues) addFlags(f *pflag.FlagSet) {
	f.StringVar(&v.typ, "type", "", "job type: the processor that runs the jobs")
	f.StringVar(&v.tenant, "tenant", "", "tenant of the group (default: the group is its own tenant)")
	f.StringVar(&v.id, "id", "", "id of the group (default: a new one)")
	f.StringVar(&v.name, "name", "", "name to show")
	f.StringVar(&v.priority, "priority", "", "high, normal or low (default normal)")
	f.Float64Var(&v.basePriority, "base-priority", 0,
		"among the groups of a lane, with the server's BULKACTION_FAIR_QUEUE_POLICY=priority: higher comes first")
	f.IntVar(&v.maxRetries, "max-retries", 0, "retries of a failed job (default: the workers' setting)")
	f.DurationVar(&v.jobTimeout, "job-timeout", 0, "longest run of a job, such as 30s (default: the workers' setting)")
	f.Float64Var(&v.failureThreshold, "failure-threshold", 1,
		"share of failed jobs, above 0 to 1, at which the group is FAILED")
	f.StringVar(&v.runAt, "run-at", "",
		"start no job before: a time such as 2030-01-31T09:00:00Z, or a duration from now such as 10m;\n"+
			"with a duration the command can't be run again with the same --id or --idempotency-key")
	f.StringArrayVar(&v.aggregates, "aggregate", nil,
		"reduce the results, for example as=cost,op=sum,field=data.cost, or with over=failed the errors (repeatable)")

	v.addFileFlags(f)
	f.StringArrayVar(&v.payloads, "payload", nil, "a job's payload, JSON (repeatable)")
	f.StringVar(&v.body, "body", "",
		"submit this file unchanged as the body of POST /v1/groups; - is standard input")
	f.BoolVar(&v.uniqueKeys, "unique-keys", false,
		"refuse a job whose key another job of the group has; jobs GROUP --key KEY finds a job then")
	f.BoolVar(&v.noSeal, "no-seal", false, "do not seal the group: more jobs will be appended later")
	f.BoolVar(&v.wait, "wait", false, "wait until the group has ended")
}

// allowedWithBody are the flags that may be combined with --body, besides those that all commands
// have (isGlobal).
var allowedWithBody = map[string]bool{"body": true, "wait": true, "idempotency-key": true}

// check returns an error that names all wrong combinations of flags, and the wrong values among
// those that it checks: group and the server check the others.
func (v *flagValues) check(f *pflag.FlagSet) error {
	var errs []string
	addError := func(format string, args ...any) { errs = append(errs, fmt.Sprintf(format, args...)) }
	sources := 0
	for _, name := range []string{"file", "payload", "body"} {
		if f.Changed(name) {
			sources++
		}
	}
	switch {
	case sources > 1:
		addError("--file, --payload and --body exclude each other")
	case sources == 0 && !v.noSeal:
		addError("there are no jobs: give --file, --payload or --body, or --no-seal to append jobs later")
	}
	f.Visit(func(fl *pflag.Flag) {
		if f.Changed("body") && sources == 1 && !allowedWithBody[fl.Name] && !isGlobal(fl.Name) {
			addError("--%s cannot be combined with --body", fl.Name)
		}
	})
	if !f.Changed("body") && v.typ == "" {
		addError("--type is missing")
	}
	for _, id := range []struct{ flag, value string }{{"type", v.typ}, {"tenant", v.tenant}, {"id", v.id}} {
		if id.value != "" && !api.ValidID(id.value) {
			addError("--%s %q: must "+api.IDRule, id.flag, id.value)
		}
	}
	if !slices.Contains([]string{"", client.PriorityHigh, client.PriorityNormal, client.PriorityLow}, v.priority) {
		addError("--priority %q: must be high, normal or low", v.priority)
	}
	errs = append(errs, v.checkFile(f)...)
	if v.dryRun && v.wait {
		addError("--dry-run sends nothing, so --wait has nothing to wait for")
	}
	if v.wait && v.noSeal {
		addError("--wait would never end with --no-seal")
	}
	if len(errs) > 0 {
		return &usageError{strings.Join(errs, "; ")}
	}
	return nil
}

// group builds the request for a group from the flags. The values of --payload become its jobs.
func (v *flagValues) group(f *pflag.FlagSet) (client.Submission, error) {
	g := client.Submission{
		ID: v.id, Tenant: v.tenant, Name: v.name, Type: v.typ, Priority: v.priority, JobTimeout: v.jobTimeout,
		BasePriority: v.basePriority,
		Seal:         v.file == "" && !v.noSeal,
		UniqueKeys:   v.uniqueKeys,
	}
	if f.Changed("max-retries") {
		g.MaxRetries = &v.maxRetries
	}
	if f.Changed("failure-threshold") {
		g.FailureThreshold = &v.failureThreshold
	}
	if v.runAt != "" {
		at, err := parseRunAt(v.runAt, time.Now())
		if err != nil {
			return g, err
		}
		g.RunAt = &at
	}
	for _, text := range v.aggregates {
		a, err := parseAggregate(text)
		if err != nil {
			return g, err
		}
		g.Aggregate = append(g.Aggregate, a)
	}
	for i, p := range v.payloads {
		if !json.Valid([]byte(p)) {
			return g, usagef("--payload number %d is not JSON: write it in single quotes, for example "+
				`--payload '{"to": "a@example.com"}'`, i+1)
		}
		g.Jobs = append(g.Jobs, client.NewJob{Payload: json.RawMessage(p)})
	}
	return g, nil
}

func parseRunAt(text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(d).UTC(), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, usagef(
			"--run-at %q: write a time such as 2030-01-31T09:00:00Z, or a duration from now such as 10m",
			text,
		)
	}
	return at, nil
}

func parseAggregate(text string) (a client.Aggregate, err error) {
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(part, "=")
		key = strings.TrimSpace(key)
		if seen[key] {
			return a, usagef("--aggregate %q: %s is there twice; repeat the flag for another aggregate", text, key)
		}
		seen[key] = true
		switch key {
		case "as":
			a.As = value
		case "op":
			a.Op = value
		case "field":
			a.Field = value
		case "over":
			a.Over = value
		default:
			return a, usagef("--aggregate %q: the keys are as, op, field and over, not %q", text, key)
		}
	}
	if a.As == "" || a.Op == "" {
		return a, usagef("--aggregate %q: needs as=NAME and op=OPERATION", text)
	}
	return a, nil
}

// readBody reads the file of --body. With --wait it returns an error if the body neither seals the
// group nor announces a total, because then the group would not end.
func (v *flagValues) readBody(stdin io.Reader) ([]byte, error) {
	in, err := open(v.body, stdin)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	body, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", v.body, err)
	}
	var end struct {
		Seal  bool   `json:"seal"`
		Total *int64 `json:"total"`
	}
	if err := json.Unmarshal(body, &end); err != nil {
		return nil, usagef("--body %s is not the JSON of a group: %v", v.body, err)
	}
	if v.wait && !end.Seal && end.Total == nil {
		return nil, usagef(`--wait would never end: the body has neither "seal": true nor a "total"`)
	}
	return body, nil
}

// callOptions returns the options of the call that creates the group.
func (v *flagValues) callOptions() []client.CallOption {
	if v.key == "" {
		return nil
	}
	return []client.CallOption{client.WithIdempotencyKey(v.key)}
}
