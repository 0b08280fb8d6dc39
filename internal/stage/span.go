package stage

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
)

// SpanSeed returns 8 random hex digits, not all 0, from which a script makes the ids of the spans
// that it creates.
func SpanSeed() string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], rand.Uint32()|1)
	return hex.EncodeToString(b[:])
}
