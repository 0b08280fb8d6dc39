package auth_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// TestTokensOfAnotherImplementation: the expected values were computed in Python (zlib, hashlib,
// hmac and base64), independently of this code.
func TestTokensOfAnotherImplementation(t *testing.T) {
	t.Parallel()
	for token, want := range map[string]struct {
		role     auth.Role
		hash, id string
	}{
		"bka_0000000000000000000000000000000o44q1": {auth.Admin, "26011b245150d2bc767d55b7a3df99c24543a0eb408fee47957af829155a3d90", "key_eyarwjcrkd"},
		"bko_zzzzzzzzzzzzzzzzzzzzzzzzzzzzzz0V1tll": {auth.Operator, "7d8d5739c905a37b9a92e9aa42c1d6f4a9bd064d066a89f4db13e5f0136f0dfa", "key_pwgvooojaw"},
		"bkr_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAA3UbC3a": {auth.Reader, "10aad43b67e2af17fa9939bfe7c8e630302942cecfcb67fc82012f81fb374d7e", "key_ccvnio3h4k"},
		"bkp_7QabcdefghijklmnopqrstuvwxyzAB2WjneH": {auth.Producer, "7e58bf47323dcdb4fae8eaa19dd028a2732e4af0abe5bd1a52dcaf1f44961742", "key_pzml6rzshx"},
		"bkm_1234567890123456789012345678901M3Zdq": {auth.Metrics, "a50de092183ef2395c385a4362f0316f5dfb42887fedd9c2b8ed47d85524d785", "key_uug6beqyh3"},
		"bks_ZYXWVUTSRQPONMLKJIHGFEDCBA987610Tznx": {auth.Service, "c3194c76eaea8e605de225c24b77dad6686b8bc1f43b8e19004b539d63548cab", "key_ymmuy5xk5k"},
	} {
		role, err := auth.ParseToken(token)
		require.NoError(t, err, token)
		require.Equal(t, want.role, role)
		require.Equal(t, want.hash, string(auth.SHA256(token)))
		require.Equal(t, want.hash, string(auth.Hasher{}.Hash(token)))
		require.Equal(t, want.id, auth.SHA256(token).KeyID())
	}
	role, err := auth.ParseToken("bkp_00000000000000000000000000033600eWrl") // its checksum begins with zeros
	require.NoError(t, err)
	require.Equal(t, auth.Producer, role)
}

func TestNewTokens(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(auth.TokenPattern)
	seen, chars := map[string]bool{}, map[byte]int{}
	for range 300 {
		for _, role := range auth.Roles {
			token := auth.NewToken(role)
			require.Regexp(t, pattern, token)
			got, err := auth.ParseToken(token)
			require.NoError(t, err)
			require.Equal(t, role, got)
			require.False(t, seen[token])
			seen[token] = true
			for _, c := range []byte(token[4:34]) {
				chars[c]++
			}
		}
	}
	// The 54,000 characters contain each of the 62 about 871 times; a count of 600 would be 9
	// standard deviations lower.
	require.Len(t, chars, 62)
	for c, n := range chars {
		require.Greater(t, n, 600, "%c", c)
		require.Less(t, n, 1200, "%c", c)
	}
}

