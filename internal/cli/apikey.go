package cli

import (
	"fmt"
	"os"
	"strings"
	"unicode"
)

const keyVariable = "BULKACTION_API_KEY"

// apiKey returns the API key for calls of the API, or "" if none is set, and the variable or file
// that it is from. A key in both is an error. Errors do not contain the key.
func (r *Root) apiKey() (key, from string, err error) {
	key, from = os.Getenv(keyVariable), keyVariable
	if r.keyFile != "" {
		if key != "" {
			return "", "", usagef("there are two API keys: in %s and in the file %s; unset one of them",
				keyVariable, r.keyFile)
		}
		text, err := os.ReadFile(r.keyFile)
		if err != nil {
			return "", "", withHint(fmt.Errorf("read the API key: %w", err),
				"Give the file with --api-key-file or BULKACTION_API_KEY_FILE.")
		}
		key, from = strings.TrimSpace(string(text)), "the file "+r.keyFile
		if key == "" {
			return "", "", usagef("%s is empty: it must have an API key", from)
		}
	}
	if strings.ContainsFunc(key, func(c rune) bool { return c > unicode.MaxASCII || c <= ' ' || c == 0x7f }) {
		return "", "", usagef("%s has no API key: a key has no spaces, line ends or other such characters", from)
	}
	return key, from, nil
}
