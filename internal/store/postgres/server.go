package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// server is the PostgreSQL server. It opens sessions, knows whether the server can be reached, and
// runs the background work: probes after an outage, and VACUUM.
type server struct {
	cfg         *pgconn.Config
	password    func() (string, error) // Options.Password
	pqRequired  bool
	logger      *slog.Logger
	vacuumAfter time.Duration
	reads       int // newest format of a store that this program reads

	life    context.Context // ends when the last request has left after Close
	end     context.CancelFunc
	tasks   sync.WaitGroup
	deleted chan struct{} // wakes the vacuum

	failed  atomic.Bool   // no commit has succeeded since one failed or the server was lost
	down    atomic.Bool   // the server is unreachable, and a goroutine is probing it
	outages atomic.Uint64 // how often down became true
}

// connect opens a session. A failure to do so is a failure of kind down.
func (s *server) connect(ctx context.Context, p purpose) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectWait)
	defer cancel()
	cfg := s.cfg.Copy()
	maps.Copy(cfg.RuntimeParams, p.parameters(applicationName(s.reads)))
	if s.password != nil {
		password, err := s.password()
		if err != nil {
			return nil, &failure{cause: fmt.Errorf("reading the password of the database: %w", err), kind: down}
		}
		cfg.Password = password
	}
	c := &conn{}
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" {
			c.warning = n.Message
		}
	}
	var established atomic.Bool
	if p == writing {
		// When a session fails, pgconn makes the server cancel its statement. A COMMIT that waits
		// for standbys would then stop waiting, and would be visible although the standbys do not
		// have it.
		dial := cfg.DialFunc
		cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if established.Load() {
				return nil, errors.New("what a writer does is not cancelled")
			}
			return dial(ctx, network, address)
		}
	}
	pg, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		if s.pqRequired && strings.Contains(err.Error(), "tls:") {
			err = fmt.Errorf("PostgreSQL does not agree on X25519MLKEM768, the post-quantum key exchange that is required; "+
				"it has it with OpenSSL 3.5 or newer: %w", err)
		}
		return nil, &failure{inOneLine{err}, down}
	}
	established.Store(true)
	c.pg = pg
	if err := c.equip(ctx, p); err != nil {
		c.kill()
		return nil, &failure{err, down}
	}
	return c, nil
}

// equip checks the server that the session has reached, and configures the session.
func (c *conn) equip(ctx context.Context, p purpose) error {
	r := c.pg.ExecParams(ctx, `SELECT pg_is_in_recovery()::text, current_setting('transaction_read_only'), current_setting('synchronous_commit'),
		current_setting('fsync'), current_setting('server_version_num'), current_setting('full_page_writes')`, nil, nil, nil, nil).Read()
	if r.Err != nil {
		return r.Err
	}
	if len(r.Rows) != 1 || len(r.Rows[0]) != 6 {
		return errors.New("PostgreSQL does not tell its state")
	}
	is := func(i int, value string) bool { return string(r.Rows[0][i]) == value }
	switch {
	case is(0, "true"):
		return errors.New("the server is a standby: give the URL of the primary, or target_session_attrs=read-write with all hosts")
	case is(1, "on"):
		return errors.New("the server takes no writes: default_transaction_read_only is on for this role or database, turn it off")
	case is(3, "off"):
		return errors.New("the server does not sync what it commits: set fsync = on")
	case is(5, "off"):
		return errors.New("the server may be left with torn pages by a crash: set full_page_writes = on")
	case len(r.Rows[0][4]) < 6 || string(r.Rows[0][4]) < "130000":
		return errors.New("the server is older than PostgreSQL 13: give a newer one")
	}
	if p != writing {
		return nil
	}
	// A setting below on allows commits that a failover loses. The value is set even where it is
	// right already, because the server may reload its configuration file.
	level := "on"
	if is(2, "remote_apply") {
		level = "remote_apply"
	}
	return c.pg.Exec(ctx, "SET synchronous_commit = "+level).Close()
}

// The pauses between attempts to reach the server again grow from firstProbe to lastProbe.
const firstProbe, lastProbe = 100 * time.Millisecond, time.Second

// lostContact records that the server is unreachable and probes it in the background. Until a probe
// succeeds, requests are refused at once.
func (s *server) lostContact(err error) {
	if !s.down.CompareAndSwap(false, true) {
		return
	}
	s.outages.Add(1)
	s.failed.Store(true)
	s.logger.Error("the database cannot be reached", "error", err)
	s.tasks.Go(func() {
		for pause := firstProbe; s.down.Load(); pause = min(2*pause, lastProbe) {
			c, err := s.connect(s.life, reading)
			if err == nil {
				c.kill()
				s.down.Store(false)
				s.logger.Info("the database can be reached again")
				return
			}
			select {
			case <-time.After(pause):
			case <-s.life.Done():
				return
			}
		}
	})
}

