package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
)

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// keyFile is the output of room new-key with --json.
type keyFile struct {
	File    string `json:"file"`
	Created bool   `json:"created"`
}

// showKeyFile prints what was done with a file of token keys: f with --json, otherwise the file's
// name and text.
func (r *Root) showKeyFile(f keyFile, text string) error {
	if r.JSON {
		return r.Print(f)
	}
	r.Notef("%s %s.", f.File, text)
	return nil
}

// newRoomNewKey returns a command that writes a file with a new token key, for hosts without
// openssl, such as containers. It does not change an existing file, so it can run before each
// start.
func newRoomNewKey(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "new-key FILE",
		Short: "Write a file with a new token key, unless the file exists",
		Long: "Write a file with a new token key, for BULKACTION_BROKER_TOKEN_KEYS_FILE. It is what\n" +
			"`openssl genpkey -algorithm ed25519 -out FILE` writes. A file that exists is checked and stays as it is.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || args[0] == "" {
				return usagef("new-key needs the name of one file")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			path := args[0]
			_, err := os.Stat(path)
			switch {
			case err == nil:
				if _, err := entrytoken.Read(path, slog.New(slog.DiscardHandler)); err != nil {
					return err
				}
				return r.showKeyFile(keyFile{File: path}, "has token keys, and stays as it is")
			case !errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("write a token key: %w", err)
			}
			if folder := filepath.Dir(path); !exists(folder) {
				return fmt.Errorf("write a token key: the directory %s does not exist: create it first", folder)
			}
			key, err := entrytoken.GenerateKeys(1)
			if err == nil {
				err = entrytoken.WriteKeys(path, key)
			}
			if err != nil {
				return err
			}
			return r.showKeyFile(keyFile{File: path, Created: true}, "has a new token key")
		},
	}
}
