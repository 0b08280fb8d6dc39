package httpcall

import (
	"encoding/json"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/processor"
)

// newResult returns the job's result {"status":…,"body":…}. A JSON body stays JSON, an empty body
// becomes null, and any other body becomes a string. A body that was cut, or has to be cut to fit,
// is a string too, with "truncated":true.
func newResult(status int, body []byte, truncated bool) json.RawMessage {
	head := `{"status":` + strconv.Itoa(status) + `,"body":`
	const mark = `,"truncated":true}`
	room := processor.MaxResultBytes - len(head) - len(mark)

	if len(body) == 0 && !truncated {
		return json.RawMessage(head + "null}")
	}
	if !truncated && utf8.Valid(body) {
		// Marshal makes the JSON compact and escapes <, > and &, so that encoding it a second time
		// does not make it longer.
		if raw, err := json.Marshal(json.RawMessage(body)); err == nil && len(raw) <= room {
			return json.RawMessage(head + string(raw) + "}")
		}
	}
	encoded, cut := encodeString(strings.ToValidUTF8(string(body), string(utf8.RuneError)), room)
	if truncated || cut {
		return json.RawMessage(head + encoded + mark)
	}
	return json.RawMessage(head + encoded + "}")
}

// encodeString returns text as a JSON string of at most room bytes. It cuts text that is too long.
func encodeString(text string, room int) (encoded string, cut bool) {
	prefix := func(n int) string {
		for n > 0 && n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		raw, _ := json.Marshal(text[:n]) // a string can always be marshalled
		return string(raw)
	}
	most := min(len(text), room-len(`""`)) // enough if no character needs an escape
	if all := prefix(most); len(all) <= room {
		return all, most < len(text)
	}
	tooLong := sort.Search(most, func(n int) bool { return len(prefix(n)) > room })
	return prefix(tooLong - 1), true
}
