package verify_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Each kind of tampering with the stored log is reported with the first bad sequence.
func TestTamperingWithTheStoreIsReported(t *testing.T) {
	flip := func(tx store.Tx, key []byte, at int) error {
		b := audittest.Get(tx, key)
		if at < 0 {
			at += len(b)
		}
		b[at] ^= 1
		return tx.Put(key, b)
	}
	cases := map[string]struct {
		first  uint64
		change func(tx store.Tx) error
	}{
		"a flipped byte of an entry":    {7, func(tx store.Tx) error { return flip(tx, audit.EntryKey(7), -3) }},
		"a flipped byte of a signature": {7, func(tx store.Tx) error { return flip(tx, audit.EntryKey(7), 100) }},
		"a flipped version byte":        {7, func(tx store.Tx) error { return flip(tx, audit.EntryKey(7), 0) }},
		"a dropped entry":               {7, func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) }},
		"a dropped first entry":         {1, func(tx store.Tx) error { return tx.Delete(audit.EntryKey(1)) }},
		"a cut entry":                   {7, func(tx store.Tx) error { return tx.Put(audit.EntryKey(7), audittest.Get(tx, audit.EntryKey(7))[:200]) }},
		"an empty entry":                {7, func(tx store.Tx) error { return tx.Put(audit.EntryKey(7), nil) }},
		"a row between two entries": {8, func(tx store.Tx) error {
			return tx.Put(append(audit.EntryKey(7), 0), audittest.Get(tx, audit.EntryKey(7)))
		}},
		"an entry repeated at the end": {22, func(tx store.Tx) error { return tx.Put(audit.EntryKey(22), audittest.Get(tx, audit.EntryKey(21))) }},
		"a changed head":               {21, func(tx store.Tx) error { return flip(tx, audit.HeadKey, -1) }},
		"a missing head":               {21, func(tx store.Tx) error { return tx.Delete(audit.HeadKey) }},
		"a changed index row":          {4, func(tx store.Tx) error { return flip(tx, audittest.PositionIn(tx, 4), -1) }},
		"a dropped index row":          {4, func(tx store.Tx) error { return tx.Delete(audittest.PositionIn(tx, 4)) }},
		"an index row of no entry": {4, func(tx store.Tx) error {
			return tx.Put(audit.TenantKey(string(audittest.TenantA), 999), audittest.Get(tx, audittest.PositionIn(tx, 4)))
		}},
		"two entries exchanged": {7, func(tx store.Tx) error {
			a, b := audittest.Get(tx, audit.EntryKey(7)), audittest.Get(tx, audit.EntryKey(8))
			return cmp.Or(tx.Put(audit.EntryKey(7), b), tx.Put(audit.EntryKey(8), a))
		}},
		"a cut tail": {20, func(tx store.Tx) error {
			return cmp.Or(tx.Delete(audit.EntryKey(21)), tx.Delete(audit.EntryKey(20)))
		}},
		"an inserted entry, the rest moved up": {8, func(tx store.Tx) error {
			for n := uint64(21); n >= 8; n-- {
				if err := tx.Put(audit.EntryKey(n+1), audittest.Get(tx, audit.EntryKey(n))); err != nil {
					return err
				}
			}
			return tx.Put(audit.EntryKey(8), audittest.Get(tx, audit.EntryKey(7)))
		}},
		"a current row of another entry": {3, func(tx store.Tx) error {
			return flip(tx, audit.CurrentKey(string(audittest.TenantB), "cred_sealed"), -1)
		}},
		"a lost current row": {3, func(tx store.Tx) error { return tx.Delete(audit.CurrentKey(string(audittest.TenantB), "cred_sealed")) }},
		"an entry with other words, hashed anew": {7, func(tx store.Tx) error {
			b := audittest.Get(tx, audit.EntryKey(7))
			return tx.Put(audit.EntryKey(7), bytes.Replace(b, []byte("success"), []byte("failure"), 1))
		}},
		"a space in an entry": {7, func(tx store.Tx) error {
			return tx.Put(audit.EntryKey(7), bytes.Replace(audittest.Get(tx, audit.EntryKey(7)), []byte(`,"`), []byte(`, "`), 1))
		}},
	}
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		audittest.OfBothKinds(t, func(t *testing.T, packed bool) {
			for name, c := range cases {
				t.Run(name, func(t *testing.T) {
					f := newFixture(t)
					f.Record(audit.Event{Type: audit.TenantCreated, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
					f.Sealed(audittest.TenantB, "cred_sealed", "1", strings.Repeat("0", 64))
					f.Fill(18)
					change := c.change
					if packed {
						f.Put(func(tx store.Tx) error { return audittest.PackUpTo(tx, 21) })
						change = func(tx store.Tx) error { return c.change(audittest.UnpackedTx{Tx: tx}) }
					}
					if _, err := f.Verify(); err != nil {
						t.Fatal("whole at first:", err)
					}
					alter(f, change)
					_, err := f.Verify()
					broken, ok := audit.IsBroken(err)
					if !ok {
						t.Fatalf("not reported: %v", err)
					}
					if broken.Sequence != c.first {
						t.Errorf("reported at %d (%s), want %d", broken.Sequence, broken.Reason, c.first)
					}
				})
			}
		})
	})
}

