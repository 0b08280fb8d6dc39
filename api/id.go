package api

// MaxIDLength is the highest number of bytes of an id.
const MaxIDLength = 128

// IDRule is the end of an error message about an id: "must " + IDRule.
const IDRule = "match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)"

// ValidID reports whether id follows IDRule. Ids of tenants, groups, types and messages must, so
// that they can be part of a Redis key and of a URL's path, in which . and .. are no names.
func ValidID(id string) bool {
	if len(id) == 0 || len(id) > MaxIDLength || id == "." || id == ".." {
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
