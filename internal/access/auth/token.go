package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
)

// A token is the secret text of an API key: "bk", the letter of the role, "_", 30 random characters
// (178 bits), and a checksum of 6 characters over all of that. The form lets programs find tokens
// in texts, and the checksum lets a mistyped token be refused without a look-up.
const (
	base62        = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	randomChars   = 30
	checksumChars = 6
	bodyChars     = len("bkx_") + randomChars
	tokenChars    = bodyChars + checksumChars
)

// TokenPattern matches tokens, for secret scanners.
const TokenPattern = `^bk[aorpms]_[0-9A-Za-z]{36}$`

// ErrNotAToken means that a text has not the form of a token, or a wrong checksum.
var ErrNotAToken = errors.New("not an API key: its form or its checksum is wrong, perhaps a part of it is missing")

// NewToken returns a new token for a key of a role.
func NewToken(r Role) string {
	body := []byte{'b', 'k', r.Letter(), '_'}
	var random [2 * randomChars]byte
	for len(body) < bodyChars {
		_, _ = rand.Read(random[:]) // it never fails
		for _, c := range random {
			// Accept only bytes below 248, a multiple of 62, so that each character is equally
			// likely.
			if c < 248 && len(body) < bodyChars {
				body = append(body, base62[c%62])
			}
		}
	}
	return string(body) + checksum(string(body))
}

// ParseToken checks the form of a token and returns the role that it names, or ErrNotAToken. It
// does not look up whether such a key exists.
func ParseToken(token string) (Role, error) {
	if len(token) != tokenChars || token[:2] != "bk" || token[3] != '_' {
		return "", ErrNotAToken
	}
	i := slices.IndexFunc(Roles, func(r Role) bool { return r.Letter() == token[2] })
	if i < 0 || checksum(token[:bodyChars]) != token[bodyChars:] {
		return "", ErrNotAToken
	}
	for _, c := range []byte(token[len("bkx_"):]) {
		if strings.IndexByte(base62, c) < 0 {
			return "", ErrNotAToken
		}
	}
	return Roles[i], nil
}

// checksum returns the CRC-32 (IEEE) of a text as six digits of base 62, the highest first.
func checksum(text string) string {
	var digits [checksumChars]byte
	sum := crc32.ChecksumIEEE([]byte(text))
	for i := len(digits) - 1; i >= 0; i-- {
		digits[i] = base62[sum%62]
		sum /= 62
	}
	return string(digits[:])
}

// Bearer returns the token in a request's header Authorization. ok is false if there is no such
// header, more than one, or a scheme other than Bearer. Tokens elsewhere in a request are not
// accepted.
func Bearer(h http.Header) (token string, ok bool) {
	values := h.Values("Authorization")
	if len(values) != 1 {
		return "", false
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	return strings.TrimSpace(token), ok && strings.EqualFold(scheme, "Bearer")
}

// Hash is what is stored of a token: 64 hexadecimal digits. A fast hash is enough, because a token
// is random. A look-up by the hash does not reveal a token by its duration.
type Hash string

// SHA256 returns the SHA-256 of a token.
func SHA256(token string) Hash {
	sum := sha256.Sum256([]byte(token))
	return Hash(hex.EncodeToString(sum[:]))
}

// Valid reports whether the hash has the right form.
func (h Hash) Valid() bool {
	_, err := hex.DecodeString(string(h))
	return err == nil && len(h) == 2*sha256.Size && strings.ToLower(string(h)) == string(h)
}

var lowerBase32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// KeyID returns the id of the key with this hash: "key_" and 50 bits of the hash. Logs, metrics and
// commands name keys by their ids. It returns "" for a hash of the wrong form.
func (h Hash) KeyID() string {
	if !h.Valid() {
		return ""
	}
	raw, _ := hex.DecodeString(string(h)) // Valid has decoded it
	return "key_" + lowerBase32.EncodeToString(raw)[:10]
}

// Hasher computes the hashes under which tokens are stored in Redis. The zero Hasher computes
// SHA-256. A Hasher with a pepper computes HMAC-SHA256: then a program that can write to Redis, but
// does not know the pepper, can't store a valid key of its own.
type Hasher struct{ pepper []byte }

// minPepper is the least number of bytes of a pepper.
const minPepper = 32

// ReadHasher returns a Hasher with the pepper in a file, or the zero Hasher if path is "". It
// ignores line ends at the end of the file. It refuses a file that all users may read, and a pepper
// of less than minPepper bytes.
func ReadHasher(path string) (Hasher, error) {
	if path == "" {
		return Hasher{}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return Hasher{}, fmt.Errorf("read the pepper: %w", err)
	}
	if info.Mode()&fs.FileMode(0o004) != 0 {
		return Hasher{}, fmt.Errorf("read the pepper: %s: others may read it (mode %04o); run chmod o-r on it",
			path, info.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return Hasher{}, fmt.Errorf("read the pepper: %w", err)
	}
	pepper := strings.TrimRight(string(text), "\r\n")
	if len(pepper) < minPepper {
		return Hasher{}, fmt.Errorf("read the pepper: %s has %d bytes, at least %d are needed",
			path, len(pepper), minPepper)
	}
	return Hasher{pepper: []byte(pepper)}, nil
}

// Hash returns the hash under which a token is stored in Redis.
func (h Hasher) Hash(token string) Hash {
	if len(h.pepper) == 0 {
		return SHA256(token)
	}
	mac := hmac.New(sha256.New, h.pepper)
	mac.Write([]byte(token))
	return Hash(hex.EncodeToString(mac.Sum(nil)))
}

// String returns the name of the hash function. It hides the pepper from logs.
func (h Hasher) String() string {
	if len(h.pepper) == 0 {
		return "SHA-256"
	}
	return "HMAC-SHA256"
}

// GoString hides the pepper from %#v.
func (h Hasher) GoString() string { return h.String() }
