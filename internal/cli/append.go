package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/joblines"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// appended is the output of append with --json.
type appended struct {
	ID string `json:"id"`
	api.Appended
}

func newAppend(r *Root) *cobra.Command {
	var v fileFlags
	cmd := &cobra.Command{
		Use:   "append GROUP --file PATH",
		Short: "Append the jobs of a file to a group that is not sealed",
		Long: "Append the jobs of a file to a group that is not sealed, such as one of `submit --no-seal`. The file\n" +
			"is as that of submit. The same command can be run again after an interruption: the same file is\n" +
			"added to a group once, also if `submit` has added it; with another --idempotency-key it is added\n" +
			"again.\n" +
			"`bulkaction seal GROUP` then says that no more jobs come.",
		Example: "  bulkaction append promo-7 --file recipients.csv\n  bulkaction seal promo-7",
		Args:    requireID("group"),
	}
	v.addFileFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		errs := v.checkFile(cmd.Flags())
		if v.file == "" {
			errs = []string{"there are no jobs: give --file"}
		}
		if len(errs) > 0 {
			return &usageError{strings.Join(errs, "; ")}
		}
		a, err := r.patientAPI()
		if err != nil {
			return err
		}
		return v.append(cmd.Context(), r, a, args[0])
	}
	return cmd
}

func (v *fileFlags) append(ctx context.Context, r *Root, a *client.API, group string) error {
	v.hasUniqueKeys = func() (bool, error) {
		for _, err := range a.Jobs(ctx, group, client.JobFilter{Key: "-"}) { // refused without unique_keys
			if e, ok := errors.AsType[*client.Error](err); ok && e.Status == http.StatusUnprocessableEntity {
				return false, nil
			}
			return true, err
		}
		return true, nil
	}
	if v.dryRun {
		return v.checkOnly(r, nil)
	}
	if v.strict {
		if err := v.requireGood(r); err != nil {
			return err
		}
	}
	file, err := v.open(r.In)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	before, err := a.Group(ctx, group)
	var answer api.Appended
	if err == nil {
		answer, err = v.send(ctx, r, a, group, file)
	}
	if isNotFound(err) {
		return withHint(err, "`bulkaction groups ls` lists the groups; `bulkaction submit --id %s --no-seal "+
			"--type TYPE` creates this one.", group)
	}
	if errors.Is(err, client.ErrConflict) {
		return takesNoMore(err, group, answer)
	}
	if err != nil {
		return withHint(err, "Group %s has accepted at least %d of the jobs. %s: no job counts twice.",
			group, answer.Accepted, v.again(""))
	}
	if answer.Rejected == nil {
		answer.Rejected = []api.LineError{}
	}
	row := counted(answer.Accepted, "job") + " accepted"
	if now, err := a.Group(ctx, group); err == nil && answer.Accepted > 0 &&
		now.Counts.Accepted == before.Counts.Accepted {
		row += " before: nothing is new"
	}
	err = r.show(appended{group, answer}, func(t table) { t.row(group, row) })
	if err != nil {
		return err
	}
	if answer.Accepted == 0 && answer.RejectedTotal == 0 && !r.JSON {
		r.Notef("%s", file.emptyNote())
	}
	if answer.RejectedTotal > 0 {
		return withHint(fmt.Errorf("%s rejected; %s accepted", counted(answer.RejectedTotal, "line"),
			counted(answer.Accepted, "other job")),
			"Correct the rejected lines and append them in a file of their own.")
	}
	return nil
}

