package auditlog

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/export"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/store"
)

// verifyOptions are the flags of latticekeep audit verify.
type verifyOptions struct {
	command.Server
	command.Pin
	offline.Deployment
	file, archive, since string
	whole, progress      bool
	tenant               string
	from, to             *uint64
}

func (o *verifyOptions) verifier() *export.Verifier {
	return &export.Verifier{Archive: o.archive, Tenant: o.tenant}
}

func newAuditVerifyCommand() *cobra.Command {
	var o verifyOptions
	cmd := &cobra.Command{
		Use:   "verify (--data-dir DIR | --store URL | --file EXPORT | --url URL [--whole])",
		Short: "Verify every entry, link and signature of an audit log",
		Long: `Verify an audit log, and name the first bad sequence if it does not hold. The
exit status is 0 only if all of it holds, 1 if it does not, 3 if a server, a
store or a file cannot be read, and 4 if the server refuses.

  --data-dir     the whole log of a data directory whose server is stopped, and
                 its rows: credentials, API keys and namespaces must be those of
                 the log, and no key may be missing
  --store        likewise, as a URL: bolt:DIR or postgres://user@host/database
  --file         an export (latticekeep audit export), of the whole log or of a
                 tenant; - is standard input
  --url          your tenant's part of the log of a running server, by its own
                 links, the server's newest checkpoint, and the proof that your
                 newest entry is in it; the API key needs the scope audit:read
  --url --whole  the whole log of a running server; needs system:admin

With the KMS key (--kms-key-file or --kms-url) of a store, all rows are checked:
all keys open, every MAC is right, the index of names leads to the credentials,
and each row that decides who may do what is the one that the log commits to. Each
row that is not is named; latticekeep doctor says more of it.

--fingerprint (printed by the server as "chain") or --public-key says whose log
it must be. Without either a log that holds is self-consistent only: someone
with another key could have written all of it.

--since FILE proves that the log holds all that an older checkpoint knows
(latticekeep audit checkpoint): that it was not cut, forked or rewritten since.
FILE may also be the text that a report prints: nobody signed that, so what it
says is as good as the copy of the report.
Without one, a log that lost its newest entries looks like one that never had them.

--from and --to verify a part, which says nothing of what comes before. Older
entries that are archived are verified too with --archive, the URL of the bucket
as in audit.retention.archive.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := o.Options()
			if err != nil {
				return err
			}
			if o.since != "" {
				if a.Since, err = os.ReadFile(o.since); err != nil {
					return fmt.Errorf("reading the older checkpoint: %w", err)
				}
			}
			if o.from != nil {
				a.From = *o.from
			}
			if o.to != nil {
				a.To = *o.to
			}
			if o.to != nil && a.From > a.To {
				return command.UsageError("--from must not be later than --to")
			}
			if !o.Named() && o.file == "" {
				if err := o.Locate(); err != nil {
					return err
				}
			}
			p := progress.New(cmd.ErrOrStderr(), o.progress)
			a.Entry = func() { p.AddOf("entries verified") }
			var report verify.Report
			var rows *doctor.Examination
			var proven []string
			switch {
			case o.Named():
				report, rows, err = o.verifyDir(cmd.Context(), a)
			case o.file != "":
				report, err = o.verifier().VerifyFile(cmd.Context(), cmd.InOrStdin(), o.file, a)
			case o.Server.URL != "":
				var c *client.V2
				if c, err = o.Client(); err == nil {
					report, proven, err = o.verifier().VerifyServer(cmd.Context(), c, o.whole, a)
				}
			default:
				return command.UsageError("say which log: --data-dir, --store, --file or --url")
			}
			p.EndOf("entries verified")
			if err != nil {
				return err
			}
			// The key of a partial log comes from the same source as the log, so it pins nothing.
			report.Pinned = o.Fingerprint != "" || o.PublicKey != ""
			if a.From > 1 || a.To > 0 {
				report.Credentials = nil
			}
			if rows != nil {
				if len(rows.Findings) > 0 {
					printFindings(cmd.OutOrStdout(), rows, nil)
					return rowsError(rows)
				}
				proven = append(proven, rowsLine(rows))
			}
			return printReport(cmd.OutOrStdout(), report, proven...)
		},
	}
	o.RegisterConnection(cmd)
	o.Pin.Register(cmd)
	command.RegisterStore(cmd, &o.Deployment, "of a stopped server")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key of --data-dir (default "+offline.KMSKeyFileName+" in it) or --store, to check all rows")
	flags := cmd.Flags()
	flags.StringVar(&o.file, "file", "", "export to verify, - for standard input")
	flags.BoolVar(&o.whole, "whole", false, "with --url: the entries of all tenants")
	flags.StringVar(&o.tenant, "tenant", "", "with --file: it must be the export of this tenant, as system, whose first entry is also that of the whole log")
	flags.StringVar(&o.since, "since", "", "file with an older checkpoint, or its text from a report, that the log must go on from")
	flags.StringVar(&o.archive, "archive", "", "URL of the bucket with the entries that were archived")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	command.Int(cmd, &o.from, "from", 1, audit.MaxInteger, "first sequence to verify")
	command.Int(cmd, &o.to, "to", 1, audit.MaxInteger, "last sequence to verify")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "file", "url", "profile")
	cmd.MarkFlagsMutuallyExclusive("store", "file", "url", "profile")
	for _, key := range []string{"kms-key-file", "kms-url"} {
		cmd.MarkFlagsMutuallyExclusive(key, "file")
		cmd.MarkFlagsMutuallyExclusive(key, "url", "profile")
	}
	cmd.MarkFlagsMutuallyExclusive("archive", "from")
	cmd.MarkFlagsMutuallyExclusive("archive", "to")
	cmd.MarkFlagsMutuallyExclusive("since", "from")
	cmd.MarkFlagsMutuallyExclusive("since", "to")
	return cmd
}

func printReport(w io.Writer, r verify.Report, proven ...string) error {
	live := 0
	for _, state := range r.Credentials {
		if !state.Deleted {
			live++
		}
	}
	var b strings.Builder
	switch {
	case r.Tenant != "":
		fmt.Fprintf(&b, "ok: the log of tenant %s, as far as the server showed it: %d entries, %d to %d\n", r.Tenant, r.Entries, r.From, r.Sequence)
	case r.Credentials != nil && r.From == 1:
		fmt.Fprintf(&b, "ok: the whole log: %d entries, %d live credentials\n", r.Entries, live)
	case r.Credentials != nil:
		fmt.Fprintf(&b, "ok: the log from entry %d on, behind what is archived: %d entries, %d live credentials\n", r.From, r.Entries, live)
	default:
		rest := "before and after it"
		if r.From == 1 {
			rest = "after it"
		}
		fmt.Fprintf(&b, "ok: a part of the log: %d entries, %d to %d; the entries %s were not verified\n", r.Entries, r.From, r.Sequence, rest)
	}
	if r.Credentials != nil && r.Tenant == "" && r.From > 1 {
		b.WriteString(archivedLine(r) + "; --archive URL verifies them too\n")
	}
	fmt.Fprintf(&b, "head: %d %s\n", r.Sequence, r.Hash)
	if r.Size > 0 && r.Tenant == "" {
		fmt.Fprintf(&b, "tree: %d entries, root %s, epoch %d\n", r.Size, r.Root, r.Epoch)
	}
	for _, lost := range r.Rollbacks {
		fmt.Fprintf(&b, "rollback: entry %d accepts that entries %d to %d were lost, and begins epoch %d\n", lost.Sequence, lost.LostFrom, lost.LostTo, lost.Epoch)
	}
	if r.Since != nil {
		fmt.Fprintf(&b, "since: the log holds all that the checkpoint of entry %d knows (%d entries)\n", r.Since.Sequence, r.Since.Size)
	}
	for _, line := range proven {
		b.WriteString(line + "\n")
	}
	whose := "self-consistent only: pin it with --fingerprint to know whose log it is"
	if r.Pinned {
		whose = "the pinned one"
	}
	if r.Fingerprint == "" { // a partial log does not name its chain
		fmt.Fprintf(&b, "key: %s (%s)\n", r.PublicKey.ID(), whose)
	} else {
		fmt.Fprintf(&b, "chain: %s (%s)\n", r.Fingerprint, whose)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// archivedLine says which entries a verification of a store has not looked at.
func archivedLine(r verify.Report) string {
	return fmt.Sprintf("not verified: entries 1 to %d, which are in the archive", r.From-1)
}

// verifyDir verifies the store of a stopped server, and its archive if one is named. It examines the
// rows when the whole log is verified.
func (o *verifyOptions) verifyDir(ctx context.Context, a verify.Options) (report verify.Report, rows *doctor.Examination, err error) {
	if a.From > 1 && a.PublicKey == nil { // take the key from the store
		first, err := o.Verify(ctx, verify.Options{To: 1, Fingerprint: a.Fingerprint})
		if err != nil {
			return verify.Report{}, nil, err
		}
		a.PublicKey, a.Fingerprint = first.PublicKey, ""
	}
	err = o.WithStore(ctx, func(s store.Database) (err error) {
		if report, err = verify.Store(ctx, s, a); err != nil || a.From > 1 || a.To > 0 {
			return err // a partial log does not show which rows exist
		}
		if rows, err = examine(ctx, &o.Deployment, s, doctor.Options{Report: report}); err != nil || o.archive == "" {
			return err
		}
		bucket, err := objects.OpenExisting(ctx, o.archive)
		if err != nil {
			return fmt.Errorf("--archive: %w", err)
		}
		defer bucket.Close()
		report, err = verify.StoreWithArchive(ctx, s, bucket, a)
		return err
	})
	return report, rows, err
}

// examine examines the rows of a store, with the KMS keys if some are named.
func examine(ctx context.Context, d *offline.Deployment, s store.Store, o doctor.Options) (x *doctor.Examination, err error) {
	if !d.HasKMSKey() {
		return doctor.Examine(ctx, s, o)
	}
	err = d.WithKMS(ctx, func(keys []keyring.KMS) (err error) {
		o.KMS = keys
		x, err = doctor.Examine(ctx, s, o)
		return err
	})
	return x, err
}

const namesKMS = "name the KMS key with --kms-key-file or --kms-url"

// rowsLine says what was checked of rows that hold.
func rowsLine(x *doctor.Examination) string {
	switch {
	case !x.Keys:
		return "rows: credentials, API keys, namespaces and the presence of keys; rows under a MAC, the content of keys and the state were not checked: " + namesKMS
	case x.Stateless:
		return fmt.Sprintf("rows: %d, with every key and MAC; there is no state yet, since no server of this release has served the store: rows that were put back are not all found", x.Rows)
	}
	return fmt.Sprintf("rows: %d, with every key and MAC, and those that decide are what the log commits to", x.Rows)
}

// printFindings lists the rows that do not hold. remedy adds a line to each; nil adds none.
func printFindings(w io.Writer, x *doctor.Examination, remedy func(*doctor.Finding) string) {
	for _, f := range x.Findings {
		fmt.Fprintf(w, "%s\n  family: %s\n", f.Row(), f.Family)
		if f.Group != nil {
			fmt.Fprintf(w, "  key: unknown; it begins with %+q\n", f.Group)
		}
		for _, p := range f.Problems {
			fmt.Fprintf(w, "  wrong: %s\n", p)
		}
		if f.Entry != nil {
			fmt.Fprintf(w, "  log: %s\n", f.Entry)
		}
		if remedy != nil {
			fmt.Fprintf(w, "  do: %s\n", remedy(f))
		}
	}
	if x.More {
		fmt.Fprintln(w, "and more rows, which are not listed")
	}
	switch {
	case !x.Keys:
		fmt.Fprintln(w, "not checked: rows under a MAC, the content of keys, and the state")
	case x.Stateless || !x.State:
		fmt.Fprintln(w, "not checked: the state")
	}
}

// rowsError is the error of a store with findings. It wraps the [audit.Broken] of the lowest sequence
// that contradicts a row.
func rowsError(x *doctor.Examination) error {
	rows := "1 row does"
	if n := len(x.Findings); n > 1 {
		rows = fmt.Sprintf("%d rows do", n)
	}
	advice := "restore a backup, or see latticekeep doctor"
	if !x.Keys {
		advice = namesKMS + " to see which others"
	}
	if b := x.Broken(); b != nil {
		return fmt.Errorf("%s not hold: %s: %w", rows, advice, b)
	}
	return fmt.Errorf("%s not hold: %s", rows, advice)
}
