package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// submitFile creates a group, appends the jobs of the file and, without --no-seal, seals the group.
// If all lines are rejected, it returns an error, and cancels the group unless the group has jobs.
func (s *submission) submitFile(ctx context.Context, a *client.API, g client.Submission) (submitted, error) {
	if s.strict {
		if err := s.requireGood(s.root); err != nil {
			return submitted{}, err
		}
	}
	file, err := s.open(s.root.In)
	if err != nil {
		return submitted{}, err
	}
	defer func() { _ = file.Close() }() // it was only read

	accepted, err := a.Submit(ctx, g, s.callOptions()...)
	if err != nil {
		return submitted{}, s.withRunAtHint(err)
	}
	before := api.Group{}
	if s.id != "" || s.key != "" {
		before, _ = a.Group(ctx, accepted.ID) // only for a note, so that an error does no harm
	}
	appended, err := s.send(ctx, s.root, a, accepted.ID, file)
	if err != nil {
		if refused := s.cancelRefused(ctx, a, accepted.ID, err); refused != nil {
			return submitted{}, refused
		}
		if errors.Is(err, client.ErrConflict) {
			return submitted{}, takesNoMore(err, accepted.ID, appended)
		}
		return submitted{}, s.withResumeHint(err, accepted.ID, appended)
	}
	if appended.Accepted == 0 && appended.RejectedTotal > 0 {
		if g, err := a.Group(ctx, accepted.ID); err != nil || g.Counts.Accepted > 0 {
			err := fmt.Errorf("no line was accepted; group %s keeps the jobs that it had", accepted.ID)
			return submitted{}, withHint(err, "Correct the lines and submit the file again.")
		}
		if _, err := a.Cancel(ctx, accepted.ID); err != nil {
			return submitted{}, fmt.Errorf("no line was accepted, and group %s could not be cancelled: %w",
				accepted.ID, err)
		}
		err := fmt.Errorf("no line was accepted, so group %s is cancelled", accepted.ID)
		return submitted{}, withHint(err,
			"Correct the lines and submit the file again, under another --id if you gave one.")
	}
	if !s.noSeal {
		sealed, err := a.Seal(ctx, accepted.ID, nil)
		if errors.Is(err, client.ErrConflict) {
			return submitted{}, takesNoMore(err, accepted.ID, appended)
		}
		if err != nil {
			return submitted{}, s.withResumeHint(err, accepted.ID, appended)
		}
		accepted.Status, accepted.Counts = sealed.Status, sealed.Counts
	}
	out, err := newSubmitted(accepted, nil)
	if note := s.noteExisting(ctx, a, before, out); note != "" {
		out.Warnings = append(out.Warnings, note)
	}
	if appended.Accepted == 0 {
		out.Warnings = append(out.Warnings, file.emptyNote())
	}
	if s.noSeal {
		out.Counts = nil
	}
	out.Accepted, out.Rejected, out.RejectedTotal = &appended.Accepted, appended.Rejected, appended.RejectedTotal
	return out, err
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

// noteExisting returns a text that says what the command has added to a group that had jobs before;
// "" if it had none. before is the group before the command. out has the counts after it, except
// with --no-seal: then noteExisting reads the group.
func (s *submission) noteExisting(ctx context.Context, a *client.API, before api.Group, out submitted) string {
	had, has := before.Counts.Accepted, out.Counts.Accepted
	if had == 0 {
		return ""
	}
	if s.noSeal {
		now, err := a.Group(ctx, out.ID)
		if err != nil {
			return ""
		}
		has = now.Counts.Accepted
	}
	text := fmt.Sprintf("Group %s had %s jobs already, and has %s now", out.ID, thousands(had), thousands(has))
	if had == has {
		text = fmt.Sprintf("Group %s has accepted these jobs before: nothing is new", out.ID)
	}
	if !s.noSeal && !before.Sealed {
		text += "; it is sealed now. `bulkaction append` adds jobs and does not seal"
	}
	return text + "."
}

// takesNoMore returns the error for a group that accepts no more jobs. Its hint is to use another
// id, because to repeat the command is no help.
func takesNoMore(err error, group string, appended api.Appended) error {
	text := fmt.Sprintf("group %s takes no more jobs", group)
	if e, ok := errors.AsType[*client.Error](err); ok && e.Problem.Code == api.Sealed {
		text = fmt.Sprintf("group %s is sealed: it takes no more jobs", group)
	} else if ok && e.Problem.Detail != "" {
		text = e.Problem.Detail
	}
	if appended.Accepted > 0 {
		text += fmt.Sprintf("; it has accepted %s jobs of this file", thousands(appended.Accepted))
	}
	return withHint(&refusedError{text, err}, "Submit the file as a group of its own, under another --id.")
}

// withResumeHint adds a hint to an error that interrupted a submission: how to continue.
func (s *submission) withResumeHint(err error, group string, appended api.Appended) error {
	id := ""
	if s.id == "" && s.key == "" {
		id = "--id " + group
	}
	return withHint(err,
		"Group %s has accepted at least %d jobs and is not sealed. %s: no job counts twice. Or `bulkaction cancel %s`.",
		group, appended.Accepted, s.again(id), group)
}