func newSeal(r *Root) *cobra.Command {
	var total int64
	cmd := &cobra.Command{
		Use:   "seal GROUP [--total N]",
		Short: "Say that no more jobs come to a group, so that it can end",
		Long: "Say that no more jobs come to a group, so that it can end. With --total, the group still takes jobs\n" +
			"until it has that many. A group that is sealed already stays as it is.",
		Args: requireID("group"),
	}
	cmd.Flags().Int64Var(&total, "total", 0, "number of jobs of the whole group (default: those that it has now)")
	cmd.RunE = ask(r, func(ctx context.Context, a *client.API, args []string) (api.Accepted, error) {
		if !cmd.Flags().Changed("total") {
			return a.Seal(ctx, args[0], nil)
		}
		if total < 0 {
			return api.Accepted{}, usagef("--total %d: must be 0 or more", total)
		}
		return a.Seal(ctx, args[0], &total)
	}, func(t table, accepted api.Accepted) {
		c := accepted.Counts
		ended := fmt.Sprintf("%s of %s jobs ended", thousands(c.Ended()), thousands(c.Accepted))
		t.row(accepted.ID, accepted.Status, ended)
	})
	return cmd
}

// maxShownRejects is how many rejected lines are printed at most.
const maxShownRejects = 20

// send appends the jobs of a file to a group. It shows a progress bar, and prints rejected lines.
func (v *fileFlags) send(
	ctx context.Context, r *Root, a *client.API, group string, file *jobFile,
) (api.Appended, error) {
	m := &progressReader{Reader: file, size: file.size, bar: r.newProgress()}
	do := a.AppendNDJSON
	if file.csv {
		do = a.AppendCSV
	}
	key := v.key
	if key == "" {
		// This key makes it safe to run the command again with the same file and group: no job is
		// stored twice while the server remembers the requests (RETENTION_MESSAGE_IDS). If the file
		// was changed, each changed part is stored again.
		key = "bulkaction submit " + group
	}
	appended, err := do(ctx, group, m, append(file.opts, client.WithIdempotencyKey(key))...)
	m.bar.stop()
	r.printRejected(appended.Rejected, appended.RejectedTotal)
	return appended, err
}

// printRejected prints the first rejected lines to Err, at most maxShownRejects, and how many
// others there are. With --json it prints nothing, because the JSON has them.
func (r *Root) printRejected(lines []api.LineError, total int64) {
	if r.JSON {
		return
	}
	for _, l := range lines[:min(len(lines), maxShownRejects)] {
		r.Notef("line %d: %s", l.Line, printable(l.Error))
	}
	if more := total - maxShownRejects; more > 0 {
		r.Notef("and %s", counted(more, "more line"))
	}
}

// requireGood checks the whole file, for --strict, before anything is sent. If lines are wrong, it
// prints them and returns an error.
func (v *fileFlags) requireGood(r *Root) error {
	file, err := v.open(r.In)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	found, err := file.check(v.hasUniqueKeys)
	if err != nil || found.RejectedTotal == 0 {
		return err
	}
	if r.JSON {
		if err := r.Print(found); err != nil {
			return err
		}
	}
	r.printRejected(found.Rejected, found.RejectedTotal)
	return withHint(fmt.Errorf("%s has %s, and --strict sends nothing then", v.file,
		counted(found.RejectedTotal, "wrong line")),
		"Correct the lines, or leave out --strict to send the %s.", counted(found.Jobs, "other job"))
}

// checkOnly carries out --dry-run: it checks the jobs of the file, prints the result and sends
// nothing. Without a file, the jobs are those of --payload, which were checked before.
func (v *fileFlags) checkOnly(r *Root, payloads []client.NewJob) error {
	found := jobCheck{}
	for _, p := range payloads {
		found.add(p.Payload.(json.RawMessage), 0, nil) // group has made it
	}
	if v.file != "" {
		file, err := v.open(r.In)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // it was only read
		if found, err = file.check(v.hasUniqueKeys); err != nil {
			return err
		}
	}
	r.printRejected(found.Rejected, found.RejectedTotal)
	err := r.show(found, func(t table) {
		t.row("Jobs", thousands(found.Jobs))
		t.row("Wrong lines", thousands(found.RejectedTotal))
		for i, p := range found.FirstPayloads {
			t.row(fmt.Sprintf("Payload %d", i), truncate(string(p), 200))
		}
	})
	if err != nil {
		return err
	}
	if !r.JSON {
		r.Notef("Nothing was sent (--dry-run).")
	}
	if found.RejectedTotal > 0 {
		return withHint(fmt.Errorf("the file has %s", counted(found.RejectedTotal, "wrong line")),
			"Correct them; without --strict, the other lines would be sent.")
	}
	return nil
}

