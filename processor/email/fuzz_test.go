package email

import (
	stdmail "net/mail"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

// FuzzCompose: each payload that parsePayload accepts makes a mail, and the mail's recipient has no
// line break, which could add a command or header.
func FuzzCompose(f *testing.F) {
	for _, seed := range []string{
		`{"to":"a@example.com"}`, `{"to":"A <a@example.com>","subject":"s","body":"b"}`, `{"to":"a@example.com, b@example.com"}`, `{"to":"a@example.com\r\nBcc: b@example.com"}`,
		`{"to":"a@example.com","subject":"x\nBcc: b@example.com"}`, `{"to":"\"\r\n\"@example.com"}`, `{"to":7}`, `{}`, ``,
		`{"to":"a@exämple.com","html":"<p>","reply_to":"B <b@example.com>","list_unsubscribe":"<https://example.com/u>, <mailto:u@example.com>"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		r, err := parsePayload(payload)
		if err != nil {
			return
		}
		p := &Processor{from: &stdmail.Address{Address: "from@example.com"}, idSender: "from@example.com"}
		m := p.compose(processor.Job{Group: "g"}, r)
		require.False(t, strings.ContainsAny(m.to, "\r\n"), "%q", m.to)
	})
}
