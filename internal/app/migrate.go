package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

type migrateOptions struct {
	from, to     string
	passwordFile string
	abandon      bool
	progress     bool
}

func newMigrateCommand() *cobra.Command {
	var o migrateOptions
	cmd := &cobra.Command{
		Use:   "migrate --from URL --to URL",
		Short: "Move a deployment to another store, and prove that all of it is there",
		Long: `Move a deployment whose servers are stopped to another store, which must be
empty. A URL is bolt: and a data directory, as bolt:/var/lib/latticekeep, or
postgres://user@host/database.

The source is verified first. Then it is marked, and no server serves it any
more: two deployments that go on from one audit log would fork it. The rows are
copied in pages; a migration that was broken off goes on where it ended when it is
run again. At the end both sides are read as a whole and must have the same number
of rows, the same digest over all of them and the same head of the audit log, and
the target's log and rows are verified. Only then does the target become one that
is served.

The KMS key stays where it is: the target's server needs the same kms.url.

--abandon takes the mark off the source of a migration that did not come to its
end, so that it is served again. What was copied is then of no use.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.abandon {
				if err := abandon(cmd.Context(), o.source()); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "ok: %s is served again; empty what was begun to be its target\n", o.source())
				return err
			}
			if o.to == "" {
				return errors.New("say where to: --to")
			}
			p := newProgress(cmd.ErrOrStderr(), o.progress)
			defer p.endOf("rows copied")
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
	flags.BoolVar(&o.abandon, "abandon", false, "give up a migration that did not come to its end, and serve --from again")
	flags.BoolVar(&o.progress, "progress", false, "show progress although standard error is no terminal")
	_ = cmd.MarkFlagRequired("from") // the flag exists
	cmd.MarkFlagsMutuallyExclusive("abandon", "to")
	return cmd
}

func (o migrateOptions) source() storeAt { return storeAt{url: o.from, passwordFile: o.passwordFile} }
func (o migrateOptions) target() storeAt { return storeAt{url: o.to, passwordFile: o.passwordFile} }

// migrate moves a deployment. What it does can be done again from any point on.
func migrate(ctx context.Context, o migrateOptions, p *progress) (r migrated, err error) {
	source, target := o.source(), o.target()
	if err := errors.Join(named("--from", source.check()), named("--to", target.check())); err != nil {
		return migrated{}, err
	}
	if source.String() == target.String() {
		return migrated{}, errors.New("--from and --to are the same store: name another one to move to")
	}
	from, err := openExisting(ctx, source)
	if err != nil {
		return migrated{}, named("--from", err)
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	m := &move{from: from, source: source, target: target, progress: p}
	defer func() { err = errors.Join(err, m.close()) }()
	if err := m.begin(ctx); err != nil {
		return migrated{}, err
	}
	const again = "what was copied stays, and the same command goes on from there: %w"
	if err := m.copy(ctx); err != nil {
		return migrated{}, fmt.Errorf("copying: "+again, err)
	}
	if err := m.prove(ctx); err != nil {
		return migrated{}, fmt.Errorf("proving that the target has all of it; it is not served: %w", err)
	}
	if err := m.finish(ctx); err != nil {
		return migrated{}, fmt.Errorf("handing over to the target: "+again, err)
	}
	return m.result, nil
}

// named says which of the two stores an error is about.
func named(flag string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", flag, err)
}

// openExisting opens a store that must be there. A data directory that a server
// is using is refused.
func openExisting(ctx context.Context, a storeAt) (store.Database, error) {
	if dir, ok := a.dir(); ok {
		if _, err := os.Stat(filepath.Join(dir, databaseFile)); err != nil {
			return nil, fmt.Errorf("there is no deployment: %w", err)
		}
	}
	return openStoreAt(ctx, a)
}

// move is a migration that is under way. Its mark has the same id on both sides.
type move struct {
	from, to       store.Database
	source, target storeAt
	id             string
	at             mark // of the target
	progress       *progress
	result         migrated
}

// close closes the target, if it was opened.
func (m *move) close() error {
	if m.to == nil {
		return nil
	}
	return m.to.Close()
}

// open opens the target. A data directory is only made when all else is known to
// be right: make says so.
func (m *move) open(ctx context.Context, make bool) (err error) {
	if m.to != nil {
		return nil
	}
	if dir, ok := m.target.dir(); ok {
		if _, err := os.Stat(filepath.Join(dir, databaseFile)); errors.Is(err, fs.ErrNotExist) && !make {
			return nil
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making the data directory: %w", err)
		}
	}
	s, err := openStoreAt(ctx, m.target)
	if err != nil {
		return named("--to", err)
	}
	m.to = s
	return nil
}

// begin verifies the source, marks it, and marks the target: in that order, so
// that there is never a copy of a source that is served.
func (m *move) begin(ctx context.Context) error {
	found, err := markOf(ctx, m.from)
	if err != nil {
		return fmt.Errorf("reading the source: %w", err)
	}
	if found != nil && (found.unfinished() || found.Other != m.target.String()) {
		return named("--from", found.refusal())
	}
	made, err := keyring.Made(ctx, m.from)
	if err == nil && !made {
		err = errors.New("there is no deployment in it: name the store that has it")
	}
	if err != nil {
		return named("--from", err)
	}
	if err := m.open(ctx, false); err != nil {
		return err
	}
	if found != nil && found.State == markMoved && m.to == nil {
		return named("--from", found.refusal())
	}
	if found == nil && m.to != nil { // before anything is written
		if err := m.acceptable(ctx, nil); err != nil {
			return err
		}
	}
	report, err := verifyStore(ctx, m.from, audit.Options{})
	if err != nil {
		return fmt.Errorf("verifying the source, of which nothing was changed: %w", err)
	}
	m.result.report = report
	m.result.from.head = headOf(report)
	if err := m.open(ctx, true); err != nil {
		return err
	}
	if found == nil {
		found = &mark{State: markLeaving, ID: rand.Text(), Other: m.target.String(), Chain: report.Fingerprint, Since: time.Now().UTC().Format(time.RFC3339)}
		if err := putFirst(ctx, m.from, found); err != nil {
			return fmt.Errorf("marking the source: %w", err)
		}
	}
	m.id = found.ID
	received, err := markOf(ctx, m.to)
	switch {
	case err != nil:
		return fmt.Errorf("reading the target: %w", err)
	case found.State == markMoved && received == nil:
		return named("--from", found.refusal()) // all of it was done
	case received != nil && received.ID == m.id && received.Next != nil:
		m.at = *received
		return nil
	}
	if err := m.acceptable(ctx, received); err != nil {
		return err
	}
	m.at = mark{State: markReceiving, ID: m.id, Other: m.source.String(), Chain: report.Fingerprint, Since: found.Since}
	return begin(ctx, m.to, &m.at, m.stale)
}

// acceptable says what is wrong with a target that has another mark, or something
// and none.
func (m *move) acceptable(ctx context.Context, received *mark) (err error) {
	if received == nil {
		if received, err = markOf(ctx, m.to); err != nil {
			return fmt.Errorf("reading the target: %w", err)
		}
	}
	if received != nil && !m.stale(received) {
		return named("--to", received.refusal())
	}
	empty := true
	err = m.to.View(ctx, func(r store.Reader) error {
		empty = true
		return r.Scan(store.Range{}, func(_, _ []byte) bool {
			empty = false
			return false
		})
	})
	if err == nil && received == nil && !empty {
		err = named("--to", notEmpty(ctx, m.to))
	}
	return err
}

// stale says whether a mark is of this migration, which had copied nothing, or of
// an earlier one from this source that was abandoned: what it left can go.
func (m *move) stale(found *mark) bool {
	return found.State == markReceiving && (found.ID == m.id || found.Other == m.source.String())
}

// putFirst marks a store that has no mark.
func putFirst(ctx context.Context, s store.Store, m *mark) error {
	err := s.Update(ctx, func(tx store.Tx) error {
		found, err := readMark(tx)
		if err != nil {
			return err
		}
		if found != nil {
			return found.refusal()
		}
		return m.put(tx)
	})
	if err != nil { // it may have been committed all the same
		if found, read := markOf(ctx, s); read == nil && found != nil && found.ID == m.ID {
			return nil
		}
	}
	return err
}

// copy copies page by page. Each page is one commit of the target, with a mark
// that says how far it has come.
func (m *move) copy(ctx context.Context) error {
	m.progress.skip(m.at.Rows)
	for rest := (store.Range{From: m.at.Next}); ; {
		page, more, err := readRows(ctx, m.from, rest)
		if err != nil {
			return fmt.Errorf("reading the source: %w", err)
		}
		next := m.at
		if len(page) > 0 {
			next.Next = append(slices.Clone(page[len(page)-1].key), 0)
			next.Rows += uint64(len(page))
			err := m.to.Update(ctx, func(tx store.Tx) error {
				err := heldBy(tx, m.id)
				for _, row := range page {
					err = errors.Join(err, tx.Put(row.key, row.value))
				}
				return errors.Join(err, next.put(tx))
			})
			if err != nil {
				return fmt.Errorf("writing the target: %w", err)
			}
		}
		for range page {
			m.progress.addOf("rows")
		}
		m.at, rest.From = next, next.Next
		if !more {
			return nil
		}
	}
}

// finish makes the source one that is not served ever again, and then the target
// one that is.
func (m *move) finish(ctx context.Context) error {
	err := m.to.View(ctx, func(r store.Reader) error { return heldBy(r, m.id) })
	if err != nil {
		return fmt.Errorf("looking at the target: %w", err)
	}
	err = m.from.Update(ctx, func(tx store.Tx) error {
		found, err := readMark(tx)
		if err = errors.Join(err, heldBy(tx, m.id)); err != nil {
			return err
		}
		found.State = markMoved
		return found.put(tx)
	})
	if err != nil {
		return fmt.Errorf("marking the source: %w", err)
	}
	return unmark(ctx, m.to, m.id)
}

// abandon takes the mark off a source from which not all was moved.
func abandon(ctx context.Context, a storeAt) (err error) {
	if err := a.check(); err != nil {
		return named("--from", err)
	}
	s, err := openExisting(ctx, a)
	if err != nil {
		return named("--from", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return s.Update(ctx, func(tx store.Tx) error {
		m, err := readMark(tx)
		switch {
		case err != nil:
			return err
		case m == nil:
			return fault.New(fault.Conflict, "no migration was begun from this store: there is nothing to abandon")
		case m.State != markLeaving:
			return m.refusal()
		}
		return tx.Delete(markRow)
	})
}

// addOf and endOf are add and end for what are no entries.
func (p *progress) addOf(what string) {
	if p == nil {
		return
	}
	p.count++
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show(what)
	}
}

func (p *progress) endOf(what string) {
	if p == nil {
		return
	}
	p.line("%d %s", p.count, what)
	if p.terminal {
		_, _ = io.WriteString(p.w, "\n")
	}
}
