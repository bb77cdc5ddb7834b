package inspection

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// Depth says how much of a stopped deployment is looked at.
type Depth int

// The depths: what a start needs, or also the whole log and every row, which may take minutes.
const (
	Start Depth = iota
	Whole
)

// Stopped looks at a deployment that no server uses. row is called for each row that is read; it may
// be nil.
func (d Deployment) Stopped(ctx context.Context, depth Depth, row func()) diagnosis.Report {
	opening, cancel := context.WithTimeout(ctx, diagnosis.Limit)
	s := d.open(opening, depth)
	cancel()
	defer s.close()
	if depth == Whole && s.store == nil && s.fresh { // there is nothing to diagnose
		s.absent = diagnosis.Warn("check dataDir or store.url; or start the server, which makes a deployment", "%s", s.absent.Message)
	}
	report := diagnosis.Run(ctx, d.Version, diagnosis.Limit, append(s.common(),
		one(diagnosis.Store, func(ctx context.Context) diagnosis.Line {
			switch {
			case s.store != nil:
				return s.describeStore(ctx)
			case d.Config.Store.URL != "":
				return s.skip()
			}
			return s.absent
		}),
		diagnosis.Check{Part: diagnosis.KMS, Look: s.kms},
		diagnosis.Check{Part: diagnosis.Anchors, Look: s.anchors},
		diagnosis.Check{Part: diagnosis.Mail, Look: func(ctx context.Context) []diagnosis.Line { return s.mail(ctx, nil) }},
		diagnosis.Check{Part: diagnosis.Certificates, Look: d.fileCertificates},
	)...)
	chain, rows := s.verify(ctx, depth, func(of verify.Report) []diagnosis.Line {
		if report.Of(diagnosis.KMS) == diagnosis.Failed {
			return []diagnosis.Line{diagnosis.Skip("rows cannot be checked without the KMS key")}
		}
		return s.examine(ctx, of, row)
	})
	report.Add(diagnosis.Chain, chain)
	report.Add(diagnosis.Rows, rows...)
	return report
}

// open opens the store for reading, or says in absent and why that it is not open.
func (d Deployment) open(ctx context.Context, depth Depth) *opened {
	s := &opened{Deployment: d}
	if d.Config.Store.URL == "" {
		s.absent = s.openEmbedded(depth)
	} else {
		s.absent = s.openPostgres(ctx)
	}
	if s.store == nil {
		return s
	}
	var err error
	if s.made, err = keyring.Made(ctx, s.store); err != nil || !s.made {
		s.fresh = err == nil
		return s // the line of the store says why it cannot be read
	}
	first, err := verify.Store(ctx, s.store, verify.Options{To: 1}) // it has the key and the id of the chain
	if err == nil && first.ChainID != "" {
		s.chain = &chain.Chain{Store: s.store, Key: first.PublicKey, ChainID: first.ChainID}
		s.oldest = s.chain.OldestTime
	}
	return s
}

func (s *opened) openEmbedded(depth Depth) diagnosis.Line {
	path := filepath.Join(s.Config.DataDir, offline.DatabaseFile)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		s.why, s.fresh = "there is no database yet", true
		return diagnosis.Well("there is no database in dataDir: the first start makes one")
	}
	b, err := bolt.Open(path, bolt.Options{ReadOnly: true})
	switch {
	case bolt.IsInUse(err) && depth == Start:
		s.why = "a server uses the database now"
		return diagnosis.Skip(s.why)
	case bolt.IsInUse(err):
		s.why = "a server uses the database now"
		ask := "latticekeep doctor --url URL --api-key-file FILE, with a key that has the scope metrics:read"
		if at := s.Config.Operations.Listen; at != "" {
			ask = "latticekeep doctor --url http://" + at
		}
		return diagnosis.Fail("ask that server: "+ask, fmt.Errorf("a server uses the database now: %w", err))
	case err != nil:
		s.why = "the store does not open"
		return diagnosis.Fail("do what the message says", fmt.Errorf("opening %s: %w", offline.DatabaseFile, err))
	}
	s.store = b
	return diagnosis.Line{}
}

