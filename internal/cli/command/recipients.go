package command

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/backup"
)

// RecipientFlags name the recipient of a backup.
type RecipientFlags struct{ text, file string }

// Register adds the flags to a command.
func (f *RecipientFlags) Register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.text, "recipient", "", "whom to encrypt to: age1pq1…")
	flags.StringVar(&f.file, "recipient-file", "", "file that holds the recipient")
	cmd.MarkFlagsMutuallyExclusive("recipient", "recipient-file")
	cmd.MarkFlagsOneRequired("recipient", "recipient-file")
}

// Recipient returns the recipient that the flags name.
func (f *RecipientFlags) Recipient() (backup.Recipient, error) {
	if f.file == "" {
		return backup.ParseRecipient(f.text)
	}
	file, err := os.Open(f.file)
	if err != nil {
		return backup.Recipient{}, fmt.Errorf("reading the recipient: %w", err)
	}
	defer file.Close()
	return backup.ReadRecipient(file)
}

// ReadIdentities reads a file of identities in the format of latticekeep backup keygen.
func ReadIdentities(path string) ([]backup.Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	defer f.Close()
	return backup.ReadIdentities(f)
}