// suspect starts the recovery when err means more than the loss of one session.
func (s *server) suspect(c *conn, err error) {
	if k, ok := kindOf(err); ok && (k == down || c.late) {
		s.lostContact(err)
	}
}

// evict gets the error of a failed attempt to take the lock on the head. If another session has
// held the lock for too long, evict ends sessions of this product whose writing transaction has
// lasted longer than any normal one. Such a session belongs to a process that was stopped while the
// server was sending to it; no limit of the server ends it.
func (s *server) evict(err error) {
	if pe := (*pgconn.PgError)(nil); errors.As(err, &pe) && pe.Code == "55P03" {
		s.evictOlder(commitWait + lockLimit)
	}
}

// evictOlder ends sessions whose writing transaction is older than age. It spares a session that
// waits for standbys: ending it would make a commit visible that they do not have.
func (s *server) evictOlder(age time.Duration) {
	c, err := s.connect(s.life, tending)
	if err != nil {
		return
	}
	defer c.kill()
	_ = c.exec(commitWait, fmt.Sprintf(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND usename = current_user AND (application_name = '%[1]s' OR application_name LIKE '%[1]s/%%') AND pid <> pg_backend_pid()
		AND wait_event IS DISTINCT FROM 'SyncRep' AND backend_xid IS NOT NULL AND xact_start < now() - interval '%[2]d milliseconds'`,
		application, age.Milliseconds()))
}

// Description says how the server is set up and used.
type Description struct {
	Version     string
	Standbys    string      // synchronous_standby_names; empty: a failover may lose the newest commits
	Sessions    int         // sessions that all programs have in this database
	MaxSessions int         // limit of the whole server
	Readers     map[int]int // sessions of this product by the newest format that their program reads
}

// describe asks the server. It does not see a process that lost its sessions; when that connects again it
// finds what was raised.
func (s *server) describe(ctx context.Context) (d Description, err error) {
	c, err := s.connect(ctx, tending)
	if err != nil {
		return d, err
	}
	defer c.kill()
	r := c.pg.ExecParams(ctx, `SELECT coalesce(application_name, ''), current_setting('server_version'), current_setting('synchronous_standby_names'), current_setting('max_connections')
		FROM pg_stat_activity WHERE datname = current_database()`, nil, nil, nil, nil).Read()
	if r.Err != nil {
		return d, failed(r.Err)
	}
	d.Sessions, d.Readers = len(r.Rows), make(map[int]int)
	for _, row := range r.Rows { // at least that of this session
		d.Version, d.Standbys = string(row[1]), string(row[2])
		d.MaxSessions, _ = strconv.Atoi(string(row[3]))
		if reads, ok := readsOf(string(row[0])); ok {
			d.Readers[reads]++
		}
	}
	return d, nil
}

// Deleted rows stay in the files of PostgreSQL until the table is vacuumed. The server vacuums by
// itself after enough changes, which may never happen in a quiet deployment. So every replica
// requests a VACUUM within vacuumAfter of a commit that deleted rows, and after its own start. It
// skips a table that is being vacuumed already. After a VACUUM the replica waits vacuumShare times
// its duration.
const (
	vacuumAfter = 30 * time.Second
	vacuumShare = 10
)

// The server pauses a millisecond for each 200 units of cost. It does not truncate the table,
// because that would need a lock that excludes everybody.
const vacuuming = "VACUUM (SKIP_LOCKED, TRUNCATE false) latticekeep_kv"

func (s *server) tend() {
	for {
		select {
		case <-s.deleted:
		case <-s.life.Done():
			return
		}
		wait := s.vacuumAfter
		for {
			select {
			case <-time.After(wait):
			case <-s.life.Done():
				return
			}
			began := time.Now()
			err := s.vacuum()
			if err == nil {
				wait = vacuumShare * time.Since(began)
				break
			}
			s.logger.Warn("vacuuming failed, will be tried again", "error", err)
			wait = s.vacuumAfter
		}
		select { // do not vacuum a slow table all the time
		case <-time.After(wait):
		case <-s.life.Done():
			return
		}
	}
}

func (s *server) vacuum() error {
	c, err := s.connect(s.life, tending)
	if err != nil {
		return err
	}
	defer c.kill()
	if err := c.do(s.life, "SET vacuum_cost_delay = 1"); err != nil {
		return err
	}
	return c.do(s.life, vacuuming)
}
