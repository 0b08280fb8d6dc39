package accountsfile

import "sync"

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