// progressReader shows on a bar how much was read.
type progressReader struct {
	io.Reader
	size, bytes, lines int64
	bar                *progress
}

func (m *progressReader) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.lines += int64(bytes.Count(p[:n], []byte("\n")))
	m.bytes += int64(n)
	note := thousands(m.lines) + " lines"
	if m.size > 0 {
		note += fmt.Sprintf(" (%d%%)", 100*m.bytes/m.size)
	}
	m.bar.show("sending", "", note, m.bytes, m.size)
	return n, err
}

// again returns a hint how to run the command again after an interruption.
func (v *fileFlags) again(moreFlags string) string {
	text := "Run the same command again"
	if moreFlags != "" {
		text += ", with " + moreFlags
	}
	if v.file == fromStdin {
		return text + " and the same input, to continue"
	}
	return strings.TrimSpace(text) + " and an unchanged file, to continue"
}

const fromStdin = "-"

// fileFlags has the flags for a file of jobs, and for how to read it. submit and append share them.
type fileFlags struct {
	file, format, delimiter, types, keyColumn, key string
	dryRun, strict                                 bool
	// hasUniqueKeys says whether the group takes each key once. It may ask the API.
	hasUniqueKeys func() (bool, error)
}

func (v *fileFlags) addFileFlags(f *pflag.FlagSet) {
	f.StringVar(&v.file, "file", "", "stream jobs from this .ndjson, .jsonl or .csv file; - is standard input")
	f.StringVar(&v.format, "format", "", "ndjson or csv (default: by the file's name; ndjson for standard input)")
	f.StringVar(&v.delimiter, "delimiter", "", `character between the fields of CSV: "," ";" "|" or \t (default ",")`)
	f.StringVar(&v.types, "types", "",
		"types of columns of CSV that are not strings, for example age:number,vip:boolean;\n"+
			"an empty field of them is null")
	f.StringVar(&v.keyColumn, "key-column", "",
		"column of CSV with the jobs' keys, such as the recipient's id: results and failures show them")
	f.BoolVar(&v.strict, "strict", false,
		"send nothing if a line of the file is wrong (default: send the other lines)")
	f.BoolVar(&v.dryRun, "dry-run", false, "check and count the jobs, and send nothing")
	f.StringVar(&v.key, "idempotency-key", "",
		"the same key and the same jobs are accepted once (default: derived from the group's id)")
}

var needFile = []string{"format", "delimiter", "types", "key-column", "strict"}

func (v *fileFlags) checkFile(f *pflag.FlagSet) (errs []string) {
	for _, name := range needFile {
		if f.Changed(name) && v.file == "" {
			errs = append(errs, fmt.Sprintf("--%s needs --file", name))
		}
	}
	if v.strict && v.file == fromStdin {
		errs = append(errs, "--strict reads the file twice, so --file can't be standard input")
	}
	if f.Changed("idempotency-key") && !messages.ValidIdempotencyKey(v.key) {
		errs = append(errs, "--idempotency-key must be 1 to 255 bytes of visible ASCII")
	}
	return errs
}

// isCSV says whether --file is CSV; otherwise it is NDJSON.
func (v *fileFlags) isCSV() (bool, error) {
	format := v.format
	if format == "" && v.file == fromStdin {
		format = "ndjson"
	}
	if format == "" {
		format = strings.TrimPrefix(strings.ToLower(filepath.Ext(v.file)), ".")
	}
	switch format {
	case "csv":
		return true, nil
	case "ndjson", "jsonl":
		return false, nil
	case "json":
		return false, usagef("%s: give --format ndjson if each line is one job, {\"payload\": ...}; "+
			"a JSON array of payloads becomes that with: jq -c '.[] | {payload: .}'", v.file)
	case "xlsx", "xls", "xlsm", "ods", "numbers":
		return false, usagef("%s is a workbook: export the table as CSV in UTF-8 and give that file", v.file)
	}
	return false, usagef("unknown format of %s: give --format ndjson or --format csv", v.file)
}

