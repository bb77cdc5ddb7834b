package command

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/offline"
)

// Pin identifies the log that a verification expects.
type Pin struct{ PublicKey, Fingerprint string }

func (p *Pin) Register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.PublicKey, "public-key", "", "PEM file with the log's ML-DSA-65 public key")
	cmd.Flags().StringVar(&p.Fingerprint, "fingerprint", "", "fingerprint of the chain, as the server prints it")
}

// Options returns the options of a verification with this pin.
func (p *Pin) Options() (o verify.Options, err error) {
	o.Fingerprint = p.Fingerprint
	if p.PublicKey == "" {
		return o, nil
	}
	pem, err := os.ReadFile(p.PublicKey)
	if err == nil {
		o.PublicKey, err = dualsig.ParsePEM(pem)
	}
	if err != nil {
		return o, fmt.Errorf("reading the public key: %w", err)
	}
	return o, nil
}

// RegisterStore defines the flags that name the store of a stopped server.
func RegisterStore(cmd *cobra.Command, s *offline.Deployment, what string) {
	flags := cmd.Flags()
	flags.StringVar(&s.DataDir, "data-dir", "", "data directory "+what)
	flags.StringVar(&s.Store, "store", "", "the same as a URL, bolt:DIR or postgres://user@host/database")
	flags.StringVar(&s.PasswordFile, "password-file", "", "file with the password of --store (default: what PGPASSWORD says)")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "store")
}

// RegisterKMS defines the flags that name the KMS key of the store.
func RegisterKMS(cmd *cobra.Command, s *offline.Deployment, use string) {
	flags := cmd.Flags()
	flags.StringVar(&s.KeyFile, "kms-key-file", "", use)
	flags.StringVar(&s.KMSURL, "kms-url", "", "the same as a URL, as in kms.url")
	flags.StringArrayVar(&s.FormerKMSURLs, "kms-former", nil, "URL of a previous KMS key that not all was moved from, as in kms.former; may be repeated")
	flags.StringVar(&s.TokenFile, "kms-token-file", "", "file with the token of a hashivault:// --kms-url")
	cmd.MarkFlagsMutuallyExclusive("kms-key-file", "kms-url")
}
