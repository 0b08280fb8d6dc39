package stage

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
)

// SpanSeed begins the ids of the spans that a script mints: 8 hex digits, never zero.
func SpanSeed() string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], rand.Uint32()|1)
	return hex.EncodeToString(b[:])
}
