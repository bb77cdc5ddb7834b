package auditlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Look looks at a deployment that no server uses, as app.Diagnose does.
type Look func(ctx context.Context, c config.Config, whole bool, row func()) diagnosis.Report

// doctorOptions are the flags of latticekeep doctor.
type doctorOptions struct {
	offline.Deployment
	command.Pin
	server   command.Server
	output   command.Output
	config   string
	look     Look
	explain  string
	accept   []string
	remove   []string
	reason   string
	progress bool
}

// NewDoctorCommand returns the command that says of each part of a deployment whether it is well, and
// examines the rows of a stopped store.
func NewDoctorCommand(look Look) *cobra.Command {
	o := doctorOptions{look: look}
	cmd := &cobra.Command{
		Use:   "doctor (--config FILE | --url URL | --data-dir DIR | --store URL) [--explain ROW | --accept ROW@DIGEST … --reason TEXT | --remove ROW@DIGEST … --reason TEXT]",
		Short: "Say what is wrong with a deployment, running or stopped",
		Long: `Look at each part of a deployment and say whether it is well, why not, and what to
do: configuration, memory, disk, files, store, PostgreSQL, replicas, clock, KMS,
rows, audit log, anchors, archive, backups, certificates and e-mail. Nothing is
changed. The report has no secret and can be pasted into a ticket. A line says
FAILED, warning, skipped or ok.

--config FILE names the deployment by its configuration, as the server reads it. It
asks the server on operations.listen. If none answers there, it looks at the
stopped deployment itself, verifies the whole audit log and reads every row.

--url URL asks a running server: the address of operations.listen, or the server's
own with an API key that has the scope metrics:read.

--data-dir or --store examines only the rows of a store whose server is stopped, after
its audit log is verified. It lists each row that is damaged, missing or not the one
that the log commits to: what is wrong, the newest entry of the log about it, and what
to do. The KMS key is needed.

The exit status is 0 when all is well, also with warnings, 1 when something is wrong, 2
when the command line or the configuration cannot be used, 3 when a server, the store or
the KMS does not answer, and 4 when a server or the KMS refuses its key, or a row is not
accepted or removed.

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

Both may be repeated, and all three need a stopped server. DIGEST is what this command
and --explain print of a row as it is stored: a keyed digest of key and value, or
"absent". A row that has changed since is refused. Rows are spelled as this command
prints them, with their quotes.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.server.RegisterConnection(cmd)
	o.output.Register(cmd, "form of the report with --config or --url: ")
	cmd.Flags().StringVar(&o.config, "config", "", "configuration file of the server; the server's environment variables are read, too")
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
	cmd.MarkFlagsMutuallyExclusive("config", "url", "profile", "data-dir", "store")
	for _, flag := range []string{"password-file", "kms-key-file", "kms-url", "kms-former", "kms-token-file"} {
		cmd.MarkFlagsMutuallyExclusive("config", flag)
	}
	return cmd
}

func (o *doctorOptions) run(cmd *cobra.Command) error {
	ofRows := o.explain != "" || len(o.accept)+len(o.remove) > 0
	switch {
	case len(o.accept)+len(o.remove) > 0 && strings.TrimSpace(o.reason) == "":
		return command.UsageError("--reason is empty: say why, since the log keeps it")
	case len(o.accept)+len(o.remove) == 0 && o.reason != "":
		return command.UsageError("--reason is for --accept and --remove: name the rows")
	}
	if err := o.output.Check(cmd, !o.Named() && !ofRows); err != nil {
		return err
	}
	switch {
	case o.Named():
		return o.runRows(cmd)
	case o.config != "":
		return o.runConfigured(cmd, ofRows)
	}
	if err := o.server.Locate(); err != nil {
		return err
	}
	switch {
	case o.server.URL == "":
		return command.UsageError("say which deployment: --config, --url, --data-dir or --store")
	case ofRows:
		return command.UsageError("--explain, --accept and --remove need a stopped server: name its store with --config, --data-dir or --store")
	}
	c, err := o.server.OpenClient()
	if err != nil {
		return err
	}
	report, err := ask(cmd.Context(), c)
	if err != nil {
		return err
	}
	return o.output.Print(cmd, report)
}

// runConfigured looks at the deployment of a configuration, or at its rows.
func (o *doctorOptions) runConfigured(cmd *cobra.Command, ofRows bool) error {
	c, err := config.Load(o.config, os.Environ(), nil)
	if err != nil {
		return &command.StatusError{Status: command.StatusUsage, Err: err}
	}
	if ofRows {
		o.Deployment = offline.Deployment{
			DataDir: c.DataDir, Store: c.Store.URL, PasswordFile: c.Store.PasswordFile,
			KMSURL: c.KMS.URL, FormerKMSURLs: c.KMS.Former, TokenFile: c.KMS.TokenFile,
		}
		return o.runRows(cmd)
	}
	if report, ok := o.askOperations(cmd.Context(), c.Operations.Listen); ok {
		return o.output.Print(cmd, report)
	}
	p := progress.New(cmd.ErrOrStderr(), o.progress)
	defer p.EndOf("rows read")
	return o.output.Print(cmd, o.look(cmd.Context(), c, true, func() { p.AddOf("rows") }))
}

// askOperations asks the server that listens for operations on this machine. ok is false when none
// answers with a diagnosis.
func (o *doctorOptions) askOperations(ctx context.Context, listen string) (report diagnosis.Report, ok bool) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return diagnosis.Report{}, false
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	ctx, cancel := context.WithTimeout(ctx, 2*diagnosis.Limit)
	defer cancel()
	c, err := client.New("http://" + net.JoinHostPort(host, port))
	if err != nil {
		return diagnosis.Report{}, false
	}
	report, err = ask(ctx, c.V2)
	return report, err == nil
}

// ask returns what a server sees of its parts.
func ask(ctx context.Context, c *client.V2) (diagnosis.Report, error) {
	answer, err := c.GetDiagnosis(ctx)
	if err != nil {
		return diagnosis.Report{}, fmt.Errorf("asking the server: %w", err)
	}
	r := diagnosis.Report{Status: diagnosis.Status(answer.Status), Version: answer.Version, Time: answer.Time}
	for _, l := range answer.Lines {
		line := diagnosis.Line{Part: diagnosis.Part(l.Part), Status: diagnosis.Status(l.Status), Message: l.Message}
		if l.Remedy != nil {
			line.Remedy = *l.Remedy
		}
		if l.Runbook != nil {
			line.Runbook = *l.Runbook
		}
		r.Lines = append(r.Lines, line)
	}
	return r, nil
}

// runRows examines the rows of a store, or changes some.
func (o *doctorOptions) runRows(cmd *cobra.Command) error {
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
