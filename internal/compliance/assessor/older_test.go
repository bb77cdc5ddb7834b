package assessor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/story"
)

// many makes the tenant encrypt n times.
func (w *world) many(n int) {
	w.t.Helper()
	check(w.t, w.store.Update(w.t.Context(), func(tx store.Tx) error {
		for range n {
			if _, err := w.log.Append(tx, audit.Event{Type: audit.DataEncrypted, Outcome: audit.Success, Principal: story.Client, Resource: audit.Resource{Type: audit.DataResource}}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// hurried calls f with a context that ends at the n-th View of the log.
func (w *world) hurried(n int, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	views := 0
	w.viewing = func() {
		if views++; views == n {
			cancel()
		}
	}
	defer func() { w.viewing = nil }()
	return f(ctx)
}

// Calls reach an old head together, however little each of them gets done.
func TestOldHeadsAreReachedInSteps(t *testing.T) {
	w := newWorld(t)
	w.Began()
	w.many(2000)
	const head = 1700
	want, err := compliance.Derive(w.service.catalogues[compliance.SOC2], sequence(w.entries(story.Ours)), head)
	check(t, err)
	s := w.newService().evidence
	for call := 1; ; call++ {
		var got compliance.Assessment
		err := w.hurried(3, func(ctx context.Context) error { // the base and a page; then the time is up
			e, leave, err := s.asOf(ctx, story.Ours, head)
			if err == nil {
				got = w.service.catalogues[compliance.SOC2].Assess(e)
				leave()
			}
			return err
		})
		if errors.Is(err, errUnfinished) && call < 100 {
			continue
		}
		check(t, err)
		if want.Proof = (compliance.Proof{}); call == 1 || !reflect.DeepEqual(got, want) {
			t.Errorf("at call %d\n%+v\nwant\n%+v", call, got, want)
		}
		break
	}
	// Gathered evidence serves the next caller, which has it exclusively.
	err = w.hurried(1, func(ctx context.Context) error {
		e, leave, err := s.asOf(ctx, story.Ours, head)
		if err != nil || e.Last.Sequence != head {
			return errors.Join(err, errors.New("it was gathered again"))
		}
		defer leave()
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if _, _, err := s.asOf(ended, story.Ours, head); fault.Of(err) != fault.Unavailable {
			t.Error(err)
		}
		return nil
	})
	check(t, err)
}

// Entries that no verified signature covered when the time was up are not judged.
func TestUnprovenPastIsNotJudged(t *testing.T) {
	w := newWorld(t)
	w.Began()
	w.many(600)
	s := w.newService().evidence
	const head = 500
	e, leave, err := s.asOf(t.Context(), story.Ours, head)
	check(t, err)
	want, err := e.Encode()
	check(t, err)
	p := s.older.get(story.Ours, head)
	p.unproven = true
	e.Count = 7 // simulates a corruption
	leave()
	e, leave, err = s.asOf(t.Context(), story.Ours, head)
	check(t, err)
	defer leave()
	if got, err := e.Encode(); err != nil || !bytes.Equal(got, want) || p.unproven {
		t.Errorf("%v %s", err, got)
	}
	// The same holds for entries up to the head when the time was up before the signature was
	// checked.
	const page = 500 // entries that one View of the log reads
	end := w.entries(story.Ours)[page-1].Sequence
	cut := func(ctx context.Context) error {
		_, leave, err := s.asOf(ctx, story.Ours, end)
		if err == nil {
			leave()
		}
		return err
	}
	half := s.older.get(story.Ours, end)
	if err := w.hurried(3, cut); !errors.Is(err, errUnfinished) || half.evidence.Last.Sequence != end || !half.unproven {
		t.Errorf("%v: unproven %v", err, half.unproven)
	}
	read := half.evidence
	check(t, w.hurried(0, cut))
	if half.evidence == read || half.unproven {
		t.Error("what nothing proved is judged")
	}
	// The same holds for entries before a head that is not an entry of the tenant.
	q := s.older.get(story.Ours, 1<<40)
	q.evidence, q.unproven = compliance.NewEvidence(), true
	for _, entry := range w.entries(story.Ours) {
		check(t, q.evidence.Add(entry))
	}
	if _, _, err := s.asOf(t.Context(), story.Ours, 1<<40); fault.Of(err) != fault.NotFound || q.evidence != nil {
		t.Error(err)
	}
	// Evidence that the log does not continue is gathered again.
	q = s.older.get(story.Ours, 400)
	q.evidence = compliance.NewEvidence()
	check(t, q.evidence.Add(story.EntryOf(audit.Event{Type: audit.AuditRead, Principal: story.Owner}, story.Start, 1)))
	q.evidence.Last.Hash = "of another log"
	other, leave2, err := s.asOf(t.Context(), story.Ours, 400)
	check(t, err)
	defer leave2()
	if other.Last.Sequence != 400 || other.First.Hash != e.First.Hash {
		t.Errorf("%+v", other.Last)
	}
}

func TestOlderHeadsAreBounded(t *testing.T) {
	p := cache{max: maxOlder, perTenant: maxTenantOlder}
	first := p.get(story.Ours, 1)
	second := p.get(story.Ours, 2)
	if p.get(story.Ours, 1) != first {
		t.Error("it was forgotten at once")
	}
	for head := range uint64(50) { // one tenant's many heads do not evict those of others
		p.get(story.Theirs, head)
	}
	if p.get(story.Ours, 1) != first || p.get(story.Ours, 2) != second || len(p.all) != 2*maxTenantOlder {
		t.Errorf("%d are left", len(p.all))
	}
	for i := range 50 {
		p.get(authz.TenantID(fmt.Sprint("ten_", i)), 1)
	}
	if len(p.all) != maxOlder {
		t.Errorf("%d of them", len(p.all))
	}
	// A head that does not exist is not kept in the cache.
	w := newWorld(t)
	w.Began()
	if _, _, err := w.service.evidence.asOf(t.Context(), story.Ours, 1); fault.Of(err) != fault.NotFound || len(w.service.evidence.older.all) != 0 {
		t.Errorf("%v: %d of them", err, len(w.service.evidence.older.all))
	}
}

// watched is a store that knows which closure is running.
type watched struct {
	store.Store
	in string
}

func (v *watched) View(ctx context.Context, fn func(store.Reader) error) error {
	return v.Store.View(ctx, func(r store.Reader) error {
		v.in = "View"
		defer func() { v.in = "" }()
		return fn(r)
	})
}

func (v *watched) Update(ctx context.Context, fn func(store.Tx) error) error {
	return v.Store.Update(ctx, func(tx store.Tx) error {
		v.in = "Update"
		defer func() { v.in = "" }()
		return fn(tx)
	})
}

// Evidence may be megabytes, a View has two seconds, and an Update blocks all writers. So neither
// authenticates nor decodes evidence.
func TestStoredEvidenceIsWorkedOnOutsideOfClosures(t *testing.T) {
	w := newWorld(t)
	w.Began()
	for i := range 400 {
		w.Version(audit.CredentialSealed, fmt.Sprint("cred_", i), 30)
	}
	fresh := func() (*Service, *gatherer) {
		service := w.newService()
		s := service.evidence
		v := &watched{Store: w.store}
		s.store, s.milestone = v, 100
		seal, unseal := s.seal, s.unseal
		s.seal = func(key, content []byte) []byte {
			if v.in != "" {
				t.Errorf("%d bytes are sealed in a %s", len(content), v.in)
			}
			return seal(key, content)
		}
		s.unseal = func(key, row []byte) ([]byte, error) {
			if v.in == "View" || v.in != "" && len(row) > 100 {
				t.Errorf("%d bytes are opened in a %s", len(row), v.in)
			}
			return unseal(key, row)
		}
		return service, s
	}
	service, _ := fresh()
	check(t, service.Persist(t.Context(), 1<<53))
	w.many(1)
	check(t, service.Persist(t.Context(), 1<<53)) // over the stored evidence
	_, s := fresh()
	f, leave, err := s.acquire(t.Context(), story.Ours)
	check(t, err)
	defer leave()
	check(t, s.catchUp(t.Context(), f, 0))
	encoded, err := f.evidence.Encode()
	check(t, err)
	stored := func() (row []byte) {
		t.Helper()
		check(t, w.store.View(t.Context(), func(r store.Reader) (err error) {
			row, err = r.Get(stateKey(story.Ours))
			row = bytes.Clone(row)
			return err
		}))
		return row
	}
	if n := len(stored()); f.stored == 0 || n > len(encoded)/2 {
		t.Errorf("%d bytes are stored of %d, at %d", n, len(encoded), f.stored)
	}
	// Unusable milestones are skipped, one by one.
	keys := w.milestones(story.Ours)
	newest := keys[len(keys)-1]
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(newest, []byte("damaged")) }))
	e, err := s.loadBefore(t.Context(), story.Ours, 1<<53)
	check(t, err)
	if e == nil || !bytes.Equal(milestoneKey(story.Ours, e.Last.Sequence), keys[len(keys)-2]) {
		t.Errorf("%d milestones, and found %v", len(keys), e != nil)
	}
	// An unusable state is replaced, even if it is for the same entry.
	good := stored()
	check(t, w.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(stateKey(story.Ours), []byte("damaged")) }))
	check(t, s.saveNewest(t.Context(), f))
	if !bytes.Equal(stored(), good) {
		t.Error("what was damaged stays")
	}
}