func (s *opened) openPostgres(ctx context.Context) diagnosis.Line {
	c := s.Config.Store
	p, err := postgres.Open(ctx, c.URL, postgres.Options{
		ReadOnly: true, Connections: c.Connections, PQRequired: s.Config.TLS.PQRequired, Password: offline.Location{PasswordFile: c.PasswordFile}.Password(),
	})
	switch {
	case errors.Is(err, postgres.ErrNoTables):
		s.why, s.fresh = "PostgreSQL answers, and has no tables yet", true
		return diagnosis.Well("PostgreSQL answers, and has no tables yet: the first start makes them")
	case err != nil:
		s.why = "PostgreSQL cannot be used"
		return diagnosis.Fail("look at PostgreSQL, at store.url and at store.passwordFile", fmt.Errorf("store.url: %w", err))
	}
	s.store, s.postgres = p, p
	return diagnosis.Line{}
}

func (s *opened) close() {
	if s.store != nil {
		_ = s.store.Close() // it was only read
	}
}

// mostRows bounds the lines about rows.
const mostRows = 10

// verify verifies the log and then has the rows examined. Without a whole look it only says what the head
// is.
func (s *opened) verify(ctx context.Context, depth Depth, examine func(verify.Report) []diagnosis.Line) (log diagnosis.Line, rows []diagnosis.Line) {
	switch {
	case s.store == nil:
		return s.skip(), []diagnosis.Line{s.skip()}
	case !s.made:
		none := diagnosis.Skip("there is no deployment yet")
		return none, []diagnosis.Line{none}
	case depth < Whole:
		return s.describeHead(ctx), []diagnosis.Line{diagnosis.Skip("not looked at: latticekeep doctor reads every row")}
	}
	report, err := verify.Store(ctx, s.store, verify.Options{})
	if err != nil {
		return diagnosis.Fail("restore a backup from before, and find out who can write the database", err),
			[]diagnosis.Line{diagnosis.Skip("rows are compared with the log, which does not hold or cannot be read")}
	}
	archived := ""
	if report.From > 1 {
		archived = fmt.Sprintf("; entries 1 to %d are in the archive and were not looked at: latticekeep audit verify --archive does", report.From-1)
	}
	log = diagnosis.Well("the log holds, up to its head, entry %d; chain %s%s", report.Sequence, report.Fingerprint, archived)
	return log, examine(report)
}

func (s *opened) describeHead(ctx context.Context) diagnosis.Line {
	if s.chain == nil {
		return diagnosis.Fail("latticekeep audit verify says more", errors.New("the first entry of the log does not hold or cannot be read"))
	}
	head, err := s.chain.VerifiedHead(ctx)
	if err != nil {
		return diagnosis.Fail("latticekeep audit verify says more", fmt.Errorf("the newest entry: %w", err))
	}
	return diagnosis.Well("the head is entry %d of %s, and its signature holds; latticekeep doctor verifies the whole log", head.Sequence, instant(time.UnixMicro(head.Micros)))
}

func (s *opened) examine(ctx context.Context, report verify.Report, row func()) (lines []diagnosis.Line) {
	keys, failed := s.openKMS(ctx)
	if keys == nil {
		return []diagnosis.Line{diagnosis.Skip("rows under a MAC cannot be checked without the KMS key: " + failed[0].Message)}
	}
	defer closeKeys(keys)
	all := make([]keyring.KMS, len(keys))
	for i, k := range keys {
		all[i] = k
	}
	x, err := doctor.Examine(ctx, s.store, doctor.Options{Report: report, KMS: all, Row: row})
	if err != nil {
		return []diagnosis.Line{diagnosis.Fail("look at the lines of the store and of the KMS", fmt.Errorf("examining the rows: %w", err))}
	}
	for _, f := range x.Findings[:min(len(x.Findings), mostRows)] {
		for _, p := range f.Problems {
			lines = append(lines, diagnosis.Fail("latticekeep doctor --config FILE --explain ROW says more; restore a backup, or accept or remove the row if you know why it is so",
				fmt.Errorf("%s: %s", f.Row(), p)))
		}
	}
	if n := len(x.Findings) - mostRows; n > 0 || x.More {
		lines = append(lines, diagnosis.Fail("list them with --data-dir or --store and the KMS key in place of --config", fmt.Errorf("more rows do not hold, beside the %d above", mostRows)))
	}
	if len(lines) == 0 {
		text := "with every key and MAC, and those that decide are what the log commits to"
		if x.Stateless {
			text = "with every key and MAC; an earlier release wrote the store, and its rows are not bound to the log yet"
		}
		lines = append(lines, diagnosis.Well("%d, %s", x.Rows, text))
	}
	return lines
}
