package vault

import (
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/idempotency"
)

func onceRequest(key, name string, values map[string]string) SealRequest {
	return SealRequest{Name: name, Type: "database", Values: secrets(values), IdempotencyKey: key}
}

func (f *fixture) sealOnce(key, name string, values map[string]string) Credential {
	f.t.Helper()
	c, err := f.vault.Seal(f.t.Context(), f.a, onceRequest(key, name, values))
	must(f.t, err)
	return c
}

func TestARepeatedSealAnswersAsTheFirst(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := f.sealOnce("retry-1", "db", login)
	f.advance(time.Hour)
	_, err := f.vault.Rotate(t.Context(), f.a, first.ID) // keeps the values of the request
	must(t, err)
	if again := f.sealOnce("retry-1", "db", login); again != first {
		t.Fatalf("first %+v, again %+v", first, again)
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialListed || e.Outcome != audit.Success || e.Resource.ID != first.ID || e.Attributes["replay"] != "true" {
		t.Fatalf("recorded as %+v", e)
	}
	explicit := onceRequest("retry-1", "db", login)
	explicit.TTLDays = bounds.DefaultTTLDays
	if again, err := f.vault.Seal(t.Context(), f.a, explicit); err != nil || again != first {
		t.Fatal("the default TTL is another request when it is named:", err)
	}
	if other := f.sealOnce("retry-2", "db", login); other.ID == first.ID {
		t.Fatal("another key made no other credential")
	}
	foreign, err := f.vault.Seal(t.Context(), f.b, onceRequest("retry-1", "db", login))
	if err != nil || foreign.ID == first.ID {
		t.Fatal("another tenant's key is the same:", err)
	}
	f.verify()
}

func TestAnIdempotencyKeyIsForOneRequest(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sealOnce("k", "db", login)
	before := f.verify().Entries
	for what, change := range map[string]func(*SealRequest){
		"name":   func(r *SealRequest) { r.Name = "other" },
		"type":   func(r *SealRequest) { r.Type = "other" },
		"TTL":    func(r *SealRequest) { r.TTLDays = 1 },
		"values": func(r *SealRequest) { r.Values = secrets(map[string]string{"p": "q"}) },
	} {
		req := onceRequest("k", "db", login)
		change(&req)
		if _, err := f.vault.Seal(t.Context(), f.a, req); !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "another request") {
			t.Errorf("another %s: %v", what, err)
		}
	}
	for _, key := range []string{"a b", "a\n", "é", "\x7f", strings.Repeat("k", 256)} {
		if _, err := f.vault.Seal(t.Context(), f.a, onceRequest(key, "db", login)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", key, err)
		}
	}
	if f.verify().Entries != before {
		t.Error("a bad request left an entry")
	}
	f.sealOnce(strings.Repeat("~", 255), "db", login)
}

// Rows that depend on the values are deleted with them. The idempotency key still prevents a second
// credential.
func TestARequestIsForgottenWithItsValues(t *testing.T) {
	for what, end := range map[string]func(f *fixture, id string){
		"deleted":  func(f *fixture, id string) { must(t, f.vault.Delete(t.Context(), f.a, id)) },
		"replaced": func(f *fixture, id string) { f.replace(id, 0, login) },
	} {
		f := newFixture(t, time.Minute)
		c := f.sealOnce("k", "db", login)
		end(f, c.ID)
		if keys, _ := f.rows("idempotency/request/"); len(keys) != 0 {
			t.Errorf("%s: the request is remembered: %q", what, keys)
		}
		if _, err := f.vault.Seal(t.Context(), f.a, onceRequest("k", "db", login)); !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "replaced or deleted") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestConcurrentRetriesMakeOneCredential(t *testing.T) {
	f := newFixture(t, time.Minute)
	var mu sync.Mutex
	ids := make(map[Credential]int)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c, err := f.vault.Seal(t.Context(), f.a, onceRequest("k", "db", login))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[c]++
		})
	}
	wg.Wait()
	if keys, _ := f.rows("credential/"); len(ids) != 1 || len(keys) != 1 {
		t.Fatal(ids, len(keys))
	}
	f.verify()
}

func TestAnIdempotencyKeyIsGoodForADay(t *testing.T) {
	for _, swept := range []bool{true, false} {
		f := newFixture(t, time.Minute)
		first := f.sealOnce("k", "db", login)
		f.advance(day - time.Second)
		if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 {
			t.Fatal("swept early:", n, err)
		}
		if again := f.sealOnce("k", "db", login); again != first {
			t.Fatal("forgotten early")
		}
		f.advance(time.Second)
		if swept {
			if n, err := f.vault.Sweep(t.Context()); err != nil || n != 1 {
				t.Fatal(n, err)
			}
			if keys, _ := f.rows("idempotency/"); len(keys) != 0 {
				t.Fatalf("left behind: %q", keys)
			}
		}
		second := f.sealOnce("k", "other", login)
		if second.ID == first.ID {
			t.Fatal("never forgotten")
		}
		if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 {
			t.Fatal("the second was swept:", n, err)
		}
		if keys, _ := f.rows("idempotency/"); len(keys) != 3 {
			t.Fatalf("%q", keys)
		}
		if again := f.sealOnce("k", "other", login); again != second {
			t.Fatal("the second is not remembered")
		}
		f.verify()
	}
}

