package app

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// exportOptions say what is exported, and to where.
type exportOptions struct {
	remote
	stopped
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

An export to a file that was broken off goes on where it ended when it is run
again, and one that is finished takes up what has come since: what is there must
link up with it. What --url has fetched of a tenant and not yet put in order is
in FILE.part meanwhile.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "output", "public-key-out"); err != nil {
				return err
			}
			if !o.named() && o.remote.url == "" {
				return errors.New("say which log: --data-dir or --store of a stopped server, or --url of a running one")
			}
			p := newProgress(cmd.ErrOrStderr(), o.progress)
			defer p.end()
			if o.named() {
				return exportStopped(cmd.Context(), &o, p, cmd.OutOrStdout())
			}
			return exportURL(cmd.Context(), &o, p, cmd.OutOrStdout())
		},
	}
	o.connection(cmd)
	registerStore(cmd, &o.stopped, "of a stopped server")
	registerKMS(cmd, &o.stopped, "KMS key of --data-dir (default "+kmsKeyFile+" in it) or --store")
	flags := cmd.Flags()
	flags.BoolVar(&o.whole, "whole", false, "with --url: the entries of all tenants")
	flags.StringVar(&o.output, "output", "-", "file to write, - for standard output")
	flags.StringVar(&o.publicKey, "public-key-out", "", "file to write the log's public key to (PEM)")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	for _, where := range []string{"data-dir", "store"} {
		cmd.MarkFlagsMutuallyExclusive("url", where)
		cmd.MarkFlagsMutuallyExclusive("whole", where)
	}
	cmd.MarkFlagsMutuallyExclusive("url", "kms-key-file")
	cmd.MarkFlagsMutuallyExclusive("url", "kms-url")
	return cmd
}

// writeExport gives write an export that goes on behind what output has. It
// keeps what was written when write fails.
func writeExport(output string, tenant bool, p *progress, stdout io.Writer, write func(*entries) error) error {
	if output == "-" {
		x := &entries{w: bufio.NewWriterSize(stdout, 1<<16), tenant: tenant, progress: p}
		return errors.Join(write(x), x.w.Flush())
	}
	x, err := openExport(output, tenant, p)
	if err != nil {
		return err
	}
	if err := x.finish(write(&x.entries)); err != nil {
		return fmt.Errorf("exporting to %s: %w", filepath.Base(output), err)
	}
	return nil
}

// exportStopped exports the log of a store that nobody is using. It verifies all
// of it each time, and writes what is new.
func exportStopped(ctx context.Context, o *exportOptions, p *progress, stdout io.Writer) error {
	return o.with(ctx, func(s store.Database) error {
		return o.keys(ctx, s, nil, func(keys *keyring.Ring) error {
			if err := writePublicKey(o.publicKey, keys.Audit().Public().MarshalPEM()); err != nil {
				return err
			}
			log := audit.New(time.Now)
			if err := log.Use(ctx, s, keys.Audit(), keys.ChainID()); err != nil {
				return err
			}
			if head, _, err := log.Progress(ctx); err == nil {
				p.expect(head)
			}
			return writeExport(o.output, false, p, stdout, func(x *entries) error {
				if x.last != nil {
					p.skip(x.last.Sequence)
				}
				return streamed(x, func(w io.Writer) error { return audit.NewReader(log, audit.NewGuard(log)).Export(ctx, w, 0) })
			})
		})
	})
}

// streamed adds what write writes.
func streamed(x *entries, write func(io.Writer) error) error {
	r, w := io.Pipe()
	failed := make(chan error, 1)
	go func() {
		err := write(w)
		_ = w.CloseWithError(err) // never fails
		failed <- err
	}()
	err := x.addAll(r)
	_ = r.CloseWithError(errors.Join(errors.New("the export ended"), err))
	if cause := <-failed; cause != nil && (err == nil || errors.Is(err, cause)) {
		return cause
	}
	return err
}

func writePublicKey(file string, pem []byte) error {
	if file == "" {
		return nil
	}
	if err := os.WriteFile(file, pem, 0o644); err != nil {
		return fmt.Errorf("writing the public key: %w", err)
	}
	return nil
}

func exportURL(ctx context.Context, o *exportOptions, p *progress, stdout io.Writer) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	if o.publicKey != "" {
		key, err := fetchKey(ctx, c)
		if err != nil {
			return err
		}
		if err := writePublicKey(o.publicKey, key.public.MarshalPEM()); err != nil {
			return err
		}
	}
	if o.whole {
		return writeExport(o.output, false, p, stdout, func(x *entries) error { return downloadLog(ctx, c, x, p) })
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
	err = writeExport(o.output, true, p, stdout, func(x *entries) error { return downloadTenant(ctx, c, x, part, p) })
	if err != nil {
		return err
	}
	if err := os.Remove(part); err != nil {
		return fmt.Errorf("removing what was fetched: %w", err)
	}
	return nil
}

// downloadLog adds the whole log of a running server, from the last entry that is
// there on.
func downloadLog(ctx context.Context, c *client.V2, x *entries, p *progress) error {
	params := &v2.ExportAuditLogParams{}
	if x.last != nil {
		from := int64(x.last.Sequence)
		params.From = &from
		p.skip(x.last.Sequence)
	}
	if newest, err := c.GetCheckpoint(ctx); err == nil { // else the progress has no percentage
		p.expect(uint64(newest.Sequence))
	}
	return fetchLog(ctx, c, params, x.addAll)
}

// fetchLog has use read an export of the whole log that a server writes.
func fetchLog(ctx context.Context, c *client.V2, params *v2.ExportAuditLogParams, use func(io.Reader) error) error {
	body, err := openDownload(ctx, func(ctx context.Context) (io.ReadCloser, error) { return c.ExportAuditLog(ctx, params) })
	if err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	defer body.Close()
	return use(body)
}

// progress says on standard error how far an export is. Nil says nothing.
type progress struct {
	w        io.Writer
	terminal bool
	count    uint64 // entries that were written
	skipped  uint64 // that were there before
	total    uint64 // 0: unknown
	shown    time.Time
}

// progressEvery is how often it is shown.
const progressEvery = time.Second

func newProgress(w io.Writer, asked bool) *progress {
	p := &progress{w: w, shown: time.Now()}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if !p.terminal && !asked {
		return nil
	}
	return p
}

func (p *progress) expect(total uint64) {
	if p != nil {
		p.total = total
	}
}

func (p *progress) skip(n uint64) {
	if p != nil {
		p.skipped = n
	}
}

func (p *progress) add() {
	if p == nil {
		return
	}
	p.count++
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show("entries")
	}
}

// fetched shows how many entries wait to be put in order.
func (p *progress) fetched(n, of uint64) {
	if p == nil {
		return
	}
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.line("%d of %d entries fetched (%d%%)", n, of, min(100, 100*n/max(of, 1)))
	}
}

func (p *progress) show(what string) {
	if p.total > p.skipped {
		p.line("%d %s (%d%%)", p.count, what, min(100, 100*p.count/(p.total-p.skipped)))
		return
	}
	p.line("%d %s", p.count, what)
}

func (p *progress) line(format string, args ...any) {
	if p.terminal {
		fmt.Fprintf(p.w, "\r\033[K"+format, args...)
		return
	}
	fmt.Fprintf(p.w, format+"\n", args...)
}

func (p *progress) end() {
	if p == nil {
		return
	}
	p.line("%d entries written", p.count)
	if p.terminal {
		fmt.Fprintln(p.w)
	}
}
