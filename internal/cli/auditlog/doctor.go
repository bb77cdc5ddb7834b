package auditlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// doctorOptions are the flags of latticekeep doctor.
type doctorOptions struct {
	offline.Deployment
	command.Pin
	explain  string
	accept   []string
	remove   []string
	reason   string
	progress bool
}

// NewDoctorCommand returns the command that examines the rows of a stopped store.
func NewDoctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor (--data-dir DIR | --store URL) [--explain ROW | --accept ROW@DIGEST … --reason TEXT | --remove ROW@DIGEST … --reason TEXT]",
		Short: "Find damaged, missing and replaced rows of a stopped store",
		Long: `Examine every row of a store whose server is stopped, after its audit log is
verified. It lists each row that is damaged, missing or not the one that the log
commits to: what is wrong, the newest entry of the log about it, and what to do. The
KMS key is needed. Nothing is changed.

The exit status is 0 when all is well, 1 when rows are wrong or the log does not
hold, 3 when the store or the KMS does not answer, and 4 when the KMS refuses its key
or a row is not accepted or removed.

--explain ROW says what a row is for, what is stored, what the state says, and
what the log has about it. For an API key, a user or a session it counts the
entries that it has made since the newest change, such as its revocation.

--accept ROW@DIGEST takes a row as it is, also one that is missing: the log commits
to it from then on, and an entry STATE_ROWS_ACCEPTED names it with --reason. Accept a
row only if you know who wrote it: a row that was put back may be a revoked key or an
earlier role. A row that is damaged, or that contradicts an entry of the log, is not
accepted: restore a backup, or remove the row.

--remove ROW@DIGEST deletes a row that is wrong and that nobody needs, such as a
revoked key that was put back: the log commits to its absence, and an entry
STATE_ROWS_REMOVED names it with --reason. It refuses if something else would be
wrong without the row, as when the log has a credential that was not deleted.

Both may be repeated. DIGEST is what this command and --explain print of a row as it
is stored: a keyed digest of key and value, or "absent". A row that has changed since
is refused. Rows are spelled as this command prints them, with their quotes.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	command.RegisterStore(cmd, &o.Deployment, "of a stopped server")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key of --data-dir (default "+offline.KMSKeyFileName+" in it) or --store")
	o.Pin.Register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&o.explain, "explain", "", "row to explain")
	flags.StringArrayVar(&o.accept, "accept", nil, "row to accept as it is, with the digest that was printed; may be repeated")
	flags.StringArrayVar(&o.remove, "remove", nil, "row to delete, with the digest that was printed; may be repeated")
	flags.StringVar(&o.reason, "reason", "", "with --accept or --remove: why, in 1 to 200 printable ASCII characters; the log keeps it for good")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	cmd.MarkFlagsMutuallyExclusive("explain", "accept", "remove")
	return cmd
}

func (o *doctorOptions) run(cmd *cobra.Command) error {
	switch {
	case !o.Named():
		return command.UsageError("say which store: --data-dir or --store")
	case len(o.accept)+len(o.remove) > 0 && strings.TrimSpace(o.reason) == "":
		return command.UsageError("--reason is empty: say why, since the log keeps it")
	case len(o.accept)+len(o.remove) == 0 && o.reason != "":
		return command.UsageError("--reason is for --accept and --remove: name the rows")
	}
	a, err := o.Options()
	if err != nil {
		return err
	}
	p := progress.New(cmd.ErrOrStderr(), o.progress)
	defer p.EndOf("rows read")
	row := func() { p.AddOf("rows") }
	if len(o.accept)+len(o.remove) > 0 {
		return o.changeRows(cmd, a, row)
	}
	return o.WithStore(cmd.Context(), func(s store.Database) error {
		return o.examine(cmd.Context(), s, a, doctor.Options{Row: row}, func(x *doctor.Examination, r verify.Report) error {
			if o.explain == "" {
				return o.printExamination(cmd.OutOrStdout(), x, r)
			}
			e, err := x.Explain(cmd.Context(), o.explain)
			if err != nil {
				return err
			}
			return printExplanation(cmd.OutOrStdout(), e)
		})
	})
}

// examine verifies the log, examines the rows, and passes what was found to use, while the KMS keys
// are open.
func (o *doctorOptions) examine(ctx context.Context, s store.Store, a verify.Options, d doctor.Options, use func(*doctor.Examination, verify.Report) error) (err error) {
	if d.Report, err = verify.Store(ctx, s, a); err != nil {
		return fmt.Errorf("verifying the log, which the rows are held against; restore a backup: %w", err)
	}
	if !o.HasKMSKey() {
		return command.UsageError("the KMS key is needed: " + namesKMS)
	}
	return o.WithKMS(ctx, func(keys []keyring.KMS) error {
		d.KMS = keys
		x, err := doctor.Examine(ctx, s, d)
		if err != nil {
			return err
		}
		return use(x, d.Report)
	})
}

func (o *doctorOptions) printExamination(w io.Writer, x *doctor.Examination, r verify.Report) error {
	if len(x.Findings) == 0 {
		archived := ""
		if r.From > 1 {
			archived = archivedLine(r) + "; latticekeep audit verify --archive URL verifies them too\n"
		}
		_, err := fmt.Fprintf(w, "ok: all is well\n%s\n%s", rowsLine(x), archived)
		return err
	}
	choice := false
	printFindings(w, x, func(f *doctor.Finding) string {
		remedy := "restore a backup"
		if f.Acceptable() {
			remedy += "; or, if you know that it is right as it is, accept " + f.Named()
		}
		if f.Removable() {
			remedy += "; or, if nobody needs it, remove " + f.Named()
		}
		choice = choice || f.Acceptable() || f.Removable()
		return remedy
	})
	if choice {
		fmt.Fprintln(w, "To accept or remove a row, with the flags of the store and the KMS key: latticekeep doctor --accept ROW@DIGEST --reason TEXT, or --remove (ROW@DIGEST in single quotes for a shell)")
	}
	return fmt.Errorf("rows that do not hold: %d; latticekeep doctor --explain ROW says more of one", len(x.Findings))
}

// changeRows accepts rows as they are, or removes them.
func (o *doctorOptions) changeRows(cmd *cobra.Command, a verify.Options, row func()) error {
	bound := state.New(nil)
	log := writer.New(time.Now, bound)
	return o.WithWritableStore(cmd.Context(), log.Commit, func(s store.Database) error {
		return o.examine(cmd.Context(), s, a, doctor.Options{State: bound, Row: row}, func(x *doctor.Examination, _ verify.Report) error {
			what, change, rows := "accepted", x.Accept, o.accept
			if len(o.remove) > 0 {
				what, change, rows = "removed", x.Remove, o.remove
			}
			done, err := change(cmd.Context(), log, rows, o.reason)
			if k := fault.Of(err); k == fault.Invalid || k == fault.Conflict || errors.Is(err, doctor.ErrNoRow) {
				err = &command.StatusError{Status: command.StatusRefused, Err: err}
			}
			if err != nil {
				return err
			}
			entries := fmt.Sprintf("entry %d", done.First)
			if done.Last > done.First {
				entries = fmt.Sprintf("entries %d to %d", done.First, done.Last)
			}
			left := ""
			if n := len(x.Findings) - done.Rows; n > 0 {
				left = fmt.Sprintf("rows that still do not hold: %d\n", n)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "rows %s: %d, %s\n%s", what, done.Rows, entries, left)
			return err
		})
	})
}

func printExplanation(out io.Writer, e *doctor.Explanation) error {
	var b strings.Builder
	fmt.Fprintf(&b, "row: %s\n", e.Row)
	if e.Family == "" {
		b.WriteString("family: none that this release knows\n")
	} else {
		fmt.Fprintf(&b, "family: %s\nsays: %s\nrisk: %s\n", e.Family, e.Says, e.Risk)
	}
	fmt.Fprintf(&b, "stored: %s\n", e.Stored)
	if e.Digest != "" {
		fmt.Fprintf(&b, "digest: %s\n", e.Digest)
	}
	fmt.Fprintf(&b, "state: %s\n", e.State)
	if e.Finding == nil {
		b.WriteString("wrong: nothing was found\n")
	} else {
		for _, p := range e.Finding.Problems {
			fmt.Fprintf(&b, "wrong: %s\n", p)
		}
	}
	if e.Resource != "" {
		fmt.Fprintf(&b, "resource: %s\n", command.Printable(e.Resource))
	}
	for _, entry := range e.Entries {
		fmt.Fprintf(&b, "log: %s\n", entry)
	}
	if a := e.Activity; a != nil && a.Since != nil {
		switch n := a.Count(); n {
		case 0:
			fmt.Fprintf(&b, "done since entry %d: nothing\n", a.Since.Sequence)
		default:
			fmt.Fprintf(&b, "done since entry %d: %d entries, %d to %d\n", a.Since.Sequence, n, a.First, a.Last)
		}
		for _, t := range slices.Sorted(maps.Keys(a.Types)) {
			fmt.Fprintf(&b, "  %s: %d\n", t, a.Types[t])
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}
