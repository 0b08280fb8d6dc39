package console

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/console/chart"
	"github.com/bulkaction/bulkaction/internal/httpapi"
)

const (
	lettersPage    = 50
	maxPayloadText = 4000 // bytes of a payload, or of a message, that a list shows
)

// letterPages show jobs and messages that nobody works on any more.
type letterPages struct{ backend httpapi.Backend }

// deadLettersData is the data of the page of dead letters.
type deadLettersData struct {
	Letters []deadLetter
	Codes   []chart.Value // of the letters on this page
	Most    int64         // the largest of Codes
	More    int           // codes that Codes leaves out
	Next    string        // path of the next page
	First   bool          // this is the first page
}

type deadLetter struct {
	api.DeadLetter
	Text string // the payload, with line breaks; "": the reader may not see it
}

func (p letterPages) deadLetters(r *http.Request) (view, error) {
	cursor, err := cursorOf(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	l, err := p.backend.DeadLetters(r.Context(), httpapi.DeadLetterQuery{Cursor: cursor, Limit: lettersPage})
	if err != nil {
		return view{}, err
	}
	d := deadLettersData{Next: nextPage(root+"/dead-letters", nil, l.Cursor), First: cursor == ""}
	codes := map[string]int64{}
	for _, letter := range l.DeadLetters {
		codes[letter.Code]++
		text := payloadText(letter.Payload)
		letter.Payload = nil // the page is kept for an outage: it shows only the text
		d.Letters = append(d.Letters, deadLetter{letter, text})
	}
	for code, n := range codes {
		d.Codes = append(d.Codes, chart.Value{Name: code, Number: n})
	}
	if d.Codes, d.More = largest(d.Codes); len(d.Codes) > 0 {
		d.Most = d.Codes[0].Number
	}
	return view{name: "deadletters", title: "Dead letters", data: d}, nil
}

// payloadText returns a payload as people read it, "" if there is none.
func payloadText(payload json.RawMessage) string {
	if len(payload) == 0 {
		return ""
	}
	return shortened(indented(payload))
}

// shortened cuts off the end of a long text.
func shortened(text string) string {
	if len(text) <= maxPayloadText {
		return text
	}
	return strings.ToValidUTF8(text[:maxPayloadText], "") + "…"
}

// rejectedData is the data of the page of rejected messages.
type rejectedData struct {
	Messages []api.RejectedMessage
	Data     bool // the messages have their data
	Next     string
	First    bool
}

// rejected shows messages that ingest has refused, with their data only if the reader asks for it.
func (p letterPages) rejected(r *http.Request) (view, error) {
	q := r.URL.Query()
	cursor, err := cursorOf(q)
	if err != nil {
		return view{}, err
	}
	data := q.Get("data")
	if data != "" && data != "true" && data != "false" {
		return view{}, invalid("data", "must be true or false")
	}
	d := rejectedData{Data: data == "true" && auth.SeesPayloads(r.Context()), First: cursor == ""}
	l, err := p.backend.Rejected(r.Context(), cursor, lettersPage, d.Data)
	if err != nil {
		return view{}, err
	}
	for _, m := range l.Rejected {
		if m.Data = shortened(m.Data); !d.Data {
			m.Data = ""
		}
		d.Messages = append(d.Messages, m)
	}
	d.Next = nextPage(root+"/rejected", q, l.Cursor)
	return view{name: "rejected", title: "Rejected messages", data: d}, nil
}
