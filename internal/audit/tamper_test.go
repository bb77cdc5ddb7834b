package audit

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

	"github.com/latticekeep/latticekeep/internal/store"
)

// Each kind of tampering with the stored log is reported with the first bad sequence.
func TestTamperingWithTheStoreIsReported(t *testing.T) {
	flip := func(tx store.Tx, key []byte, at int) error {
		b := get(tx, key)
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
		"a flipped byte of an entry":    {7, func(tx store.Tx) error { return flip(tx, entryKey(7), -3) }},
		"a flipped byte of a signature": {7, func(tx store.Tx) error { return flip(tx, entryKey(7), 100) }},
		"a flipped version byte":        {7, func(tx store.Tx) error { return flip(tx, entryKey(7), 0) }},
		"a dropped entry":               {7, func(tx store.Tx) error { return tx.Delete(entryKey(7)) }},
		"a dropped first entry":         {1, func(tx store.Tx) error { return tx.Delete(entryKey(1)) }},
		"a cut entry":                   {7, func(tx store.Tx) error { return tx.Put(entryKey(7), get(tx, entryKey(7))[:200]) }},
		"an empty entry":                {7, func(tx store.Tx) error { return tx.Put(entryKey(7), nil) }},
		"a row between two entries":     {8, func(tx store.Tx) error { return tx.Put(append(entryKey(7), 0), get(tx, entryKey(7))) }},
		"an entry repeated at the end":  {22, func(tx store.Tx) error { return tx.Put(entryKey(22), get(tx, entryKey(21))) }},
		"a changed head":                {21, func(tx store.Tx) error { return flip(tx, headKey, -1) }},
		"a missing head":                {21, func(tx store.Tx) error { return tx.Delete(headKey) }},
		"a changed index row":           {4, func(tx store.Tx) error { return flip(tx, positionIn(tx, 4), -1) }},
		"a dropped index row":           {4, func(tx store.Tx) error { return tx.Delete(positionIn(tx, 4)) }},
		"an index row of no entry":      {4, func(tx store.Tx) error { return tx.Put(tenantKey(string(tenantA), 999), get(tx, positionIn(tx, 4))) }},
		"two entries exchanged": {7, func(tx store.Tx) error {
			a, b := get(tx, entryKey(7)), get(tx, entryKey(8))
			return cmp.Or(tx.Put(entryKey(7), b), tx.Put(entryKey(8), a))
		}},
		"a cut tail": {20, func(tx store.Tx) error {
			return cmp.Or(tx.Delete(entryKey(21)), tx.Delete(entryKey(20)))
		}},
		"an inserted entry, the rest moved up": {8, func(tx store.Tx) error {
			for n := uint64(21); n >= 8; n-- {
				if err := tx.Put(entryKey(n+1), get(tx, entryKey(n))); err != nil {
					return err
				}
			}
			return tx.Put(entryKey(8), get(tx, entryKey(7)))
		}},
		"a current row of another entry": {3, func(tx store.Tx) error { return flip(tx, currentKey(string(tenantB), "cred_sealed"), -1) }},
		"a lost current row":             {3, func(tx store.Tx) error { return tx.Delete(currentKey(string(tenantB), "cred_sealed")) }},
		"an entry with other words, hashed anew": {7, func(tx store.Tx) error {
			b := get(tx, entryKey(7))
			return tx.Put(entryKey(7), bytes.Replace(b, []byte("success"), []byte("failure"), 1))
		}},
		"a space in an entry": {7, func(tx store.Tx) error {
			return tx.Put(entryKey(7), bytes.Replace(get(tx, entryKey(7)), []byte(`,"`), []byte(`, "`), 1))
		}},
	}
	onBothStores(t, func(t *testing.T, newFixture func(testing.TB) *fixture) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				f := newFixture(t)
				f.record(Event{Type: TenantCreated, Outcome: Success, Principal: principal(tenantB)})
				f.sealed(tenantB, "cred_sealed", "1", strings.Repeat("0", 64))
				f.fill(18)
				if _, err := f.verify(); err != nil {
					t.Fatal("whole at first:", err)
				}
				f.alter(c.change)
				_, err := f.verify()
				broken, ok := IsBroken(err)
				if !ok {
					t.Fatalf("not reported: %v", err)
				}
				if broken.Sequence != c.first {
					t.Errorf("reported at %d (%s), want %d", broken.Sequence, broken.Reason, c.first)
				}
			})
		}
	})
}

