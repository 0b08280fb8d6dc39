package messages

import (
	"strconv"
	"strings"
)

// ValidEntryID reports whether id is the complete id of a stream entry.
func ValidEntryID(id string) bool {
	ms, seq, ok := strings.Cut(id, "-")
	_, errMS := strconv.ParseUint(ms, 10, 64)
	_, errSeq := strconv.ParseUint(seq, 10, 64)
	return ok && errMS == nil && errSeq == nil
}
