// Package accountsfile reads the YAML files in which operators list the accounts of a processor,
// the files of secrets that they name, and other files that operators edit while processes use
// them, such as API keys. It collects all mistakes in a file, and detects that a file has changed.
// It hides what the accounts of all processors have in common.
package accountsfile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	maxFileBytes     = 1 << 20
	readableByOthers = fs.FileMode(0o004)
	writableByOthers = fs.FileMode(0o002)
)

// Digest identifies the content of files.
type Digest = [sha256.Size]byte

// Entry has the fields that every account has. Each processor embeds it in the entries of its own
// accounts file.
type Entry struct {
	ID          string  `yaml:"id"`
	Rate        *string `yaml:"rate"`        // such as 80/10m, or none
	Concurrency *string `yaml:"concurrency"` // a number, or unbounded
}

// Reader reads an accounts file and the secrets that it names. It continues after a mistake, so
// that all mistakes are reported together.
type Reader struct {
	path, what string
	digest     hash.Hash // of every file that was read, or of the error
	ids        map[string]bool
	mistakes   []error
}

// NewReader returns a reader of the accounts file at path. Errors call its accounts what, such as
// "push accounts".
func NewReader(path, what string) *Reader {
	return &Reader{path: path, what: what, digest: sha256.New(), ids: map[string]bool{}}
}

// Decode reads the accounts file into the struct that file points to. Unknown fields are mistakes.
// It returns false if the file can't be read, is not YAML, or may be read by other users of the
// system.
func (r *Reader) Decode(file any) bool {
	content, err := r.read(r.path)
	if err != nil {
		r.Mistake("%w", err)
		return false
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	var wrongFields *yaml.TypeError
	switch err := decoder.Decode(file); {
	case errors.As(err, &wrongFields):
		for _, text := range wrongFields.Errors { // the other fields were decoded
			text = goType.ReplaceAllString(hideValues(text), "into accounts")
			text = unknownField.ReplaceAllString(text, "unknown field $1")
			r.Mistake("%s", text)
		}
	case errors.Is(err, io.EOF):
	case err != nil:
		r.Mistake("%s", hideValues(err.Error()))
		return false
	}
	if decoder.Decode(new(yaml.Node)) == nil {
		r.Mistake("the file has a second document")
	}
	return true
}

// Text returns the content of a file that is not YAML and has no secret. It adds a mistake and
// returns false if it can't read the file, or if other users of the system may write it. They may
// read it.
func (r *Reader) Text() (content []byte, ok bool) {
	content, mode, err := readFile(r.path)
	if err == nil && mode&writableByOthers != 0 {
		err = fmt.Errorf("others may write it (mode %04o); run chmod o-w on it", mode.Perm())
	}
	r.note(r.path, mode, err, content)
	if err != nil {
		r.Mistake("%w", err)
	}
	return content, err == nil
}

// unknownField and goType match parts of the YAML library's errors that only help programmers; the
// reader replaces them.
var (
	unknownField = regexp.MustCompile(`field (\S+) not found in .*`)
	goType       = regexp.MustCompile(`into (\[\])?[a-z]+\.\w+$`)
)

// hideValues removes values from an error of the YAML library, because they may be secrets: values
// in backquotes, and names of anchors, since a password may begin with an asterisk.
func hideValues(text string) string {
	return anchor.ReplaceAllLiteralString(value.ReplaceAllLiteralString(text, ""), "anchor")
}

var (
	value  = regexp.MustCompile("(?s) `.*`")
	anchor = regexp.MustCompile(`(?s)anchor '.*'`)
)

// Mistake adds a mistake.
func (r *Reader) Mistake(format string, args ...any) {
	r.mistakes = append(r.mistakes, fmt.Errorf(format, args...))
}

// Err returns an error with all mistakes, or nil.
func (r *Reader) Err() error {
	if len(r.mistakes) == 0 {
		return nil
	}
	return fmt.Errorf("read %s in %s:\n%w", r.what, r.path, errors.Join(r.mistakes...))
}

// Digest returns a hash of everything that the reader has read, and of what it could not read. It
// differs when a file has changed.
func (r *Reader) Digest() Digest { return Digest(r.digest.Sum(nil)) }

// read returns the content of a file. It is an error if other users of the system may read the
// file.
func (r *Reader) read(path string) ([]byte, error) {
	content, mode, err := readFile(path)
	if err == nil && mode&readableByOthers != 0 {
		err = fmt.Errorf("%s: others may read it (mode %04o); run chmod o-r on it", path, mode.Perm())
	}
	r.note(path, mode, err, content)
	return content, err
}

// note adds to the digest what was read.
func (r *Reader) note(path string, mode fs.FileMode, err error, content []byte) {
	fmt.Fprintf(r.digest, "%q %o %v %q\n", path, mode, err, content)
}

func readFile(path string) ([]byte, fs.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	content, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(content) > maxFileBytes {
		err = fmt.Errorf("%s: is larger than %d bytes", path, maxFileBytes)
	}
	return content, info.Mode(), err
}

// Checker collects the mistakes of one entry.
type Checker struct {
	r     *Reader
	where string // the entry, for people
	bad   bool
}

// Check adds a mistake unless ok.
func (c *Checker) Check(ok bool, format string, args ...any) {
	if !ok {
		c.bad = true
		c.r.Mistake("%s: %w", c.where, fmt.Errorf(format, args...))
	}
}

// OK says that the entry has no mistake so far.
func (c *Checker) OK() bool { return !c.bad }

// Secret returns the content of the file that a field of an entry names. A relative name is
// relative to the folder of the accounts file. If OK is false afterwards, the content must not be
// used.
func (c *Checker) Secret(field, name string) []byte {
	c.Check(name != "", "%s is missing", field)
	if name == "" {
		return nil
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(c.r.path), name)
	}
	content, err := c.r.read(name)
	c.Check(err == nil, "%s: %w", field, err)
	return content
}