// A server that writes meanwhile makes derived rows seem wrong, and the report says so. That excuses
// no entry.
func TestAReportSaysThatTheStoreWasWrittenToMeanwhile(t *testing.T) {
	flip := func(tx store.Tx, key []byte) error {
		b := audittest.Get(tx, key)
		b[len(b)-3] ^= 1
		return tx.Put(key, b)
	}
	for name, c := range map[string]struct {
		before, meanwhile []byte // rows that change
		says              bool
	}{
		"the tile follows a newer checkpoint": {audit.TileKey(0, 0), audit.CheckpointKey, true},
		"the head is of a newer entry":        {nil, audit.HeadKey, true},
		"nothing is written":                  {audit.TileKey(0, 0), nil, false},
		"an entry is changed":                 {audit.EntryKey(7), audit.CheckpointKey, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Fill(20)
			f.Follow()
			change := func(key []byte) {
				if key != nil {
					f.Put(func(tx store.Tx) error { return flip(tx, key) })
				}
			}
			change(c.before)
			var once sync.Once
			_, err := verify.Store(t.Context(), f.Store, verify.Options{Entry: func() { once.Do(func() { change(c.meanwhile) }) }})
			if _, broken := audit.IsBroken(err); !broken {
				t.Fatal(err)
			}
			if strings.Contains(err.Error(), "written to meanwhile") != c.says {
				t.Error(err)
			}
		})
	}
}

func TestTamperingWithAnExportIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	whole := f.Export()
	if report, err := verify.Export(bytes.NewReader(whole), verify.Options{}); err != nil || report.Entries != 21 {
		t.Fatal(report, err)
	}
	lines := strings.SplitAfter(string(whole), "\n")
	lines = lines[:len(lines)-1] // drop the empty rest after the last newline
	end := len(lines) - 1
	cases := map[string]struct {
		first uint64
		lines []string
	}{
		"flipped":             {7, replace(lines, 6, strings.Replace(lines[6], "success", "denied", 1))},
		"dropped":             {7, slices.Delete(slices.Clone(lines), 6, 7)},
		"reordered":           {7, replace(replace(lines, 6, lines[7]), 7, lines[6])},
		"inserted":            {8, slices.Insert(slices.Clone(lines), 7, lines[6])},
		"beginning cut":       {1, lines[1:]},
		"closing line cut":    {22, lines[:end]},
		"tail cut":            {20, append(slices.Clone(lines[:end-2]), lines[end])},
		"last line cut short": {22, replace(lines, end, lines[end][:40])},
		"line cut short":      {7, append(slices.Clone(lines[:6]), lines[6][:90])},
		"CRLF":                {1, replace(lines, 0, strings.Replace(lines[0], "\n", "\r\n", 1))},
		"closing reformatted": {22, replace(lines, end, strings.Replace(lines[end], ":", ": ", 2))},
		"goes on":             {22, append(slices.Clone(lines), lines[3])},
		"reformatted":         {7, replace(lines, 6, strings.Replace(lines[6], ":", ": ", 1))},
		"field added":         {7, replace(lines, 6, strings.Replace(lines[6], `{"actor"`, `{"a":1,"actor"`, 1))},
		"field repeated":      {7, replace(lines, 6, strings.Replace(lines[6], `"key_id"`, `"hash":"","key_id"`, 1))},
		"escaped otherwise":   {7, replace(lines, 6, strings.Replace(lines[6], "success", `\u0073uccess`, 1))},
		"signature respelled": {7, replace(lines, 6, strings.Replace(lines[6], `"signature":"`, `"signature":"\n`, 1))},
		"blank line":          {7, slices.Insert(slices.Clone(lines), 6, "\n")},
		"empty":               {1, nil},
		"another's ending":    {22, replace(lines, end, strings.ReplaceAll(lines[end], "chain_test", "chain_tesT"))},
	}
	for name, c := range cases {
		_, err := verify.Export(strings.NewReader(strings.Join(c.lines, "")), verify.Options{})
		broken, ok := audit.IsBroken(err)
		if !ok {
			t.Errorf("%s: not reported: %v", name, err)
		} else if broken.Sequence != c.first {
			t.Errorf("%s: reported at %d (%s), want %d", name, broken.Sequence, broken.Reason, c.first)
		}
	}
}

