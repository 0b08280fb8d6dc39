package httpcall

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

// webhookHeaders begins the names of the headers of a signature.
const webhookHeaders = "Webhook-"

// signer says which secrets sign the calls to which hosts.
type signer struct {
	Hosts      []string `yaml:"hosts"`       // exact names, or names with ports
	SecretFile string   `yaml:"secret_file"` // has the secrets, one a line
}

// add checks s and adds its secrets for each of its hosts to all.
func (s signer) add(c *accountsfile.Checker, all byHost[[][]byte]) {
	var secrets [][]byte
	for line := range strings.FieldsSeq(string(c.Secret("secret_file", s.SecretFile))) {
		encoded, ok := strings.CutPrefix(line, "whsec_")
		secret, err := base64.StdEncoding.DecodeString(encoded)
		c.Check(ok && err == nil && len(secret) >= 24 && len(secret) <= 64,
			"secret_file: has a line that is not whsec_ and the base64 of 24 to 64 bytes")
		secrets = append(secrets, secret)
	}
	c.Check(len(secrets) > 0 || !c.OK(), "secret_file: is empty")
	for _, t := range parseHosts(c, s.Hosts) {
		c.Check(all[t.String()] == nil, "hosts: %s is also in another entry of signing", t)
		all[t.String()] = secrets
	}
}

// sign adds the headers of Standard Webhooks (https://www.standardwebhooks.com) to a request, with a
// signature by each secret, so that the receiver can change its secret at any time.
func sign(r *http.Request, id string, now time.Time, secrets [][]byte) {
	if len(secrets) == 0 {
		return
	}
	var body []byte
	if r.GetBody != nil {
		reader, _ := r.GetBody() // of bytes in memory, which can always be read
		body, _ = io.ReadAll(reader)
	}
	timestamp := strconv.FormatInt(now.Unix(), 10)
	signed := slices.Concat([]byte(id+"."+timestamp+"."), body)
	signatures := make([]string, len(secrets))
	for i, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		mac.Write(signed)
		signatures[i] = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	r.Header.Set(webhookHeaders+"Id", id)
	r.Header.Set(webhookHeaders+"Timestamp", timestamp)
	r.Header.Set(webhookHeaders+"Signature", strings.Join(signatures, " "))
}
