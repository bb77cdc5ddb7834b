package compliance

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestAssessmentsAreGolden holds every score to what it was: a change here is a
// change of what is reported of the same entries.
func TestAssessmentsAreGolden(t *testing.T) {
	for name, tell := range map[string]func(*story) *story{"good": (*story).good, "bad": (*story).bad} {
		s, e := pure(t)
		tell(s)
		var out bytes.Buffer
		for _, f := range Frameworks() {
			a := catalogues(t)[f].assess(e)
			fmt.Fprintf(&out, "%s %.1f\n", f, *a.Score)
			if f == SOC2 {
				b, err := json.MarshalIndent(a, "", " ")
				check(t, err)
				out.Write(append(b, '\n'))
			}
		}
		path := filepath.Join("testdata", "golden", name+".txt")
		if *update {
			check(t, os.MkdirAll(filepath.Dir(path), 0o755))
			check(t, os.WriteFile(path, out.Bytes(), 0o644))
		}
		want, err := os.ReadFile(path)
		check(t, err)
		if !bytes.Equal(out.Bytes(), want) {
			t.Errorf("%s differs: look at what changed, then run with -update\n%s", path, out.Bytes())
		}
	}
}

// FuzzStoredEvidence: stored evidence is under a MAC, and yet nothing that comes
// of it may stop the service.
func FuzzStoredEvidence(f *testing.F) {
	s, e := pure(f)
	s.good()
	b, err := e.encode()
	check(f, err)
	f.Add(b)
	f.Add([]byte{1, '{', '}'})
	f.Add([]byte(`{}`))
	soc2 := catalogues(f)[SOC2]
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEvidence(b)
		if err != nil {
			return
		}
		soc2.assess(e)
		_ = e.add(entryOf(audit.Event{Type: audit.CredentialRotated, Outcome: audit.Success, Principal: owner,
			Resource: audit.Resource{Type: audit.CredentialResource, ID: "cred_a"}}, e.Last.time().Add(time.Hour), e.TenantSequence+1))
		soc2.assess(e)
	})
}

// BenchmarkMillionEntries says what a score over a million entries of a tenant
// takes: once to fold them, and then for each score, also with what is read back
// from the store.
func BenchmarkMillionEntries(b *testing.B) {
	const million = 1_000_000
	fold := func(n int) *evidence {
		e := newEvidence()
		s := &story{clock: start, versions: make(map[string]int)}
		s.record = func(event audit.Event) {
			check(b, e.add(entryOf(event, s.clock, uint64(e.Count)+1)))
		}
		s.began().registered().verified().issued(client.ID, 0, "")
		for i := 0; e.Count < n; i++ {
			if s.after(20 * time.Second); i%100 == 0 {
				s.renewed(fmt.Sprint("cred_", i/100%2000), 60)
			}
			s.used(audit.DataDecrypted, client)
		}
		s.assessed()
		return e
	}
	b.Run("fold", func(b *testing.B) {
		for b.Loop() {
			fold(million / 10)
		}
		b.ReportMetric(float64(b.N)*million/10/b.Elapsed().Seconds(), "entries/s")
	})
	e := fold(million)
	soc2 := catalogues(b)[SOC2]
	b.Run("score", func(b *testing.B) {
		for b.Loop() {
			soc2.assess(e)
		}
	})
	stored, err := e.encode()
	check(b, err)
	b.Run("score from the store", func(b *testing.B) {
		for b.Loop() {
			e, err := decodeEvidence(stored)
			check(b, err)
			soc2.assess(e)
		}
		b.ReportMetric(float64(len(stored)), "bytes")
	})
}
