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
	reason   string
	progress bool
}

// Statuses with which latticekeep doctor ends.
const (
	statusFindings = 1
	statusUnknown  = 2 // it could not look
)

// NewDoctorCommand returns the command that examines the rows of a stopped store.
func NewDoctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor (--data-dir DIR | --store URL) [--explain ROW | --accept ROW … --reason TEXT]",
		Short: "Find damaged, missing and replaced rows of a stopped store",
		Long: `Examine every row of a store whose server is stopped, after its audit log is
verified. It lists each row that is damaged, missing or not the one that the log
commits to: what is wrong, the newest entry of the log about it, and what to do. The
KMS key is needed. Nothing is changed.

The exit status is 0 when all is well, 1 when rows are wrong, and 2 when it could
not look: the log does not hold, or the store or the KMS does not answer.

--explain ROW says what a row is for, what is stored, what the state says, and
what the log has about it. For an API key, a user or a session it counts the
entries that it has made since the newest change, such as its revocation.

--accept ROW takes a row as it is, also one that is missing: the log commits to it
from then on, and an entry STATE_ROWS_ACCEPTED names it with --reason. Accept a row
only if you know who wrote it: a row that was put back may be a revoked key or an
earlier role. It may be repeated. A row that is damaged, or that contradicts an entry
of the log, is not accepted: restore a backup.

Rows are spelled as this command prints them, with their quotes.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := o.run(cmd)
			var s *command.StatusError
			if err != nil && !errors.As(err, &s) {
				err = &command.StatusError{Status: statusUnknown, Err: err}
			}
			return err
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return &command.StatusError{Status: statusUnknown, Err: err}
	})
	command.RegisterStore(cmd, &o.Deployment, "of a stopped server")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key of --data-dir (default "+offline.KMSKeyFileName+" in it) or --store")
	o.Pin.Register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&o.explain, "explain", "", "row to explain")
	flags.StringArrayVar(&o.accept, "accept", nil, "row to accept as it is; may be repeated")
	flags.StringVar(&o.reason, "reason", "", "with --accept: why, in 1 to 200 printable ASCII characters; the log keeps it for good")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	cmd.MarkFlagsMutuallyExclusive("explain", "accept")
	return cmd
}

func (o *doctorOptions) run(cmd *cobra.Command) error {
	if err := command.CheckNotEmpty(cmd, "explain"); err != nil {
		return err
	}
	switch {
	case !o.Named():
		return errors.New("say which store: --data-dir or --store")
	case len(o.accept) > 0 && strings.TrimSpace(o.reason) == "":
		return errors.New("--reason is empty: say why the rows are right as they are, since the log keeps it")
	case len(o.accept) == 0 && o.reason != "":
		return errors.New("--reason is for --accept: name the rows")
	}
	a, err := o.Options(cmd)
	if err != nil {
		return err
	}
	p := progress.New(cmd.ErrOrStderr(), o.progress)
	defer p.EndOf("rows read")
	row := func() { p.AddOf("rows") }
	if len(o.accept) > 0 {
		return o.acceptRows(cmd, a, row)
	}
	return o.WithStore(cmd.Context(), func(s store.Database) error {
		x, err := o.examine(cmd.Context(), s, a, doctor.Options{Row: row})
		if err != nil {
			return err
		}
		if o.explain != "" {
			e, err := x.Explain(cmd.Context(), o.explain)
			if err != nil {
				return err
			}
			return printExplanation(cmd.OutOrStdout(), e)
		}
		return o.printExamination(cmd.OutOrStdout(), x)
	})
}

// examine verifies the log and examines the rows.
func (o *doctorOptions) examine(ctx context.Context, s store.Store, a verify.Options, d doctor.Options) (x *doctor.Examination, err error) {
	if d.Report, err = verify.Store(ctx, s, a); err != nil {
		return nil, fmt.Errorf("verifying the log, which the rows are held against; restore a backup: %w", err)
	}
	if !o.HasKMSKey() {
		return nil, errors.New("the KMS key is needed: " + namesKMS)
	}
	return examine(ctx, &o.Deployment, s, d)
}

func (o *doctorOptions) printExamination(w io.Writer, x *doctor.Examination) error {
	if len(x.Findings) == 0 {
		_, err := fmt.Fprintf(w, "ok: all is well\n%s\n", rowsLine(x))
		return err
	}
	acceptable := false
	printFindings(w, x, func(f *doctor.Finding) string {
		if !f.Acceptable() {
			return "restore a backup"
		}
		acceptable = true
		return "restore a backup; or, if you know that it is right as it is, accept it"
	})
	if acceptable {
		fmt.Fprintln(w, "To accept a row, with the flags of the store and the KMS key: latticekeep doctor --accept ROW --reason TEXT (in single quotes for a shell)")
	}
	return &command.StatusError{Status: statusFindings, Err: fmt.Errorf("rows that do not hold: %d; latticekeep doctor --explain ROW says more of one", len(x.Findings))}
}

// acceptRows takes rows into the state as they are.
func (o *doctorOptions) acceptRows(cmd *cobra.Command, a verify.Options, row func()) error {
	bound := state.New(nil)
	log := writer.New(time.Now, bound)
	return o.WithWritableStore(cmd.Context(), log.Commit, func(s store.Database) error {
		x, err := o.examine(cmd.Context(), s, a, doctor.Options{State: bound, Row: row})
		if err != nil {
			return err
		}
		done, err := x.Accept(cmd.Context(), log, o.accept, o.reason)
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
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "rows accepted: %d, %s\n%s", done.Rows, entries, left)
		return err
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
	fmt.Fprintf(&b, "stored: %s\nstate: %s\n", e.Stored, e.State)
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
