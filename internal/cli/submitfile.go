package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// maxShownRejects is the largest number of rejected lines that are printed.
const maxShownRejects = 20

// submitFile creates a group, appends the jobs of the file, and seals the group. If all lines are
// rejected, it cancels the group.
func (s *submission) submitFile(ctx context.Context, a *client.API, g client.Group) (submitted, error) {
	csv, err := s.isCSV()
	if err != nil {
		return submitted{}, err
	}
	in, err := open(s.file, s.root.In)
	if err != nil {
		return submitted{}, err
	}
	defer in.Close()
	m := &progressReader{Reader: in, size: size(in)}
	if csv {
		if m.Reader, err = s.requireContent(in); err != nil {
			return submitted{}, err
		}
	}

	accepted, err := a.Submit(ctx, g)
	if err != nil {
		return submitted{}, err
	}
	appended, err := s.append(ctx, a, accepted.ID, m, csv)
	if err != nil {
		if refused := s.cancelRefused(ctx, a, accepted.ID, err); refused != nil {
			return submitted{}, refused
		}
		return submitted{}, s.withResumeHint(err, accepted.ID, appended)
	}
	if appended.Accepted == 0 && appended.RejectedTotal > 0 {
		if _, err := a.Cancel(ctx, accepted.ID); err != nil {
			return submitted{}, fmt.Errorf("none of %d lines was accepted, and group %s could not be cancelled: %w",
				appended.RejectedTotal, accepted.ID, err)
		}
		return submitted{}, fmt.Errorf("none of %d lines was accepted, so group %s is cancelled",
			appended.RejectedTotal, accepted.ID)
	}
	if !s.noSeal {
		if accepted, err = a.Seal(ctx, accepted.ID, nil); err != nil {
			return submitted{}, s.withResumeHint(err, g.ID, appended)
		}
	}
	out, err := newSubmitted(accepted, nil)
	out.Accepted, out.Rejected, out.RejectedTotal = &appended.Accepted, appended.Rejected, appended.RejectedTotal
	return out, err
}

// append sends the file, shows a progress bar, and prints rejected lines.
func (s *submission) append(
	ctx context.Context, a *client.API, group string, m *progressReader, csv bool,
) (api.Appended, error) {
	m.bar = s.root.newProgress()
	do := a.AppendNDJSON
	if csv {
		do = a.AppendCSV
	}
	// With this key, no job is stored twice if the command runs again with the same file for the
	// same group while the server remembers the requests (RETENTION_MESSAGE_IDS). Of a changed
	// file, each changed part is stored again.
	appended, err := do(ctx, group, m, client.WithIdempotencyKey("bulkaction submit "+group))
	m.bar.stop()
	if !s.root.JSON {
		for _, l := range appended.Rejected[:min(len(appended.Rejected), maxShownRejects)] {
			s.root.Notef("line %d: %s", l.Line, printable(l.Error))
		}
		if more := appended.RejectedTotal - maxShownRejects; more > 0 {
			s.root.Notef("and %s more lines", thousands(more))
		}
	}
	return appended, err
}

// requireContent returns an error if a CSV file is empty, so that no group is created for it.
// Otherwise it returns a reader of the whole file.
func (s *submission) requireContent(in io.Reader) (io.Reader, error) {
	const enough = 64 << 10 // bytes of white space; after that the server decides
	r := bufio.NewReader(in)
	for blank := []byte{}; ; {
		b, err := r.ReadByte()
		switch {
		case errors.Is(err, io.EOF):
			return nil, withHint(fmt.Errorf("submit %s: the file is empty", s.file),
				"A CSV file begins with a header row, which names the payload's fields.")
		case err != nil:
			return nil, fmt.Errorf("read %s: %w", s.file, err)
		}
		if blank = append(blank, b); !strings.ContainsRune(" \t\r\n", rune(b)) || len(blank) == enough {
			// with the white space, since errors name line numbers
			return io.MultiReader(bytes.NewReader(blank), r), nil
		}
	}
}

// cancelRefused cancels the group if the server refused all of its jobs for good, for example
// because of a bad header row. It then returns an error with a hint. In any other case, also if the
// cancellation fails, it returns nil.
func (s *submission) cancelRefused(ctx context.Context, a *client.API, group string, err error) error {
	if e, ok := errors.AsType[*client.Error](err); !ok || e.Status != http.StatusUnprocessableEntity {
		return nil
	}
	if g, lost := a.Group(ctx, group); lost != nil || g.Counts.Accepted > 0 {
		return nil
	}
	if _, lost := a.Cancel(ctx, group); lost != nil {
		return nil
	}
	return withHint(fmt.Errorf("%w; group %s has no jobs and is cancelled", err, group),
		"Correct %s and submit it as a new group.", s.file)
}

// withResumeHint adds a hint how to continue after an interrupted submission.
func (s *submission) withResumeHint(err error, group string, appended api.Appended) error {
	again := "Run the same command again"
	if s.id == "" {
		again += fmt.Sprintf(", with --id %s", group)
	}
	if s.file == fromStdin {
		again += " and the same input, to continue"
	} else {
		again += " and an unchanged file, to continue"
	}
	return withHint(err,
		"Group %s has accepted at least %d jobs and is not sealed. %s: no job counts twice. Or `bulkaction cancel %s`.",
		group, appended.Accepted, again, group)
}

// size returns the size of a regular file in bytes; 0 if it is unknown.
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
