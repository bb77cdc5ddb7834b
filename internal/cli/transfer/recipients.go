package transfer

import (
	"fmt"
	"os"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/spf13/cobra"
)

// recipientFlags name the recipient of a backup.
type recipientFlags struct{ text, file string }

func (f *recipientFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.text, "recipient", "", "whom to encrypt to: age1pq1…")
	flags.StringVar(&f.file, "recipient-file", "", "file that holds the recipient")
	cmd.MarkFlagsMutuallyExclusive("recipient", "recipient-file")
	cmd.MarkFlagsOneRequired("recipient", "recipient-file")
}

func (f *recipientFlags) recipient() (backup.Recipient, error) {
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

// readIdentities reads a file of identities in the format of latticekeep backup keygen.
func readIdentities(path string) ([]backup.Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	defer f.Close()
	return backup.ReadIdentities(f)
}
