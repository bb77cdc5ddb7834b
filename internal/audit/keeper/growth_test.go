package keeper

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// mostBytes is what a read may cost: a signature and 700 bytes.
const mostBytes = 3309 + 700

// A read costs at most a signature and 700 bytes of the file, with everything that is derived from
// its entry. The first reads are left out: a new file also has pages that wait for their next use. Each
// commit has as many reads: when callers share commits as it happens, pages of the indexes are now and
// then half empty, and that is as much as the bound leaves.
func TestAReadCostsFewBytes(t *testing.T) {
	f := audittest.NewFixture(t)
	g := newGrowth(t, f, packer(f))
	const group, turn = 8, 2000
	g.groups(turn/group, group)
	first := growthPoint{g.reads, g.usage()}
	for range 3 {
		g.groups(turn/group, group)
	}
	if cost := (growthPoint{g.reads, g.usage()}).since(first); cost > mostBytes {
		t.Errorf("a read costs %.0f bytes, want at most %d", cost, mostBytes)
	}
}

// BenchmarkGrowth measures what a read costs in the embedded store, in both ways of signing, with
// packing as a server does it. It prints a row of a table whenever the number of reads has grown
// threefold: reads, reads for each signature, bytes of the file, of them free, bytes a read in all,
// and of the reads since the row before.
//
//	make bench-growth
func BenchmarkGrowth(b *testing.B) {
	for _, mode := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		b.Run(string(mode), func(b *testing.B) {
			f := audittest.NewFixture(b)
			f.Log.SetSigning(mode)
			g := newGrowth(b, f, &Packer{Log: f.Log.Log, Logger: slog.New(slog.DiscardHandler)})
			var last growthPoint
			for _, n := range milestones(b.N) {
				g.read(n - g.reads)
				now := growthPoint{n, g.usage()}
				if groups, _ := g.rows(audit.BatchRange); b.N > 1 {
					fmt.Printf("| %s | %d | %.1f | %d | %d | %.0f | %.0f |\n", mode, n, float64(n)/float64(max(groups, 1)),
						now.Size, now.Free, g.cost(), now.since(last))
				}
				last = now
			}
			b.ReportMetric(g.cost(), "bytes/read")
			g.reportRows(b)
		})
	}
}

// BenchmarkGrowthPostgres measures what a read costs in PostgreSQL, after a VACUUM: bytes of the
// table, of its index, and of TOAST with its own index.
//
//	make bench-growth
func BenchmarkGrowthPostgres(b *testing.B) {
	for _, mode := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		b.Run(string(mode), func(b *testing.B) {
			f := audittest.NewPostgresFixture(b)
			f.Log.SetSigning(mode)
			db, err := pgconn.Connect(b.Context(), f.URL)
			if err != nil {
				b.Fatal(err)
			}
			defer db.Close(context.Background())
			ask := func(query string) (n float64) {
				r := db.ExecParams(b.Context(), query, nil, nil, nil, nil).Read()
				if r.Err != nil {
					b.Fatal(r.Err)
				}
				if _, err := fmt.Sscan(string(r.Rows[0][0]), &n); err != nil {
					b.Fatal(err)
				}
				return n
			}
			g := newGrowth(b, f, &Packer{Log: f.Log.Log, Logger: slog.New(slog.DiscardHandler)})
			g.read(b.N)
			if err := db.ExecParams(b.Context(), "VACUUM latticekeep_kv", nil, nil, nil, nil).Read().Err; err != nil {
				b.Fatal(err)
			}
			of := func(part string) float64 {
				return ask("SELECT "+part+" FROM pg_class WHERE oid = 'latticekeep_kv'::regclass") / float64(b.N)
			}
			b.ReportMetric(of("pg_total_relation_size(oid)"), "bytes/read")
			b.ReportMetric(of("pg_relation_size(oid)"), "table-bytes/read")
			b.ReportMetric(of("pg_indexes_size(oid)"), "index-bytes/read")
			b.ReportMetric(of("pg_total_relation_size(reltoastrelid)"), "toast-bytes/read")
			b.ReportMetric(ask("SELECT count(*) FROM latticekeep_kv")/float64(b.N), "rows/read")
			g.reportRows(b)
		})
	}
}

