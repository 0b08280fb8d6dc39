package email

import (
	"errors"
	"fmt"
	stdmail "net/mail"
	"strings"
	"unicode/utf8"

	"github.com/wneessen/go-mail"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/processor"
)

const (
	maxAddressBytes = 254 // without the angle brackets (RFC 5321, 4.5.3.1.3)
	maxSubjectBytes = 900 // a header line may have 998 bytes
	defaultBody     = "This message has no text.\n"
)

// message is a mail that is ready to be sent.
type message struct {
	result  Result // of the job when the mail is sent
	to      string // the recipient as the RCPT command needs it
	utf8    bool   // the address is not ASCII, so the server must support SMTPUTF8
	content *mail.Msg
}

// request is the content of a payload.
type request struct {
	to            *stdmail.Address
	subject, body string
}

// parsePayload reads a payload. If no mail can be made from it, the error says why, and contains no
// part of the payload.
func parsePayload(content []byte) (request, error) {
	var payload struct {
		To      string `json:"to"`
		Subject string `json:"subject"`
		Body    string `json:"body"`
	}
	if err := jsonscan.Decode("", content, &payload); err != nil {
		return request{}, err
	}
	to, err := stdmail.ParseAddress(payload.To)
	switch {
	case payload.To == "":
		return request{}, errors.New("to is missing")
	case err != nil:
		return request{}, errors.New("to is not an e-mail address")
	case len(to.Address) > maxAddressBytes || len(to.Name) > maxAddressBytes:
		return request{}, fmt.Errorf("to has a name or an address of more than %d bytes", maxAddressBytes)
	case len(payload.Subject) > maxSubjectBytes:
		return request{}, fmt.Errorf("subject is longer than %d bytes", maxSubjectBytes)
	case strings.ContainsFunc(payload.Subject, isControl):
		return request{}, errors.New("subject has a line break or another control character")
	}
	return request{to, payload.Subject, payload.Body}, nil
}

// compose makes the job's mail. An empty subject or body gets a default text. Nothing in a payload
// can add a header: the address was parsed and is formatted again, a subject with control
// characters was refused, and the body is encoded.
func (p *Processor) compose(job processor.Job, r request) *message {
	if r.subject == "" {
		r.subject = "Message from " + p.senderName()
	}
	if r.body == "" {
		r.body = defaultBody
	}

	id := messageID(job, p.idSender)
	content := mail.NewMsg(mail.WithNoDefaultUserAgent())
	content.FromMailAddress(p.from)
	content.ToMailAddress(r.to)
	content.Subject(r.subject)
	content.SetDate()
	content.SetMessageIDWithValue(id)
	content.SetBodyString(mail.TypeTextPlain, r.body)
	return &message{
		result: Result{MessageID: "<" + id + ">", To: r.to.Address, Subject: r.subject},
		to:     path(r.to.Address), utf8: !isASCII(r.to.Address), content: content,
	}
}

func (p *Processor) senderName() string {
	if p.from.Name != "" {
		return p.from.Name
	}
	return p.from.Address
}

// messageID returns a Message-ID: the job's id, @, and the sender's domain. The part before @ may
// not begin with a dot or have two dots in a row, and the group of a job that another program has
// stored may have any byte. Such dots and bytes become ~ and two hex digits. Ids of jobs contain no
// ~, so different jobs never share a Message-ID.
func messageID(job processor.Job, sender string) string {
	id := job.ID()
	var b strings.Builder
	for i := range len(id) {
		c := id[i]
		switch {
		case c == '.' && i > 0 && id[i-1] != '.',
			c == '-', c == '_', '0' <= c && c <= '9', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "~%02x", c)
		}
	}
	b.WriteString(sender[strings.LastIndexByte(sender, '@'):])
	return b.String()
}

// path formats an address as the SMTP commands MAIL and RCPT need it: quoted where necessary, in
// angle brackets.
func path(address string) string {
	return (&stdmail.Address{Address: address}).String()
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

func isASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf })
}
