package watcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

var errSnapshot = errors.New("want an array of strings")

// readSnapshot reads a hash as cjson has encoded it: names and values in turn. Most of the strings
// hold nothing that is escaped, and are taken as they are.
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

// cutString takes the JSON string that text begins with.
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