// reportRows reports the keys and values of each kind of row.
func (g *growth) reportRows(b *testing.B) {
	for name, rng := range map[string]store.Range{
		"singles": audit.EntryRange, "packs": entries.PackRange, "signatures": audit.BatchRange, "tenants": audit.TenantRange,
		"tiles": audit.TileRange, "summaries": audit.SummaryRange,
	} {
		_, size := g.rows(rng)
		b.ReportMetric(float64(size)/float64(b.N), name+"-bytes/read")
	}
}

// growthPoint is the size of the database after a number of reads.
type growthPoint struct {
	reads int
	store.Usage
}

// since returns what each read took since p.
func (q growthPoint) since(p growthPoint) float64 {
	return float64(q.Size-q.Free-p.Size+p.Free) / float64(q.reads-p.reads)
}

// growth reads credentials and measures what the database takes for that.
type growth struct {
	t                          testing.TB
	f                          *audittest.Fixture
	packer                     *Packer
	tenants, keys, credentials []string
	reads                      int
	before                     store.Usage
}

func newGrowth(t testing.TB, f *audittest.Fixture, p *Packer) *growth {
	g := &growth{t: t, f: f, packer: p}
	for range 10 {
		g.tenants, g.keys = append(g.tenants, newID("ten_")), append(g.keys, newID("key_"))
	}
	for range 1000 {
		g.credentials = append(g.credentials, newID("cred_"))
	}
	g.before = g.usage()
	return g
}

// newID returns an identifier as long as those of the service.
func newID(prefix string) string {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	return prefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))
}

// read writes the entries of n reads, by 64 callers, while they are followed and packed.
func (g *growth) read(n int) {
	g.t.Helper()
	const turn = 2000
	for done := 0; done < n; done += turn {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for {
					i := int(next.Add(1))
					if i > min(turn, n-done) {
						return
					}
					if err := g.f.Log.Record(context.Background(), g.event(i)); err != nil {
						g.t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		g.follow()
	}
	g.reads += n
	g.packRest()
}

// groups writes n commits with the entries of as many reads each.
func (g *growth) groups(n, reads int) {
	g.t.Helper()
	for range n {
		err := g.f.Store.Update(context.Background(), func(tx store.Tx) error {
			for i := range reads {
				if _, err := g.f.Log.Append(tx, g.event(g.reads+i)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			g.t.Fatal(err)
		}
		g.reads += reads
	}
	g.follow()
	g.packRest()
}

// follow does once what a server does all the time.
func (g *growth) follow() {
	g.t.Helper()
	g.f.Advance(1e9)
	if _, err := g.f.Log.Follow(context.Background()); err != nil {
		g.t.Fatal(err)
	}
	if err := g.packer.pass(context.Background()); err != nil {
		g.t.Fatal(err)
	}
}

// packRest packs what the next passes would.
func (g *growth) packRest() {
	g.t.Helper()
	if _, err := g.packer.Pack(context.Background(), everything); err != nil {
		g.t.Fatal(err)
	}
}

func (g *growth) event(i int) audit.Event {
	by := authz.Principal{Tenant: authz.TenantID(g.tenants[i%10]), Kind: authz.APIKey, ID: g.keys[i%10], RequestID: newID("req_"), SourceIP: "10.42.117.203"}
	return audit.Event{
		Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: by,
		Resource:   audit.Resource{ID: g.credentials[i%len(g.credentials)], Type: audit.CredentialResource},
		Attributes: map[string]string{audit.AttributeVersion: "1"},
	}
}

func (g *growth) usage() store.Usage {
	g.t.Helper()
	u, err := g.f.Store.(interface {
		Usage(context.Context) (store.Usage, error)
	}).Usage(context.Background())
	if err != nil {
		g.t.Fatal(err)
	}
	return u
}

// cost returns how many bytes of the file each read takes, less the free pages.
func (g *growth) cost() float64 {
	now := g.usage()
	return float64(now.Size-now.Free-g.before.Size+g.before.Free) / float64(g.reads)
}

// rows returns the number of rows of a range, and the bytes of their keys and values.
func (g *growth) rows(r store.Range) (n, size int) {
	g.t.Helper()
	err := audit.ScanAll(context.Background(), g.f.Store, r, func(key, value []byte) error {
		n++
		size += len(key) + len(value)
		return nil
	})
	if err != nil {
		g.t.Fatal(err)
	}
	return n, size
}

// milestones returns the half powers of ten below n, and n.
func milestones(n int) (all []int) {
	for _, m := range []int{10e3, 30e3, 100e3, 300e3, 1e6, 3e6} {
		if m < n {
			all = append(all, m)
		}
	}
	return append(all, n)
}
