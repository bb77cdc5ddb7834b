package auditlog

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/export"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/store"
)

// exportOptions are the flags of latticekeep audit export.
type exportOptions struct {
	command.Server
	offline.Deployment
	whole             bool
	output, publicKey string
	progress          bool
}

func newAuditExportCommand() *cobra.Command {
	var o exportOptions
	cmd := &cobra.Command{
		Use:   "export (--data-dir DIR | --store URL | --url URL [--whole]) [--output FILE]",
		Short: "Write the audit log as JSON lines",
		Long: `Write the audit log as JSON lines: each entry in its canonical form, oldest
first, and a last line with the signed checkpoint that says where the log ended.
Anyone can verify it with latticekeep audit verify --file, or with a program of
their own from docs/audit.md.

  --data-dir     the whole log of a server that is stopped; the KMS key signs
                 the last line
  --store        likewise, as a URL: bolt:DIR or postgres://user@host/database
  --url          your tenant's entries of a running server; the API key needs
                 the scope audit:read
  --url --whole  all tenants' entries; the key needs the scope system:admin

Run again, an interrupted export to a file resumes, and a finished one takes up
the newer entries; the file must link up with the log. Entries that --url has
fetched but not yet put in order are in FILE.part.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !o.Named() {
				if err := o.Locate(); err != nil {
					return err
				}
			}
			if !o.Named() && o.Server.URL == "" {
				return command.UsageError("say which log: --data-dir or --store of a stopped server, or --url of a running one")
			}
			p := progress.New(cmd.ErrOrStderr(), o.progress)
			defer p.End()
			if o.Named() {
				return exportStopped(cmd.Context(), &o, p, cmd.OutOrStdout())
			}
			return exportURL(cmd.Context(), &o, p, cmd.OutOrStdout())
		},
	}
	o.RegisterConnection(cmd)
	command.RegisterStore(cmd, &o.Deployment, "of a stopped server")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key of --data-dir (default "+offline.KMSKeyFileName+" in it) or --store")
	flags := cmd.Flags()
	flags.BoolVar(&o.whole, "whole", false, "with --url: the entries of all tenants")
	flags.StringVar(&o.output, "output", "-", "file to write, - for standard output")
	flags.StringVar(&o.publicKey, "public-key-out", "", "file to write the log's public key to (PEM)")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	for _, where := range []string{"data-dir", "store"} {
		cmd.MarkFlagsMutuallyExclusive("url", "profile", where)
		cmd.MarkFlagsMutuallyExclusive("whole", where)
	}
	cmd.MarkFlagsMutuallyExclusive("url", "profile", "kms-key-file")
	cmd.MarkFlagsMutuallyExclusive("url", "profile", "kms-url")
	return cmd
}

// exportStopped exports the log of a store that no server uses. It verifies the whole log each time
// and writes the new entries.
func exportStopped(ctx context.Context, o *exportOptions, p *progress.Progress, stdout io.Writer) error {
	return o.WithStore(ctx, func(s store.Database) error {
		return o.WithKeys(ctx, s, nil, func(keys *keyring.Ring) error {
			if err := writePublicKey(o.publicKey, keys.Audit().Public().MarshalPEM()); err != nil {
				return err
			}
			log := writer.New(time.Now, nil)
			if err := log.Use(ctx, s, keys.Audit(), keys.ChainID()); err != nil {
				return err
			}
			if head, _, err := log.Progress(ctx); err == nil {
				p.Expect(head)
			}
			return export.Write(o.output, false, p, stdout, func(x *export.Writer) error {
				if x.Last != nil {
					p.Skip(x.Last.Sequence)
				}
				return export.Stream(x, func(w io.Writer) error { return reader.New(log, guard.New(log)).Export(ctx, w, 0) })
			})
		})
	})
}

func writePublicKey(file string, pem []byte) error {
	if file == "" {
		return nil
	}
	if err := os.WriteFile(file, pem, 0o644); err != nil { //nolint:gosec // a public key is for everybody
		return fmt.Errorf("writing the public key: %w", err)
	}
	return nil
}

func exportURL(ctx context.Context, o *exportOptions, p *progress.Progress, stdout io.Writer) error {
	c, err := o.Client()
	if err != nil {
		return err
	}
	if o.publicKey != "" {
		key, err := export.FetchLogKey(ctx, c)
		if err != nil {
			return err
		}
		if err := writePublicKey(o.publicKey, key.Public.MarshalPEM()); err != nil {
			return err
		}
	}
	if o.whole {
		return export.Write(o.output, false, p, stdout, func(x *export.Writer) error { return export.DownloadLog(ctx, c, x, p) })
	}
	part := o.output + ".part"
	if o.output == "-" {
		dir, err := os.MkdirTemp("", "latticekeep-export-")
		if err != nil {
			return fmt.Errorf("making a temporary folder: %w", err)
		}
		defer os.RemoveAll(dir)
		part = filepath.Join(dir, "part")
	}
	err = export.Write(o.output, true, p, stdout, func(x *export.Writer) error { return export.DownloadTenant(ctx, c, x, part, p) })
	if err != nil {
		return err
	}
	if err := os.Remove(part); err != nil {
		return fmt.Errorf("removing what was fetched: %w", err)
	}
	return nil
}
