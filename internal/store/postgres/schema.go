package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Versions of the tables. Both have the same tables. Releases before the row of package format look
// at the version alone, at their start and at each commit, and know only the first one. So the
// commit that raises the row sets the second one, and these releases write nothing from that commit
// on. No start of a program sets it.
//
// Each migration is one file, which never changes after its release. The next one has the number 3.
const (
	tablesVersion = 1 // number of the last migration
	raisedVersion = 2 // the row keeps some release away
)

// isKnown reports whether this program knows a version of the tables.
func isKnown(version int64) bool { return version == tablesVersion || version == raisedVersion }

// ErrNoTables is the error of [Open] for reading when no program has made the tables yet.
var ErrNoTables = errors.New("the database has no tables yet: start latticekeep for writing once")

func errSchema(version int64) error {
	if version == 0 {
		return ErrNoTables
	}
	if version > raisedVersion {
		return fmt.Errorf("the database has schema %d, and this program knows %d: run the newer latticekeep that made it", version, raisedVersion)
	}
	return fmt.Errorf("the database has schema %d instead of %d: start latticekeep for writing once", version, tablesVersion)
}

// migrate brings the tables to this program's schema. Several processes may migrate at once, also
// on an empty database.
func (s *server) migrate(ctx context.Context, readOnly bool) error {
	for try := 0; ; try++ {
		err := s.migrateOnce(ctx, readOnly)
		if err == nil || !raced(err) || try == 50 {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// raced reports whether another process was creating the same tables. PostgreSQL's "if not exists"
// does not exclude that, and reports it with several codes.
func raced(err error) bool {
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return false
	}
	switch pe.Code {
	case "23505", "42P07", "42710", "40001", "40P01", "XX000": // XX000 is "tuple concurrently updated"
		return true
	}
	return false
}

func (s *server) migrateOnce(ctx context.Context, readOnly bool) error {
	c, err := s.connect(ctx, tending)
	if err != nil {
		return err
	}
	defer c.kill()
	version, err := c.schema(ctx)
	if err != nil || isKnown(version) {
		return err
	}
	if readOnly || version > raisedVersion {
		return errSchema(version)
	}
	for _, text := range []string{
		"CREATE TABLE IF NOT EXISTS latticekeep_schema (id smallint PRIMARY KEY CHECK (id = 1), version bigint NOT NULL)",
		"INSERT INTO latticekeep_schema VALUES (1, 0) ON CONFLICT DO NOTHING",
		"BEGIN",
	} {
		if err := c.do(ctx, text); err != nil {
			return err
		}
	}
	// The row lock admits one process at a time from here on; the others find the migration done.
	if version, err = c.number(ctx, "SELECT version FROM latticekeep_schema WHERE id = 1 FOR UPDATE"); err != nil {
		return err
	}
	if version > raisedVersion {
		return errSchema(version)
	}
	if version > 0 { // writers of the older program check the version once they have this lock
		if _, err := c.number(ctx, "SELECT fence FROM latticekeep_head WHERE id = 1 FOR UPDATE"); err != nil {
			return err
		}
	}
	for v := version + 1; v <= tablesVersion; v++ {
		text, err := migrations.ReadFile(fmt.Sprintf("migrations/%04d.sql", v))
		if err != nil {
			return fmt.Errorf("reading a migration: %w", err)
		}
		if err := c.do(ctx, string(text)); err != nil {
			return fmt.Errorf("migrating the database to schema %d: %w", v, err)
		}
	}
	if version < tablesVersion {
		if err := c.do(ctx, fmt.Sprintf("UPDATE latticekeep_schema SET version = %d WHERE id = 1", tablesVersion)); err != nil {
			return err
		}
	}
	return c.do(ctx, "COMMIT")
}

// schema returns the version of the tables, or 0 when there are none.
func (c *conn) schema(ctx context.Context) (int64, error) {
	there, err := c.number(ctx, "SELECT (to_regclass('latticekeep_schema') IS NOT NULL)::int::int8")
	if err != nil || there == 0 {
		return 0, err
	}
	return c.number(ctx, "SELECT coalesce(max(version), 0) FROM latticekeep_schema")
}

func (c *conn) do(ctx context.Context, text string) error {
	if err := c.pg.Exec(ctx, text).Close(); err != nil {
		return failed(err)
	}
	return nil
}

// number returns the single value of a query.
func (c *conn) number(ctx context.Context, text string) (int64, error) {
	r := c.pg.ExecParams(ctx, text, nil, nil, nil, binaryFormat).Read()
	if r.Err != nil {
		return 0, failed(r.Err)
	}
	if len(r.Rows) != 1 {
		return 0, &failure{errors.New("a row of latticekeep's is missing"), broken}
	}
	return number(r.Rows[0][0])
}
