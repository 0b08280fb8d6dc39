package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// submitFile creates a group, appends the jobs of the file, and seals the group. If all lines are
// rejected, it cancels the group.
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
		return submitted{}, err
	}
	appended, err := s.send(ctx, s.root, a, accepted.ID, file)
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
		sealed, err := a.Seal(ctx, accepted.ID, nil)
		if err != nil {
			return submitted{}, s.withResumeHint(err, accepted.ID, appended)
		}
		accepted.Status, accepted.Counts = sealed.Status, sealed.Counts
	}
	out, err := newSubmitted(accepted, nil)
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

// withResumeHint adds a hint how to continue after an interrupted submission.
func (s *submission) withResumeHint(err error, group string, appended api.Appended) error {
	id := ""
	if s.id == "" && s.key == "" {
		id = "--id " + group
	}
	return withHint(err,
		"Group %s has accepted at least %d jobs and is not sealed. %s: no job counts twice. Or `bulkaction cancel %s`.",
		group, appended.Accepted, s.again(id), group)
}