func replace(lines []string, i int, line string) []string {
	lines = slices.Clone(lines)
	lines[i] = line
	return lines
}

// A log that an attacker wrote from scratch with another key verifies by itself. Only the pin
// reveals it.
func TestARewrittenLogIsToldByThePin(t *testing.T) {
	honest, forged := audittest.NewFixture(t), audittest.NewFixture(t)
	honest.Fill(3)
	forged.Fill(3)
	report, err := verify.Export(bytes.NewReader(forged.Export()), verify.Options{})
	if err != nil || report.Pinned {
		t.Fatal(report, err)
	}
	_, err = verify.Export(bytes.NewReader(forged.Export()), verify.Options{Fingerprint: honest.Log.Fingerprint()})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 1 {
		t.Fatal(err)
	}
}

// The holder of the key can sign anything, but each link must still fit. Here one entry is changed,
// and it and all later ones are linked and signed again.
func TestEveryLinkIsCheckedBeyondTheSignature(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	var honest []audit.Entry
	for line := range bytes.Lines(f.Export()) {
		if e, err := audit.ParseEntry(bytes.TrimSuffix(line, []byte("\n"))); err == nil {
			honest = append(honest, *e)
		}
	}
	verify := func(entries []audit.Entry) error {
		v := verify.NewVerifier(verify.Options{})
		for i := range entries {
			if err := v.Add(&entries[i]); err != nil {
				break
			}
		}
		_, err := v.Finish()
		return err
	}
	for name, change := range map[string]func(e *audit.Entry){
		"nothing":                  func(*audit.Entry) {},
		"previous hash":            func(e *audit.Entry) { e.PreviousHash = audit.ZeroHash },
		"tenant's previous hash":   func(e *audit.Entry) { e.TenantPreviousHash = strings.Repeat("1", 64) },
		"tenant's sequence":        func(e *audit.Entry) { e.TenantSequence++ },
		"sequence":                 func(e *audit.Entry) { e.Sequence++ },
		"an earlier time":          func(e *audit.Entry) { e.Timestamp = "2026-11-21T11:59:59.000000Z" },
		"another spelling of time": func(e *audit.Entry) { e.Timestamp = strings.Replace(e.Timestamp, "Z", "+00:00", 1) },
		"no time":                  func(e *audit.Entry) { e.Timestamp = "" },
		"another key id":           func(e *audit.Entry) { e.KeyID = strings.Repeat("0", 64) },
	} {
		forged := slices.Clone(honest)
		const at = 12
		change(&forged[at])
		relink(t, f, forged[at:])
		err := verify(forged)
		if name == "nothing" {
			if err != nil {
				t.Fatal("the forger's tools do not work: ", err)
			}
			continue
		}
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != honest[at].Sequence {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// relink hashes and signs the entries again, and links each one to the previous one.
func relink(t *testing.T, f *audittest.Fixture, entries []audit.Entry) {
	t.Helper()
	renamed := make(map[string]string)
	for i := range entries {
		e := &entries[i]
		if to, ok := renamed[e.PreviousHash]; ok {
			e.PreviousHash = to
		}
		if to, ok := renamed[e.TenantPreviousHash]; ok {
			e.TenantPreviousHash = to
		}
		sum, err := e.Digest()
		if err != nil {
			t.Fatal(err)
		}
		renamed[e.Hash] = hex.EncodeToString(sum[:])
		e.Hash = renamed[e.Hash]
		signature, err := f.Log.Signer.Sign(audit.SigningContext, sum[:])
		if err != nil {
			t.Fatal(err)
		}
		e.Signature = base64.StdEncoding.EncodeToString(signature)
	}
}

// An export signs nothing about a broken log. The server checks what it would link to before it
// signs anything.
func TestNothingIsSignedOnTopOfADamagedLog(t *testing.T) {
	damages := map[string]func(tx store.Tx) error{
		"a cut tail": func(tx store.Tx) error { return tx.Delete(audit.EntryKey(21)) },
		"a row far beyond the head": func(tx store.Tx) error {
			e, err := audittest.DecodeRow(audittest.Get(tx, audit.EntryKey(21)), nil)
			if err != nil {
				return err
			}
			e.Sequence = audit.MaxInteger
			core, err := e.Canonical(nil, false)
			return cmp.Or(err, tx.Put(audit.EntryKey(audit.MaxInteger), audittest.EncodeRow(core, make([]byte, 3309))))
		},
		"a changed head": func(tx store.Tx) error {
			b := audittest.Get(tx, audit.HeadKey)
			b[20] ^= 1
			return tx.Put(audit.HeadKey, b)
		},
		"an earlier head": func(tx store.Tx) error {
			e, err := audittest.DecodeRow(audittest.Get(tx, audit.EntryKey(20)), nil)
			if err != nil {
				return err
			}
			return tx.Put(audit.HeadKey, e.Position().Encode())
		},
		"a wiped log": func(tx store.Tx) error {
			var keys [][]byte
			err := tx.Scan(store.Prefix([]byte("audit/")), func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return true
			})
			for _, key := range keys {
				err = cmp.Or(err, tx.Delete(key))
			}
			return err
		},
	}
	for name, damage := range damages {
		t.Run(name+", found at start", func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Fill(20)
			alter(f, damage)
			log := audittest.NewParts(f.Now)
			err := log.Use(t.Context(), f.Store, f.Log.Signer, "chain_test")
			if name == "a wiped log" { // looks like a new log until something is written
				if err != nil {
					t.Fatal(err)
				}
				err = log.Export(t.Context(), io.Discard, 0)
			}
			if err == nil {
				t.Error("not found")
			}
		})
		if name == "a cut tail" || name == "a row far beyond the head" {
			continue // a running log continues from its head; the verification and the next start find these
		}
		audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
			t.Run(name+", found while running", func(t *testing.T) {
				f := newFixture(t)
				f.Fill(20)
				f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
				if err := f.Store.Update(t.Context(), damage); err != nil {
					t.Fatal(err)
				}
				if err := f.Log.Record(t.Context(), audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)}); err == nil {
					t.Error("an entry was signed")
				}
			})
		})
	}
}