// manyRows is as many as one transaction of a sweep deletes.
const manyRows = 256

func dueRow(at time.Time, of string) []byte {
	return append(binary.BigEndian.AppendUint64([]byte("idempotency/due/"), uint64(at.UnixMicro())), of...)
}

func TestSweepGoesThroughAllThatIsDue(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sealOnce("real", "db", login)
	f.tamper(func(tx store.Tx) error {
		for i := range manyRows + 10 {
			if err := tx.Put(dueRow(f.now().Add(time.Duration(i)), "ten/"+strings.Repeat("x", i+1)), nil); err != nil {
				return err
			}
		}
		return errors.Join(
			tx.Put([]byte("idempotency/key/ten/x"), []byte("damaged")),
			tx.Put([]byte("idempotency/due/\x00"), nil), // a row that no program wrote
		)
	})
	f.advance(day)
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != manyRows+12 {
		t.Fatal(n, err)
	}
	if keys, _ := f.rows("idempotency/"); len(keys) != 0 {
		t.Fatalf("left behind: %q", keys)
	}
	commits := f.store.Commits()
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 || f.store.Commits() != commits {
		t.Fatal("nothing to do, and it wrote:", n, err)
	}
}

// A sweep finds a request when the key that led to it is damaged or lost.
func TestSweepForgetsRequestsWhoseKeyIsDamagedOrLost(t *testing.T) {
	for name, damage := range map[string]func(f *fixture, tx store.Tx, key, request, due []byte) error{
		"a damaged key": func(_ *fixture, tx store.Tx, key, _, _ []byte) error { return tx.Put(key, []byte("junk")) },
		"a lost key":    func(_ *fixture, tx store.Tx, key, _, _ []byte) error { return tx.Delete(key) },
		"both damaged": func(_ *fixture, tx store.Tx, key, request, _ []byte) error {
			return errors.Join(tx.Put(key, []byte("junk")), tx.Put(request, []byte("junk")))
		},
		"swept by the release before": func(f *fixture, tx store.Tx, key, _, due []byte) error {
			f.vault = New(f.store, guard.New(f.log), f.keys, f.now)
			return errors.Join(tx.Delete(key), tx.Delete(due))
		},
	} {
		f := newFixture(t, time.Minute)
		_, err := f.vault.Sweep(t.Context()) // the first one after the start
		must(t, err)
		f.sealOnce("k", "db", login)
		keys, _ := f.rows("idempotency/key/")
		requests, _ := f.rows("idempotency/request/")
		due, _ := f.rows("idempotency/due/")
		f.tamper(func(tx store.Tx) error { return damage(f, tx, keys[0], requests[0], due[0]) })
		f.advance(day - time.Second)
		young := f.sealOnce("young", "db", login)
		f.advance(time.Second)
		_, err = f.vault.Sweep(t.Context())
		must(t, err)
		if keys, _ := f.rows("idempotency/"); len(keys) != 3 {
			t.Errorf("%s: %q", name, keys)
		}
		if again := f.sealOnce("young", "db", login); again != young {
			t.Errorf("%s: another key was forgotten with it", name)
		}
	}
}

// The next sweep deletes what a full disk kept the last one from deleting.
func TestASweepThatFailsIsMadeUpFor(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.tamper(func(tx store.Tx) (err error) {
		for i := range manyRows + 10 {
			err = errors.Join(err, tx.Put(idempotency.RequestKey("ten", strings.Repeat("x", i+1)), []byte("junk")))
		}
		return err
	})
	f.store.full.Store(true)
	if _, err := f.vault.Sweep(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	f.store.full.Store(false)
	_, err := f.vault.Sweep(t.Context())
	must(t, err)
	if keys, _ := f.rows("idempotency/"); len(keys) != 0 {
		t.Fatalf("left behind: %d", len(keys))
	}
}

func TestARepeatThatCannotBeRecordedIsNotAnswered(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sealOnce("k", "db", login)
	f.store.full.Store(true)
	if c, err := f.vault.Seal(t.Context(), f.a, onceRequest("k", "db", login)); !errors.Is(err, fault.Unavailable) || c.ID != "" {
		t.Fatal(c, err)
	}
}

func TestWhatAKeyMadeCannotBeRewritten(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sealOnce("k", "db", login)
	keys, values := f.rows("idempotency/key/")
	f.tamper(func(tx store.Tx) error {
		row := append([]byte(nil), values[0]...)
		row[len(row)-3] ^= 1
		return tx.Put(keys[0], row)
	})
	if _, err := f.vault.Seal(t.Context(), f.a, onceRequest("k", "db", login)); !errors.Is(err, fault.Internal) {
		t.Fatal(err)
	}
}
