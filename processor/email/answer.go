package email

import (
	"context"
	"errors"
	"fmt"
	"net/textproto"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// throttledWait is how long an account is not used after a 421 that says "too many".
const throttledWait = time.Minute

// errAccountGone is the error of a job whose account was changed or removed after Admit. It defers
// the job.
var errAccountGone = processor.Deferred(0, "send mail: the account was changed or removed")

// answer turns the error of a step of sending into the error that decides about the job: permanent
// for a 5xx reply about the mail and for an address that the server can't take, otherwise retry.
// The code for a reply is, for example, SMTP_550. If ctx has ended before a reply, it is the error
// of ctx.
func answer(ctx context.Context, at step, err error) error {
	action, on5xx := "send mail", processor.Permanent
	if at == connecting {
		action, on5xx = "connect to mail server", processor.Retry
	}
	var reply *textproto.Error
	switch {
	case errors.Is(err, errNeedsUTF8):
		return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("%s: %w", action, err))
	case errors.As(err, &reply):
		code := "SMTP_" + strconv.Itoa(reply.Code)
		err = fmt.Errorf("%s: server replied %d %s", action, reply.Code, redact(reply.Msg))
		if reply.Code >= 500 {
			return on5xx(code, err)
		}
		return processor.Retry(code, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", action, ctx.Err())
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("%s: %w", action, err))
}

// verdict is answer for a job that was sent with an account: its error also says what the failure
// shows about the account, and so may decide differently about the job.
//
//	421 with "too many"            Throttled; the job is deferred, for another account
//	other 421                      Failure
//	552 on MAIL                    Neutral: the mail is too large
//	4xx, 5xx before or on MAIL     Failure; the job is retried, perhaps with another account
//	4xx, 5xx after MAIL            Neutral: they are about the recipient or the mail
//	SMTPUTF8 is not supported      Neutral
//	no connection, or no reply     Failure
//	no connection was free         Unused
//	the account has been removed   Unused, and the job is deferred
//	the end of a cancelled ctx     Neutral
func verdict(ctx context.Context, at step, err error) error {
	result := answer(ctx, at, err)
	var reply *textproto.Error
	switch {
	case errors.Is(err, errClosed):
		return errAccountGone
	case errors.Is(err, errBusy):
		return credential.Verdict(result, credential.Outcome{Kind: credential.Unused})
	case !errors.As(err, &reply):
		return result // credential.OutcomeOf says the same as the table
	case reply.Code != codeShuttingDown && at == sending, reply.Code == codeTooLarge:
		return credential.Verdict(result, credential.Outcome{Kind: credential.Neutral})
	case reply.Code == codeShuttingDown && strings.Contains(strings.ToLower(reply.Msg), "too many"):
		result = processor.Deferred(0, result.Error())
		return credential.Verdict(result, credential.Outcome{Kind: credential.Throttled, After: throttledWait})
	}
	result = processor.Retry("SMTP_"+strconv.Itoa(reply.Code), result)
	return credential.Verdict(result, credential.Outcome{Kind: credential.Failure})
}

func invalidPayload(err error) error {
	return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("compose mail: %w", err))
}

var address = regexp.MustCompile(`[^\s<>()"',;:]+@[^\s<>()"',;:]+`)

// redact returns a server's reply as one line without mail addresses, because errors are logged.
func redact(reply string) string {
	return address.ReplaceAllLiteralString(strings.ReplaceAll(reply, "\n", " "), "[address]")
}
