package compliance_test

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
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/story"
)

var update = flag.Bool("update", false, "write the golden files anew")

// pure returns a story whose entries are added to the evidence at once, and the evidence.
func pure(t testing.TB) (*story.Story, *compliance.Evidence) {
	t.Helper()
	e := compliance.NewEvidence()
	s := &story.Story{Clock: story.Start, Versions: make(map[string]int)}
	s.Record = func(event audit.Event) {
		t.Helper()
		if err := e.Add(story.EntryOf(event, s.Clock, uint64(e.Count)+1)); err != nil {
			t.Fatal(err)
		}
	}
	return s, e
}

// TestAssessmentsAreGolden compares every score with its golden value. A change here changes what
// is reported about the same entries.
func TestAssessmentsAreGolden(t *testing.T) {
	for name, tell := range map[string]func(*story.Story) *story.Story{"good": (*story.Story).Good, "bad": (*story.Story).Bad} {
		s, e := pure(t)
		tell(s)
		var out bytes.Buffer
		for _, f := range compliance.Frameworks() {
			a := catalogues(t)[f].Assess(e)
			fmt.Fprintf(&out, "%s %.1f\n", f, *a.Score)
			if f == compliance.SOC2 {
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

// FuzzStoredEvidence checks that no stored evidence can stop the service, although stored evidence
// is under a MAC.
func FuzzStoredEvidence(f *testing.F) {
	s, e := pure(f)
	s.Good()
	b, err := e.Encode()
	check(f, err)
	f.Add(b)
	f.Add([]byte{1, '{', '}'})
	f.Add([]byte(`{}`))
	soc2 := catalogues(f)[compliance.SOC2]
	f.Fuzz(func(_ *testing.T, b []byte) {
		e, err := compliance.DecodeEvidence(b)
		if err != nil {
			return
		}
		soc2.Assess(e)
		_ = e.Add(story.EntryOf(audit.Event{Type: audit.CredentialRotated, Outcome: audit.Success, Principal: story.Owner,
			Resource: audit.Resource{Type: audit.CredentialResource, ID: "cred_a"}}, e.Last.Time().Add(time.Hour), e.TenantSequence+1))
		soc2.Assess(e)
	})
}

// BenchmarkMillionEntries measures a score over a million entries of a tenant: folding them once,
// and then each score, also with evidence that is read back from the store.
func BenchmarkMillionEntries(b *testing.B) {
	const million = 1_000_000
	fold := func(n int) *compliance.Evidence {
		e := compliance.NewEvidence()
		s := &story.Story{Clock: story.Start, Versions: make(map[string]int)}
		s.Record = func(event audit.Event) {
			check(b, e.Add(story.EntryOf(event, s.Clock, uint64(e.Count)+1)))
		}
		s.Began().Registered().Verified().Issued(story.Client.ID, 0, "")
		for i := 0; e.Count < n; i++ {
			if s.After(20 * time.Second); i%100 == 0 {
				s.Renewed(fmt.Sprint("cred_", i/100%2000), 60)
			}
			s.Used(audit.DataDecrypted, story.Client)
		}
		s.Assessed()
		return e
	}
	b.Run("fold", func(b *testing.B) {
		for b.Loop() {
			fold(million / 10)
		}
		b.ReportMetric(float64(b.N)*million/10/b.Elapsed().Seconds(), "entries/s")
	})
	e := fold(million)
	soc2 := catalogues(b)[compliance.SOC2]
	b.Run("score", func(b *testing.B) {
		for b.Loop() {
			soc2.Assess(e)
		}
	})
	stored, err := e.Encode()
	check(b, err)
	b.Run("score from the store", func(b *testing.B) {
		for b.Loop() {
			e, err := compliance.DecodeEvidence(stored)
			check(b, err)
			soc2.Assess(e)
		}
		b.ReportMetric(float64(len(stored)), "bytes")
	})
}
