package transfer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/store"
)

type migrateOptions struct {
	from, to     string
	passwordFile string
	abandon      bool
	progress     bool
}

func NewMigrateCommand() *cobra.Command {
	var o migrateOptions
	cmd := &cobra.Command{
		Use:   "migrate --from URL --to URL",
		Short: "Move a deployment to another store, and prove that all of it is there",
		Long: `Move a deployment whose servers are stopped to another store, which must be
empty. A URL is bolt: and a data directory, as bolt:/var/lib/latticekeep, or
postgres://user@host/database.

The source is verified first. Then it is marked, and no server serves it any
more: two deployments that go on from one audit log would fork it. The rows are
copied in pages; an interrupted migration resumes when it is run again. At the
end both sides are read as a whole and must have the same number
of rows, the same digest over all of them and the same head of the audit log, and
the target's log and rows are verified. Only then does the target become one that
is served.

The KMS key stays where it is: the target's server needs the same kms.url.

--abandon removes the mark from the source of an unfinished migration, so that
servers serve it again. The copy is then useless.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.abandon {
				if err := abandon(cmd.Context(), o.source()); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "ok: %s is served again; empty the store that was its target\n", o.source())
				return err
			}
			if o.to == "" {
				return command.UsageError("say where to: --to")
			}
			p := progress.New(cmd.ErrOrStderr(), o.progress)
			defer p.EndOf("rows copied")
			r, err := migrate(cmd.Context(), o, p)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), r.text(o))
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.from, "from", "", "store that has the deployment")
	flags.StringVar(&o.to, "to", "", "empty store that it moves to")
	flags.StringVar(&o.passwordFile, "password-file", "", "file with the password of PostgreSQL (default: what PGPASSWORD says)")
	flags.BoolVar(&o.abandon, "abandon", false, "abandon an unfinished migration, and serve --from again")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	_ = cmd.MarkFlagRequired("from") // cannot fail: the flag exists
	cmd.MarkFlagsMutuallyExclusive("abandon", "to")
	return cmd
}

func (o migrateOptions) source() offline.Location {
	return offline.Location{URL: o.from, PasswordFile: o.passwordFile}
}

func (o migrateOptions) target() offline.Location {
	return offline.Location{URL: o.to, PasswordFile: o.passwordFile}
}

// migrate moves a deployment. It can be repeated after an interruption at any point.
func migrate(ctx context.Context, o migrateOptions, p *progress.Progress) (r migrated, err error) {
	source, target := o.source(), o.target()
	if err := errors.Join(named("--from", source.Check()), named("--to", target.Check())); err != nil {
		return migrated{}, err
	}
	if source.String() == target.String() {
		return migrated{}, command.UsageError("--from and --to are the same store: name another one to move to")
	}
	from, err := offline.OpenExisting(ctx, source)
	if err != nil {
		return migrated{}, named("--from", err)
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	m := &Migration{From: from, Source: source, Target: target, progress: p}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := m.Begin(ctx); err != nil {
		return migrated{}, err
	}
	const again = "what was copied stays; run the same command again to resume: %w"
	if err := m.Copy(ctx); err != nil {
		return migrated{}, fmt.Errorf("copying: "+again, err)
	}
	if err := m.Prove(ctx); err != nil {
		return migrated{}, fmt.Errorf("proving that the target has all of it; it is not served: %w", err)
	}
	if err := m.Finish(ctx); err != nil {
		return migrated{}, fmt.Errorf("handing over to the target: "+again, err)
	}
	return m.result, nil
}

// named prefixes an error with the flag of the store that it is about.
func named(flag string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", flag, err)
}

// Migration is a migration in progress. Its mark has the same id in both stores.
type Migration struct {
	From, To       store.Database
	Source, Target offline.Location
	id             string
	at             offline.Mark // mark of the target
	progress       *progress.Progress
	result         migrated
}

// Close closes the target if it is open.
func (m *Migration) Close() error {
	if m.To == nil {
		return nil
	}
	return m.To.Close()
}

// open opens the target. It creates a data directory only if create is set, once everything else is
// checked.
func (m *Migration) open(ctx context.Context, create bool) (err error) {
	if m.To != nil {
		return nil
	}
	if dir, ok := m.Target.Dir(); ok {
		if _, err := os.Stat(filepath.Join(dir, offline.DatabaseFile)); errors.Is(err, fs.ErrNotExist) && !create {
			return nil
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making the data directory: %w", err)
		}
	}
	s, err := offline.Open(ctx, m.Target)
	if err != nil {
		return named("--to", err)
	}
	m.To = s
	return nil
}

// Begin verifies the source, marks it, and then marks the target. With this order there is never a
// copy of a source that is still served.
func (m *Migration) Begin(ctx context.Context) error {
	found, err := offline.MarkOf(ctx, m.From)
	if err != nil {
		return fmt.Errorf("reading the source: %w", err)
	}
	if found != nil && (found.Unfinished() || found.Other != m.Target.String()) {
		return named("--from", found.Err())
	}
	made, err := keyring.Made(ctx, m.From)
	if err == nil && !made {
		err = errors.New("there is no deployment in it: name the store that has it")
	}
	if err != nil {
		return named("--from", err)
	}
	if err := m.open(ctx, false); err != nil {
		return err
	}
	if found != nil && found.State == offline.Moved && m.To == nil {
		return named("--from", found.Err())
	}
	if found == nil && m.To != nil { // check before anything is written
		if err := m.acceptable(ctx, nil); err != nil {
			return err
		}
	}
	report, err := offline.VerifyStore(ctx, m.From, verify.Options{})
	if err != nil {
		return fmt.Errorf("verifying the source, which is unchanged: %w", err)
	}
	m.result.report = report
	m.result.from.head = headOf(report)
	if err := m.open(ctx, true); err != nil {
		return err
	}
	if found == nil {
		found = &offline.Mark{State: offline.Leaving, ID: rand.Text(), Other: m.Target.String(), Chain: report.Fingerprint, Since: time.Now().UTC().Format(time.RFC3339)}
		if err := offline.PutFirstMark(ctx, m.From, found); err != nil {
			return fmt.Errorf("marking the source: %w", err)
		}
	}
	m.id = found.ID
	received, err := offline.MarkOf(ctx, m.To)
	switch {
	case err != nil:
		return fmt.Errorf("reading the target: %w", err)
	case found.State == offline.Moved && received == nil:
		return named("--from", found.Err()) // the migration was already complete
	case received != nil && received.ID == m.id && received.Next != nil:
		m.at = *received
		return nil
	}
	if err := m.acceptable(ctx, received); err != nil {
		return err
	}
	m.at = offline.Mark{State: offline.Receiving, ID: m.id, Other: m.Source.String(), Chain: report.Fingerprint, Since: found.Since}
	return offline.Claim(ctx, m.To, &m.at, m.stale)
}

// acceptable returns an error if the target has another mark, or has content and no mark.
func (m *Migration) acceptable(ctx context.Context, received *offline.Mark) (err error) {
	if received == nil {
		if received, err = offline.MarkOf(ctx, m.To); err != nil {
			return fmt.Errorf("reading the target: %w", err)
		}
	}
	if received != nil && !m.stale(received) {
		return named("--to", received.Err())
	}
	empty := true
	err = m.To.View(ctx, func(r store.Reader) error {
		empty = true
		return r.Scan(store.Range{}, func(_, _ []byte) bool {
			empty = false
			return false
		})
	})
	if err == nil && received == nil && !empty {
		err = named("--to", offline.NotEmptyError(ctx, m.To))
	}
	return err
}

// stale reports whether a mark belongs to this migration before it copied anything, or to an
// abandoned one from the same source. The target's content can then be removed.
func (m *Migration) stale(found *offline.Mark) bool {
	return found.State == offline.Receiving && (found.ID == m.id || found.Other == m.Source.String())
}

// Copy copies page by page. Each page is one commit in the target, together with a mark that
// records the progress.
func (m *Migration) Copy(ctx context.Context) error {
	m.progress.Skip(m.at.Rows)
	for rest := (store.Range{From: m.at.Next}); ; {
		page, more, err := readRows(ctx, m.From, rest)
		if err != nil {
			return fmt.Errorf("reading the source: %w", err)
		}
		next := m.at
		if len(page) > 0 {
			next.Next = append(slices.Clone(page[len(page)-1].key), 0)
			next.Rows += uint64(len(page))
			err := m.To.Update(ctx, func(tx store.Tx) error {
				err := offline.CheckHolder(tx, m.id)
				for _, row := range page {
					err = errors.Join(err, tx.Put(row.key, row.value))
				}
				return errors.Join(err, next.Put(tx))
			})
			if err != nil {
				return fmt.Errorf("writing the target: %w", err)
			}
		}
		for range page {
			m.progress.AddOf("rows")
		}
		m.at, rest.From = next, next.Next
		if !more {
			return nil
		}
	}
}

// Finish first marks the source as moved for good, and then unmarks the target so that it is
// served.
func (m *Migration) Finish(ctx context.Context) error {
	err := m.To.View(ctx, func(r store.Reader) error { return offline.CheckHolder(r, m.id) })
	if err != nil {
		return fmt.Errorf("looking at the target: %w", err)
	}
	err = m.From.Update(ctx, func(tx store.Tx) error {
		found, err := offline.ReadMark(tx)
		if err = errors.Join(err, offline.CheckHolder(tx, m.id)); err != nil {
			return err
		}
		found.State = offline.Moved
		return found.Put(tx)
	})
	if err != nil {
		return fmt.Errorf("marking the source: %w", err)
	}
	return offline.Unmark(ctx, m.To, m.id)
}

// abandon removes the mark from a source whose migration is incomplete.
func abandon(ctx context.Context, a offline.Location) (err error) {
	if err := a.Check(); err != nil {
		return named("--from", err)
	}
	s, err := offline.OpenExisting(ctx, a)
	if err != nil {
		return named("--from", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return s.Update(ctx, func(tx store.Tx) error {
		m, err := offline.ReadMark(tx)
		switch {
		case err != nil:
			return err
		case m == nil:
			return fault.New(fault.Conflict, "no migration was begun from this store: there is nothing to abandon")
		case m.State != offline.Leaving:
			return m.Err()
		}
		return tx.Delete(offline.MarkRow)
	})
}

// migrated is the proven content of both stores.
type migrated struct {
	from, to contents
	report   verify.Report
}

func (r migrated) text(o migrateOptions) string {
	side := func(w contents) string {
		return fmt.Sprintf("%d rows, digest %s, head %s", w.rows, hex.EncodeToString(w.digest[:]), w.head)
	}
	return fmt.Sprintf(`ok: the deployment is in %s
source: %s
target: %s
chain: %s
The source is marked as moved, and is not served any more. Name the target in the server's configuration, with the KMS key as it was, and start it.
`, o.target(), side(r.from), side(r.to), r.report.Fingerprint)
}

// Prove reads both stores completely and verifies the target.
func (m *Migration) Prove(ctx context.Context) (err error) {
	if err := summarize(ctx, m.From, &m.result.from); err != nil {
		return fmt.Errorf("reading the source: %w", err)
	}
	if err := summarize(ctx, m.To, &m.result.to); err != nil {
		return fmt.Errorf("reading the target: %w", err)
	}
	if m.result.from.rows != m.result.to.rows || m.result.from.digest != m.result.to.digest {
		return fmt.Errorf("the source has %d rows and the target %d, and they are not the same ones: something else has written to one of them; "+
			"empty the target, and run the migration again", m.result.from.rows, m.result.to.rows)
	}
	report, err := offline.VerifyStore(ctx, m.To, verify.Options{Fingerprint: m.result.report.Fingerprint})
	if err != nil {
		return fmt.Errorf("verifying the target: %w", err)
	}
	if m.result.to.head = headOf(report); m.result.to.head != m.result.from.head {
		return fmt.Errorf("the source's log ends at %s and the target's at %s", m.result.from.head, m.result.to.head)
	}
	return nil
}