// jobFile is a file of jobs. The caller closes it.
type jobFile struct {
	io.Reader
	io.Closer
	name  string
	size  int64 // bytes; 0 if it is unknown
	csv   bool
	table records.TableOptions
	opts  []client.CallOption // how the server reads it
}

// open opens the file of jobs. It also checks the flags of the format and the header of CSV, so
// that the caller creates no group for a file that can't be read.
func (v *fileFlags) open(stdin io.Reader) (*jobFile, error) {
	j := &jobFile{name: v.file}
	var err error
	if j.csv, err = v.isCSV(); err != nil {
		return nil, err
	}
	if !j.csv && (v.delimiter != "" || v.types != "" || v.keyColumn != "") {
		return nil, usagef("--delimiter, --types and --key-column are for CSV, and %s is NDJSON: "+
			"give --format csv if it is CSV", v.file)
	}
	if j.table.Delimiter, err = records.ParseDelimiter(v.delimiter); err != nil {
		return nil, usagef("--delimiter %v", err)
	}
	if j.table.Types, err = records.ParseColumnTypes(v.types); err != nil {
		return nil, usagef("--types %v", err)
	}
	if j.table.Delimiter != 0 {
		j.opts = append(j.opts, client.WithDelimiter(j.table.Delimiter))
	}
	if v.types != "" {
		j.opts = append(j.opts, client.WithColumnTypes(v.types))
	}
	if j.table.Key = v.keyColumn; v.keyColumn != "" {
		j.opts = append(j.opts, client.WithKeyColumn(v.keyColumn))
	}
	in, err := open(v.file, stdin)
	if err != nil {
		return nil, err
	}
	j.Reader, j.Closer, j.size = in, in, size(in)
	if err := j.checkStart(); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return j, nil
}

func (j *jobFile) emptyNote() string {
	if j.csv {
		return fmt.Sprintf("The file %s has no rows after its header, so it adds no jobs.", j.name)
	}
	return fmt.Sprintf("The file %s has no lines, so it adds no jobs.", j.name)
}

// checkStart reads the header row of CSV and checks it, or checks the first line of NDJSON. Afterwards
// j.Reader begins at its start again.
func (j *jobFile) checkStart() error {
	var head bytes.Buffer
	src, line, err := joblines.New(io.TeeReader(j.Reader, &head), j.csv, j.table, messages.Decoder{})
	if err == nil && !j.csv {
		_, line, _, err = src.Next()
	}
	j.Reader = io.MultiReader(&head, j.Reader)
	_, badLine := errors.AsType[*joblines.LineError](err)
	if badLine || !j.csv && errors.Is(err, io.EOF) {
		return nil
	}
	var bad *records.HeaderError
	switch {
	case errors.Is(err, records.ErrNoHeader):
		return withHint(fmt.Errorf("read %s: the file is empty", j.name),
			"A CSV file begins with a header row, which names the payload's fields.")
	case errors.As(err, &bad) && bad.Option != "":
		bad.Option = strings.ReplaceAll(bad.Option, "_", "-")
		return usagef("%s: --%v", j.name, bad)
	case errors.As(err, &bad) && bad.Excel:
		return withHint(fmt.Errorf("read %s: %w", j.name, err),
			"Remove this line and give --delimiter %s.", shellQuoted(bad.Looks))
	case errors.As(err, &bad) && bad.Looks != 0:
		return withHint(fmt.Errorf("read %s: %w", j.name, err),
			"Give --delimiter %s, or --delimiter ',' if it is right.", shellQuoted(bad.Looks))
	case errors.As(err, &bad):
		return withHint(fmt.Errorf("read %s: %w", j.name, err), "Correct the file and run the command again.")
	case err != nil:
		return fmt.Errorf("read %s, line %d: %w", j.name, line, err)
	}
	return nil
}