// A log that was wiped and then written by the server has the right key and the right chain ID, but
// lacks its beginning.
func TestALogThatBeginsAnewIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3)
	var lines []string
	for line := range bytes.Lines(f.Export()) {
		lines = append(lines, string(line))
	}
	e, err := audit.ParseEntry([]byte(strings.TrimSuffix(lines[1], "\n"))) // first entry of its tenant, which names the key
	if err != nil {
		t.Fatal(err)
	}
	e.Sequence, e.PreviousHash = 1, audit.ZeroHash
	forged := []audit.Entry{*e}
	relink(t, f, forged)
	v := verify.NewVerifier(verify.Options{Fingerprint: f.Log.Fingerprint()})
	_ = v.Add(&forged[0])
	_, err = v.Finish()
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 1 {
		t.Fatal("accepted")
	}
}

// Damaged rows of one tenant affect only that tenant.
func TestADamagedTenantStopsNobodyElse(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", "00")
	f.Sealed(audittest.TenantB, "cred_b", "1", "00")
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(audit.TenantKey(string(audittest.TenantB), 1), []byte("junk"))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Log.Use(t.Context(), f.Store, f.Log.Signer, "chain_test"); err != nil { // as after a restart
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			tenant := audittest.TenantA
			if i%2 == 0 {
				tenant = audittest.TenantB
			}
			err := f.Log.Record(context.Background(), audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(tenant)})
			if (err == nil) != (tenant == audittest.TenantA) {
				t.Errorf("%s: %v", tenant, err)
			}
		})
	}
	wg.Wait()
}

// The index decides which entries a tenant sees, but the entry names its tenant.
func TestASwappedIndexShowsNobodyElsesEntries(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", "00")
	f.Sealed(audittest.TenantB, "cred_b", "1", "00")
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(audit.TenantKey(string(audittest.TenantA), 1), audittest.Get(tx, audit.TenantKey(string(audittest.TenantB), 1)))
	})
	if err != nil {
		t.Fatal(err)
	}
	if entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 10}); err == nil {
		t.Fatal(entries)
	}
}

// alter changes the database without the log's knowledge: it opens the same database without the
// hook.
func alter(f *audittest.Fixture, change func(tx store.Tx) error) {
	f.T.Helper()
	if err := f.Store.Close(); err != nil {
		f.T.Fatal(err)
	}
	f.Store = f.Opens(nil)
	if err := f.Store.Update(context.Background(), change); err != nil {
		f.T.Fatal(err)
	}
}
