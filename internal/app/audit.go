package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
)

func newAuditCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "audit", Short: "Verify and export the audit log", Args: cobra.NoArgs}
	cmd.AddCommand(newAuditVerifyCommand(), newAuditExportCommand())
	return cmd
}

// apiKeyVariable names the environment variable that keeps an API key out of
// process lists.
const apiKeyVariable = "LATTICEKEEP_API_KEY"

func newAuditVerifyCommand() *cobra.Command {
	var dir, file, base, apiKey, publicKey, fingerprint string
	cmd := &cobra.Command{
		Use:   "verify (--data-dir DIR | --file EXPORT | --url URL)",
		Short: "Verify every entry, link and signature of an audit log",
		Long: `Verify an audit log and exit with status 0 only if all of it holds; otherwise
name the first bad sequence.

  --data-dir  the whole log of a data directory whose server is stopped, with
              every credential row held against it
  --file      an export (latticekeep audit export); - is standard input
  --url       your tenant's part of the log of a running server, by its own
              links; the API key needs the scope audit:read. That the server
              left out the newest entries does not show: compare the head
              with one that you kept

--fingerprint (printed by the server as "chain") or --public-key says whose log
it must be. Without either a log that holds is self-consistent only: someone
with another key could have written all of it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "fingerprint", "public-key"); err != nil {
				return err
			}
			o := audit.Options{Fingerprint: fingerprint}
			if publicKey != "" {
				pem, err := os.ReadFile(publicKey)
				if err != nil {
					return fmt.Errorf("reading the public key: %w", err)
				}
				if o.PublicKey, err = dualsig.ParsePEM(pem); err != nil {
					return fmt.Errorf("reading the public key: %w", err)
				}
			}
			if apiKey == "" {
				apiKey = os.Getenv(apiKeyVariable)
			}
			var report audit.Report
			var err error
			switch {
			case dir != "":
				report, err = verifyDataDir(cmd.Context(), dir, o)
			case file != "":
				report, err = verifyFile(cmd.InOrStdin(), file, o)
			default:
				report, err = verifyURL(cmd.Context(), base, apiKey, o)
			}
			if err != nil {
				return err
			}
			return printReport(cmd.OutOrStdout(), report)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dir, "data-dir", "", "data directory of a stopped server")
	flags.StringVar(&file, "file", "", "export to verify, - for standard input")
	flags.StringVar(&base, "url", "", "base URL of a running server")
	flags.StringVar(&apiKey, "api-key", "", "API key for --url (default $"+apiKeyVariable+")")
	flags.StringVar(&publicKey, "public-key", "", "PEM file with the log's ML-DSA-65 public key")
	flags.StringVar(&fingerprint, "fingerprint", "", "fingerprint of the chain, as the server prints it")
	cmd.MarkFlagsOneRequired("data-dir", "file", "url")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "file", "url")
	return cmd
}

func printReport(w io.Writer, r audit.Report) error {
	whose := "self-consistent only: pin it with --fingerprint to know whose log it is"
	if r.Pinned {
		whose = "the pinned one"
	}
	live := 0
	for _, state := range r.Credentials {
		if !state.Deleted {
			live++
		}
	}
	part := "the whole log"
	if r.Tenant != "" {
		part = "the log of tenant " + r.Tenant + ", as far as the server showed it"
	}
	_, err := fmt.Fprintf(w, "ok: %s: %d entries, %d live credentials\nhead: %d %s\nchain: %s (%s)\n",
		part, r.Entries, live, r.Sequence, r.Hash, r.Fingerprint, whose)
	return err
}

func verifyDataDir(ctx context.Context, dir string, o audit.Options) (audit.Report, error) {
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		return audit.Report{}, fmt.Errorf("opening %s: %w", databaseFile, err)
	}
	report, err := vault.VerifyStore(ctx, s, o)
	return report, errors.Join(err, s.Close())
}

func verifyFile(stdin io.Reader, file string, o audit.Options) (audit.Report, error) {
	if file == "-" {
		return audit.VerifyExport(stdin, o)
	}
	f, err := os.Open(file)
	if err != nil {
		return audit.Report{}, fmt.Errorf("opening the export: %w", err)
	}
	defer f.Close()
	return audit.VerifyExport(f, o)
}

// verifyURL reads the tenant's log of a running server page by page, newest
// first as the interface has it, and verifies it oldest first.
func verifyURL(ctx context.Context, base, apiKey string, o audit.Options) (audit.Report, error) {
	if apiKey == "" {
		return audit.Report{}, errors.New("an API key is needed: set $" + apiKeyVariable + " or --api-key")
	}
	client := &http.Client{
		Timeout: 30 * time.Second,
		// The key is for this server and no other.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var entries []audit.Entry
	for cursor := ""; ; {
		page, err := fetchLog(ctx, client, base, apiKey, cursor)
		if err != nil {
			return audit.Report{}, err
		}
		for _, e := range page.Entries {
			if n := len(entries); n > 0 && e.TenantSequence >= entries[n-1].TenantSequence {
				return audit.Report{}, &audit.Broken{Sequence: e.Sequence, Reason: "the server does not list the log newest first"}
			}
			entries = append(entries, e)
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	slices.Reverse(entries)
	return audit.VerifyTenant(entries, o)
}

type logPage struct {
	Entries    []audit.Entry `json:"entries"`
	NextCursor string        `json:"next_cursor"`
}

// maxPage bounds what is read of one answer: 100 entries are some 600 KiB.
const maxPage = 8 << 20

func fetchLog(ctx context.Context, client *http.Client, base, apiKey, cursor string) (page logPage, err error) {
	query := url.Values{"limit": {"100"}}
	if cursor != "" {
		query.Set("cursor", cursor)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(base, "/")+"/api/v2/audit/logs?"+query.Encode(), nil)
	if err != nil {
		return page, fmt.Errorf("reading the audit log: %w", err)
	}
	request.Header.Set("X-API-Key", apiKey)
	answer, err := client.Do(request)
	if err != nil {
		return page, fmt.Errorf("reading the audit log: %w", err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return page, fmt.Errorf("reading the audit log: the server answered %s; the key needs the scope audit:read", answer.Status)
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxPage)).Decode(&page); err != nil {
		return page, fmt.Errorf("reading the audit log: %w", err)
	}
	return page, nil
}

func newAuditExportCommand() *cobra.Command {
	var dir, publicKey string
	cmd := &cobra.Command{
		Use:   "export --data-dir DIR",
		Short: "Write the whole audit log as JSON lines to standard output",
		Long: `Write the whole audit log of a stopped server as JSON lines to standard output:
each entry in its canonical form, oldest first, and a signed line that says
where the export ends. Anyone can verify it with latticekeep audit verify
--file, or from docs/formats.md.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return exportDataDir(cmd.Context(), dir, publicKey, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "", "data directory of a stopped server")
	cmd.Flags().StringVar(&publicKey, "public-key-out", "", "file to write the log's public key to (PEM)")
	_ = cmd.MarkFlagRequired("data-dir") // the flag exists
	return cmd
}

func exportDataDir(ctx context.Context, dir, publicKey string, w io.Writer) (err error) {
	k, err := kms.OpenLocal(filepath.Join(dir, kmsKeyFile))
	if err != nil {
		return fmt.Errorf("opening %s: %w", kmsKeyFile, err)
	}
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("opening %s: %w", databaseFile, err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	keys, err := keyring.Open(ctx, s, k, keyring.Config{})
	if err != nil {
		return err
	}
	if publicKey != "" {
		if err := os.WriteFile(publicKey, keys.Audit().Public().MarshalPEM(), 0o644); err != nil {
			return fmt.Errorf("writing the public key: %w", err)
		}
	}
	log := audit.New(time.Now)
	if err := log.Use(ctx, s, keys.Audit(), keys.ChainID()); err != nil {
		return err
	}
	return log.Export(ctx, w)
}
