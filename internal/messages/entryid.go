package messages

import (
	"strconv"
	"strings"
)

// ValidEntryID reports whether id has the complete form MS-SEQ of ids that Redis gives to stream
// entries. MS must not be 0: Redis refuses a range that ends before 0-0 with an error.
func ValidEntryID(id string) bool {
	ms, seq, ok := strings.Cut(id, "-")
	at, errMS := strconv.ParseUint(ms, 10, 64)
	_, errSeq := strconv.ParseUint(seq, 10, 64)
	return ok && errMS == nil && errSeq == nil && at > 0
}