func TestOtherTextsAreNoTokens(t *testing.T) {
	t.Parallel()
	const good = "bkp_7QabcdefghijklmnopqrstuvwxyzAB2WjneH"
	for _, text := range []string{
		"", "bkp_", good[:39], good + "0", " " + good, good + "\n", strings.ToUpper(good), strings.ToLower(good),
		"bkx" + good[3:], "bkp-" + good[4:], "xkp" + good[3:], strings.Repeat("x", 1<<20),
		"Bearer " + good, good[:34] + "------",
	} {
		_, err := auth.ParseToken(text)
		require.ErrorIs(t, err, auth.ErrNotAToken, "%.50q", text)
		require.NotContains(t, err.Error(), "7Qabc")
	}
	for i := range good { // the checksum finds each wrong character, and two that are exchanged
		for _, c := range "0Zz_" {
			if wrong := good[:i] + string(c) + good[i+1:]; wrong != good {
				_, err := auth.ParseToken(wrong)
				require.ErrorIs(t, err, auth.ErrNotAToken, wrong)
			}
		}
		if i > 0 && good[i] != good[i-1] {
			_, err := auth.ParseToken(good[:i-1] + string(good[i]) + string(good[i-1]) + good[i+1:])
			require.ErrorIs(t, err, auth.ErrNotAToken)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	pattern := regexp.MustCompile(auth.TokenPattern)
	for _, role := range auth.Roles {
		f.Add(auth.NewToken(role))
	}
	f.Add("bkp_00000000000000000000000000000000000000")
	f.Add("bkp_\x00")
	f.Fuzz(func(t *testing.T, text string) {
		role, err := auth.ParseToken(text)
		if err != nil {
			require.ErrorIs(t, err, auth.ErrNotAToken)
			return
		}
		require.Regexp(t, pattern, text)
		require.Equal(t, text[2], role.Letter())
		for i := range len(text) { // no other token is one character away
			other := []byte(text)
			other[i] ^= 1
			_, err := auth.ParseToken(string(other))
			require.ErrorIs(t, err, auth.ErrNotAToken)
		}
	})
}

func TestBearer(t *testing.T) {
	t.Parallel()
	for want, values := range map[string][]string{
		"a": {"Bearer a"}, "b": {"bearer b"}, "c": {"BEARER  c "}, "": {"Bearer "},
		"none": nil, "two": {"Bearer a", "Bearer a"}, "basic": {"Basic YTpi"}, "bare": {"a"}, "empty": {""},
	} {
		got, ok := auth.Bearer(http.Header{"Authorization": values})
		require.Equal(t, len(want) <= 1, ok, want)
		if ok {
			require.Equal(t, want, got)
		}
	}
}

func TestHashes(t *testing.T) {
	t.Parallel()
	good := auth.SHA256("x")
	require.True(t, good.Valid())
	for _, h := range []auth.Hash{"", "00", good[:63], good + "0", auth.Hash(strings.ToUpper(string(good))), "z" + good[1:]} {
		require.False(t, h.Valid(), h)
		require.Empty(t, h.KeyID())
	}
}

func TestPepper(t *testing.T) {
	t.Parallel()
	const token, pepper = "bkp_7QabcdefghijklmnopqrstuvwxyzAB2WjneH", "0123456789abcdef0123456789abcdef"
	path := filepath.Join(t.TempDir(), "pepper")
	write := func(text string, mode os.FileMode) {
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		require.NoError(t, os.Chmod(path, mode))
	}
	for _, end := range []string{"", "\n", "\r\n"} {
		write(pepper+end, 0o600)
		h, err := auth.ReadHasher(path)
		require.NoError(t, err)
		require.Equal(t, "0e5a12aec9b096f520b1043e65bcc159849eefd72ec8f695a4cb8471b1e77519", string(h.Hash(token)))
		require.NotContains(t, fmt.Sprintf("%v %+v %#v %s", h, h, h, h), pepper[:8])
	}
	h, err := auth.ReadHasher("")
	require.NoError(t, err)
	require.Equal(t, auth.SHA256(token), h.Hash(token))

	write(pepper[1:]+"\n", 0o600)
	_, err = auth.ReadHasher(path)
	require.ErrorContains(t, err, "has 31 bytes, at least 32 are needed")
	require.NotContains(t, err.Error(), pepper[1:9])
	write(pepper, 0o604)
	_, err = auth.ReadHasher(path)
	require.ErrorContains(t, err, "others may read it (mode 0604)")
	_, err = auth.ReadHasher(path + "x")
	require.ErrorContains(t, err, "read the pepper")

	write(string(bytes.Repeat([]byte{0, 200}, 16)), 0o600) // any bytes
	_, err = auth.ReadHasher(path)
	require.NoError(t, err)
}
