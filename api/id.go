package api

// MaxIDLength is the highest number of bytes of an id.
const MaxIDLength = 128

// IDPattern is the rule of ValidID as a regular expression.
const IDPattern = "^[A-Za-z0-9._-]{1,128}$"

// ValidID reports whether id matches IDPattern. Ids of tenants, groups, types and messages match
// it, so that they can be part of a Redis key.
func ValidID(id string) bool {
	if len(id) == 0 || len(id) > MaxIDLength {
		return false
	}
	for i := range len(id) {
		switch c := id[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}
