package smtpsink_test

import (
	"bytes"
	"fmt"
	"net/smtp"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func send(sink *smtpsink.Sink, to, id string) error {
	mail := fmt.Sprintf("From: a@example.com\r\nMessage-ID:\r\n %s\r\n\r\nHello\r\n", id)
	return smtp.SendMail(sink.Addr(), nil, "a@example.com", []string{to}, []byte(mail))
}

func TestCounts(t *testing.T) {
	var last []byte
	sink, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{
		MaxTracked: 2,
		OnMail:     func(m smtpsink.Mail) { last = bytes.Clone(m.Data) },
		Reply: func(to string) (int, string) {
			if to == "no@example.com" {
				return 550, "no"
			}
			return 0, ""
		},
	})
	require.NoError(t, err)
	require.NoError(t, send(sink, "b@example.com", "<1@x>"))
	require.NoError(t, send(sink, "b@example.com", "<2@x>"))
	require.NoError(t, send(sink, "c@example.com", "<1@x>"))
	require.NoError(t, send(sink, "d@example.com", "<3@x>")) // past MaxTracked
	require.ErrorContains(t, send(sink, "no@example.com", "<4@x>"), "550")

	require.EqualValues(t, 4, sink.Received())
	require.EqualValues(t, 1, sink.Duplicates())
	require.EqualValues(t, 5, sink.Connections())
	require.Equal(t, 2, sink.ReceivedByRecipient("b@example.com"))
	require.Equal(t, 1, sink.ReceivedByRecipient("c@example.com"))
	require.Zero(t, sink.ReceivedByRecipient("d@example.com"))
	require.Equal(t, 2, sink.ReceivedByMessageID("<1@x>"))
	require.Zero(t, sink.ReceivedByMessageID("<3@x>"))
	require.Contains(t, string(last), "Hello\r\n")
	require.NoError(t, sink.Close())
}

func TestRefusesAMessageThatIsNone(t *testing.T) {
	sink, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{})
	require.NoError(t, err)
	err = smtp.SendMail(sink.Addr(), nil, "a@example.com", []string{"b@example.com"}, []byte("no header\r\n"))
	require.ErrorContains(t, err, "554")
	require.Zero(t, sink.Received())
	require.NoError(t, sink.Close())
}

func TestStartAndCloseAtOnce(t *testing.T) {
	for range 50 {
		sink, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{})
		require.NoError(t, err)
		require.NoError(t, sink.Close())
	}
}

func TestStartErrors(t *testing.T) {
	_, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{ImplicitTLS: true})
	require.ErrorContains(t, err, "start SMTP sink: ImplicitTLS needs TLS")
	_, err = smtpsink.Start("127.0.0.1:99999", smtpsink.Options{})
	require.ErrorContains(t, err, "start SMTP sink: ")
}
