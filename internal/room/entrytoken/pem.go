package entrytoken

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

const (
	pemType = "PRIVATE KEY" // PKCS #8
	// maxKeys is the most keys in a file, to bound the work of a reload. A rotation needs two or
	// three keys.
	maxKeys = 100
)

// pemBegin is the start of a PEM block.
var pemBegin = []byte("-----BEGIN")

// parse returns the keys in a PEM file. Text between the blocks is allowed, as usual in PEM files.
func parse(text []byte) ([]key, error) {
	var keys []key
	seen := map[string]int{} // the block of each key id
	for rest := text; ; {
		n := len(keys) + 1
		block, after := pem.Decode(rest)
		// A damaged block is an error, although pem.Decode skips it: otherwise the next key would
		// sign, or a key would be missing without a message.
		begins := bytes.Count(rest[:len(rest)-len(after)], pemBegin)
		if block == nil {
			begins = bytes.Count(rest, pemBegin)
		}
		switch {
		case block == nil && begins > 0, begins > 1:
			return nil, fmt.Errorf("block %d is damaged: it is no PEM block", n)
		case block == nil && n == 1:
			return nil, errors.New("there is no PEM block; " +
				"make a key with: openssl genpkey -algorithm ed25519")
		case block == nil:
			return keys, nil
		case n > maxKeys:
			return nil, fmt.Errorf("there are more than %d keys", maxKeys)
		}
		k, err := parseBlock(block)
		if err != nil {
			return nil, fmt.Errorf("block %d %w", n, err)
		}
		if first := seen[k.id]; first != 0 {
			return nil, fmt.Errorf("block %d has the same key as block %d", n, first)
		}
		seen[k.id] = n
		keys = append(keys, k)
		rest = after
	}
}

func parseBlock(block *pem.Block) (key, error) {
	if block.Type != pemType {
		return key{}, fmt.Errorf("is of the type %q: it must be %q (PKCS #8, not encrypted)", block.Type, pemType)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return key{}, errors.New("is no PKCS #8 private key") // the cause might show parts of the key
	}
	private, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return key{}, fmt.Errorf("holds a key of the type %T: it must be an Ed25519 key", parsed)
	}
	return key{id: thumbprint(private.Public().(ed25519.PublicKey)), private: private}, nil
}

// GenerateKeys returns n new token keys as a PEM file.
func GenerateKeys(n int) ([]byte, error) {
	var text []byte
	for range n {
		_, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("generate a token key: %w", err)
		}
		der, err := x509.MarshalPKCS8PrivateKey(private)
		if err != nil {
			return nil, fmt.Errorf("encode a token key: %w", err)
		}
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der})...)
	}
	return text, nil
}

// WriteKeys writes a PEM file of token keys that only its owner may read. It replaces an existing
// file atomically, so that a process that reads the file never finds a part of it.
func WriteKeys(path string, text []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write token keys: %w", err)
		}
	}()
	f, err := os.CreateTemp(filepath.Dir(path), ".token-keys-*") // of mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