func TestTamperingWithAnExportIsReported(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	whole := f.export()
	if report, err := VerifyExport(bytes.NewReader(whole), Options{}); err != nil || report.Entries != 21 {
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
		_, err := VerifyExport(strings.NewReader(strings.Join(c.lines, "")), Options{})
		broken, ok := IsBroken(err)
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
	honest, forged := newFixture(t), newFixture(t)
	honest.fill(3)
	forged.fill(3)
	report, err := VerifyExport(bytes.NewReader(forged.export()), Options{})
	if err != nil || report.Pinned {
		t.Fatal(report, err)
	}
	_, err = VerifyExport(bytes.NewReader(forged.export()), Options{Fingerprint: honest.log.Fingerprint()})
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 1 {
		t.Fatal(err)
	}
}

// The holder of the key can sign anything, but each link must still fit. Here one entry is changed,
// and it and all later ones are linked and signed again.
func TestEveryLinkIsCheckedBeyondTheSignature(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	var honest []Entry
	for line := range bytes.Lines(f.export()) {
		if e, err := ParseEntry(bytes.TrimSuffix(line, []byte("\n"))); err == nil {
			honest = append(honest, *e)
		}
	}
	verify := func(entries []Entry) error {
		v := NewVerifier(Options{})
		for i := range entries {
			if err := v.Add(&entries[i]); err != nil {
				break
			}
		}
		_, err := v.Finish()
		return err
	}
	for name, change := range map[string]func(e *Entry){
		"nothing":                  func(*Entry) {},
		"previous hash":            func(e *Entry) { e.PreviousHash = zeroHash },
		"tenant's previous hash":   func(e *Entry) { e.TenantPreviousHash = strings.Repeat("1", 64) },
		"tenant's sequence":        func(e *Entry) { e.TenantSequence++ },
		"sequence":                 func(e *Entry) { e.Sequence++ },
		"an earlier time":          func(e *Entry) { e.Timestamp = "2026-11-21T11:59:59.000000Z" },
		"another spelling of time": func(e *Entry) { e.Timestamp = strings.Replace(e.Timestamp, "Z", "+00:00", 1) },
		"no time":                  func(e *Entry) { e.Timestamp = "" },
		"another key id":           func(e *Entry) { e.KeyID = strings.Repeat("0", 64) },
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
		if broken, ok := IsBroken(err); !ok || broken.Sequence != honest[at].Sequence {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// relink hashes and signs the entries again, and links each one to the previous one.
func relink(t *testing.T, f *fixture, entries []Entry) {
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
		sum, err := e.digest()
		if err != nil {
			t.Fatal(err)
		}
		renamed[e.Hash] = hex.EncodeToString(sum[:])
		e.Hash = renamed[e.Hash]
		signature, err := f.log.signer.Sign(signingContext, sum[:])
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
		"a cut tail": func(tx store.Tx) error { return tx.Delete(entryKey(21)) },
		"a row far beyond the head": func(tx store.Tx) error {
			e, err := decodeRow(get(tx, entryKey(21)), nil)
			if err != nil {
				return err
			}
			e.Sequence = maxInteger
			core, err := e.canonical(nil, false)
			return cmp.Or(err, tx.Put(entryKey(maxInteger), encodeRow(core, make([]byte, 3309))))
		},
		"a changed head": func(tx store.Tx) error {
			b := get(tx, headKey)
			b[20] ^= 1
			return tx.Put(headKey, b)
		},
		"an earlier head": func(tx store.Tx) error {
			e, err := decodeRow(get(tx, entryKey(20)), nil)
			if err != nil {
				return err
			}
			return tx.Put(headKey, e.link().encode())
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
			f := newFixture(t)
			f.fill(20)
			f.alter(damage)
			log := newParts(f.now)
			err := log.Use(t.Context(), f.store, f.log.signer, "chain_test")
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
		onBothStores(t, func(t *testing.T, newFixture func(testing.TB) *fixture) {
			t.Run(name+", found while running", func(t *testing.T) {
				f := newFixture(t)
				f.fill(20)
				f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
				if err := f.store.Update(t.Context(), damage); err != nil {
					t.Fatal(err)
				}
				if err := f.log.Record(t.Context(), Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)}); err == nil {
					t.Error("an entry was signed")
				}
			})
		})
	}
}

// A log that was wiped and then written by the server has the right key and the right chain ID, but
// lacks its beginning.
func TestALogThatBeginsAnewIsReported(t *testing.T) {
	f := newFixture(t)
	f.fill(3)
	var lines []string
	for line := range bytes.Lines(f.export()) {
		lines = append(lines, string(line))
	}
	e, err := ParseEntry([]byte(strings.TrimSuffix(lines[1], "\n"))) // first entry of its tenant, which names the key
	if err != nil {
		t.Fatal(err)
	}
	e.Sequence, e.PreviousHash = 1, zeroHash
	forged := []Entry{*e}
	relink(t, f, forged)
	v := NewVerifier(Options{Fingerprint: f.log.Fingerprint()})
	_ = v.Add(&forged[0])
	_, err = v.Finish()
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 1 {
		t.Fatal("accepted")
	}
}

// Damaged rows of one tenant affect only that tenant.
func TestADamagedTenantStopsNobodyElse(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", "00")
	f.sealed(tenantB, "cred_b", "1", "00")
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(tenantKey(string(tenantB), 1), []byte("junk"))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.log.Use(t.Context(), f.store, f.log.signer, "chain_test"); err != nil { // as after a restart
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			tenant := tenantA
			if i%2 == 0 {
				tenant = tenantB
			}
			err := f.log.Record(context.Background(), Event{Type: AuditRead, Outcome: Success, Principal: principal(tenant)})
			if (err == nil) != (tenant == tenantA) {
				t.Errorf("%s: %v", tenant, err)
			}
		})
	}
	wg.Wait()
}

// The index decides which entries a tenant sees, but the entry names its tenant.
func TestASwappedIndexShowsNobodyElsesEntries(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", "00")
	f.sealed(tenantB, "cred_b", "1", "00")
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put(tenantKey(string(tenantA), 1), get(tx, tenantKey(string(tenantB), 1)))
	})
	if err != nil {
		t.Fatal(err)
	}
	if entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 10}); err == nil {
		t.Fatal(entries)
	}
}
