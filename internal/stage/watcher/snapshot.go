package watcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// errSnapshot says that a text is not the JSON array of strings that a snapshot consists of.
var errSnapshot = errors.New("want an array of strings")

// readSnapshot parses a group's hash in the form in which the outbox holds it: a JSON array of
// field names and values in turn, written by Redis's cjson. Reflection would cost most of the
// watcher's time, so the array is parsed by hand; only strings with escapes go through
// encoding/json.
func readSnapshot(text string) (map[string]string, error) {
	rest, ok := strings.CutPrefix(text, "[")
	if !ok {
		return nil, errSnapshot
	}
	hash := make(map[string]string, 32)
	for more := true; more; {
		var pair [2]string
		for i := range pair {
			if !more {
				return nil, errSnapshot
			}
			var err error
			if pair[i], rest, err = cutString(rest); err != nil {
				return nil, err
			}
			rest, more = strings.CutPrefix(rest, ",")
		}
		hash[pair[0]] = pair[1]
	}
	if rest != "]" {
		return nil, errSnapshot
	}
	return hash, nil
}

// cutString parses the JSON string at the beginning of text and returns it and the text behind it.
func cutString(text string) (s, rest string, err error) {
	if !strings.HasPrefix(text, `"`) {
		return "", "", errSnapshot
	}
	end, escaped := 1, false
	for ; end < len(text) && text[end] != '"'; end++ {
		if text[end] == '\\' {
			escaped = true
			end++
		}
	}
	if end >= len(text) {
		return "", "", errSnapshot
	}
	s, rest = text[1:end], text[end+1:]
	if escaped {
		if err := json.Unmarshal([]byte(text[:end+1]), &s); err != nil {
			return "", "", fmt.Errorf("%w: %w", errSnapshot, err)
		}
	}
	return s, rest, nil
}