// Entry returns a Checker for the entry with index i in the list with this name.
func (r *Reader) Entry(list string, i int) *Checker {
	return &Checker{r: r, where: fmt.Sprintf("%s entry %d", list, i+1)}
}

var accountID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// Account checks the fields that every account has, of the entry with index i in its list. kind is
// the name of the list in mistakes, such as "fcm".
func (r *Reader) Account(kind string, i int, e Entry) (*Checker, credential.Account) {
	if kind != "" {
		kind += " "
	}
	c := &Checker{r: r, where: fmt.Sprintf("%saccount %d", kind, i+1)}
	c.Check(accountID.MatchString(e.ID), "id is not 1 to 128 letters, digits, dots, underscores or dashes")
	if !c.bad {
		c.where = kind + "account " + e.ID
		c.Check(!r.ids[e.ID], "the id is used twice")
		r.ids[e.ID] = true
	}
	account := credential.Account{ID: e.ID}
	if e.Rate != nil {
		account.Rate = new(credential.Rate)
		err := account.Rate.UnmarshalText([]byte(*e.Rate))
		c.Check(err == nil, "rate: %w", err)
	}
	if e.Concurrency != nil {
		err := account.Concurrency.UnmarshalText([]byte(*e.Concurrency))
		c.Check(err == nil, "concurrency: %w", err)
	}
	return c, account
}

// File is an accounts file, with the secrets that it names, that can be read again when it changes.
type File struct {
	path, what string
	load       func(r *Reader) (use func() error)

	mu        sync.Mutex // guards the fields below, and is held while the files are read
	closed    bool
	wasRead   bool
	seen      Digest // what was read last, good or bad
	forReport report // what RereadForJob has found and Reload has not returned
}

type report struct {
	changed bool
	err     error
}

// NewFile returns an accounts file, without reading it. Errors call its accounts what. load parses
// the file with r, and adds mistakes to r. It returns the function use, which puts the accounts
// into use; use is called only if the files have changed and have no mistake.
func NewFile(path, what string, load func(r *Reader) (use func() error)) *File {
	return &File{path: path, what: what, load: load}
}

// Reload reads the files, and puts the accounts into use if there is no mistake. It returns false
// and nil if the files have not changed since the last call, so that a mistake is returned only
// once. An error of the function use is no mistake in the files: the next call tries again.
func (f *File) Reload() (changed bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.reload()
	if !r.changed && r.err == nil {
		r = f.forReport
	}
	f.forReport = report{}
	return r.changed, r.err
}

// RereadForJob reads the files again for a job that was lent an account that this process does not
// know. The next call of Reload returns the result.
func (f *File) RereadForJob() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.reload(); r.changed || r.err != nil {
		f.forReport = r
	}
}

// Knows reports whether this process knows an account that a job was lent, by calling known. If
// known returns false, Knows reads the files again and calls known once more.
func (f *File) Knows(known func() bool) bool {
	if known() {
		return true
	}
	f.RereadForJob()
	return known()
}

// Close stops reading, and then calls last.
func (f *File) Close(last func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	last()
}

// reload does the work of Reload and RereadForJob, and returns the result. The caller holds the
// lock.
func (f *File) reload() report {
	if f.closed || f.path == "" {
		return report{}
	}
	r := NewReader(f.path, f.what)
	use := f.load(r)
	digest := r.Digest()
	if f.wasRead && digest == f.seen {
		return report{}
	}
	f.wasRead, f.seen = true, digest
	if err := r.Err(); err != nil {
		return report{err: err}
	}
	if err := use(); err != nil {
		f.wasRead = false
		return report{err: err}
	}
	return report{changed: true}
}

// interval is the time between two looks at the files.
const interval = 10 * time.Second

// Watch calls reload every ten seconds, and at each signal from the channel now, until ctx ends.
// reload reads the files again and returns whether the accounts in use have changed. Its error,
// which Watch logs, means that the old accounts stay in use. what is the job type of the accounts,
// for the log.
func Watch(ctx context.Context, log *slog.Logger, what string, now <-chan os.Signal, reload func() (bool, error)) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-now:
		}
		switch changed, err := reload(); {
		case err != nil:
			log.Error("accounts could not be read again, the old accounts stay in use", "type", what, "error", err)
		case changed:
			log.Info("accounts changed", "type", what)
		}
	}
}