// shellQuoted returns a CSV delimiter as it must be written in a shell.
func shellQuoted(delimiter byte) string {
	if delimiter == '\t' {
		return `'\t'`
	}
	return "'" + string(rune(delimiter)) + "'"
}

// jobCheck is the result of checking all jobs of a file, or of --payload, without sending them.
// --dry-run prints it; --strict with --json does if lines are wrong.
type jobCheck struct {
	Jobs          int64             `json:"jobs"`
	FirstPayloads []json.RawMessage `json:"first_payloads"`     // the first 3
	Rejected      []api.LineError   `json:"rejected,omitempty"` // the first 1,000
	RejectedTotal int64             `json:"rejected_total,omitempty"`
}

const (
	maxFirstPayloads = 3
	maxListedRejects = 1000
)

// add counts a job, or a line that is refused.
func (c *jobCheck) add(payload json.RawMessage, line int64, bad error) {
	switch {
	case bad == nil && len(c.FirstPayloads) < maxFirstPayloads:
		c.FirstPayloads = append(c.FirstPayloads, bytes.Clone(payload))
	case bad != nil && len(c.Rejected) < maxListedRejects:
		c.Rejected = append(c.Rejected, api.LineError{Line: line, Error: bad.Error()})
	}
	if bad != nil {
		c.RejectedTotal++
		return
	}
	c.Jobs++
}

// check reads the file to its end, as the server does, and returns how many jobs and wrong lines it
// has, and the first of each. It asks hasUniqueKeys once, if a key is repeated. It does not know the
// keys of jobs that the group has already.
func (j *jobFile) check(hasUniqueKeys func() (bool, error)) (jobCheck, error) {
	c := jobCheck{FirstPayloads: []json.RawMessage{}}
	src, line, err := joblines.New(j.Reader, j.csv, j.table, messages.Decoder{})
	if err != nil { // the header was checked before
		return c, fmt.Errorf("read %s, line %d: %w", j.name, line, err)
	}
	lineOf, unique := map[string]int64{}, false // the first line with each key; nil: keys may be repeated
	for {
		job, line, _, err := src.Next()
		_, refused := errors.AsType[*joblines.LineError](err)
		switch {
		case errors.Is(err, io.EOF):
			return c, nil
		case err != nil && !refused:
			return c, fmt.Errorf("read %s, line %d: %w", j.name, line, err)
		}
		if before, repeated := lineOf[job.Key]; err == nil && job.Key != "" && lineOf != nil {
			if repeated && !unique {
				if unique, err = hasUniqueKeys(); err != nil {
					return c, err
				}
			}
			switch {
			case repeated && unique:
				err = fmt.Errorf("key: line %d has it, too, and the group has unique_keys", before)
			case repeated: // and may be
				lineOf = nil
			default:
				lineOf[job.Key] = line
			}
		}
		c.add(job.Payload, line, err)
	}
}

// open opens a file, or standard input, which closing the result does not close.
func open(path string, stdin io.Reader) (io.ReadCloser, error) {
	if path == fromStdin {
		return io.NopCloser(stdin), nil
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return nil, withHint(err, "Let this user read the file, or give it as standard input with -.")
	}
	if err != nil {
		return nil, withHint(err, "Give the path of a file, or - for standard input.")
	}
	if info, err := f.Stat(); err != nil || info.IsDir() {
		return nil, errors.Join(fmt.Errorf("open %s: is a directory: give the path of a file", path), err, f.Close())
	}
	return f, nil
}

// size returns the size of a regular file in bytes; 0 if the size is unknown.
func size(in io.Reader) int64 {
	f, ok := in.(interface{ Stat() (fs.FileInfo, error) })
	if !ok {
		return 0
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}
