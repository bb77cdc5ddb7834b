package state_test

import (
	"context"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// seen returns rows as the store holds them.
func (f *fixture) seen(keys ...string) (rows []state.Seen) {
	f.t.Helper()
	f.must(f.raw.View(context.Background(), func(r store.Reader) error {
		rows = nil
		for _, key := range keys {
			value, err := r.Get([]byte(key))
			if err != nil {
				return err
			}
			rows = append(rows, state.Seen{Key: []byte(key), Digest: f.state.Digest([]byte(key), value)})
		}
		return nil
	}))
	return rows
}

func TestAcceptAndRemoveChangeOnlyWhatWasSeen(t *testing.T) {
	f := newFixture(t)
	if d := state.New(nil).Digest([]byte("a"), []byte("b")); d != "" {
		t.Errorf("a digest without a key: %q", d)
	}
	row := []byte("user/email/a")
	if a, b := f.state.Digest(row, row), newFixture(t).state.Digest(row, row); len(a) != 16 || a == b {
		t.Errorf("a digest without the deployment's key: %q, %q", a, b)
	}
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"user/email/a": []byte("1"), "user/email/b": []byte("1"), "user/email/c": []byte("1")}))
	f.tamper(map[string][]byte{"user/email/a": []byte("2"), "user/email/c": nil, "user/email/new": []byte("1"), "slowdown/a": []byte("1")})
	var digests []string
	appendEntry := func(tx store.Tx, digest string) error {
		digests = append(digests, digest)
		_, err := f.log.Append(tx, event(audit.StateRowsAccepted))
		return err
	}
	before := f.own()
	for name, c := range map[string]struct {
		do   func(context.Context, store.Store, []state.Seen, func(store.Tx, string) error) error
		rows []state.Seen
	}{
		"accepted, and is right":           {f.state.Accept, f.seen("user/email/a", "user/email/b")},
		"accepted, and does not decide":    {f.state.Accept, f.seen("user/email/a", "slowdown/a")},
		"accepted, and was seen otherwise": {f.state.Accept, []state.Seen{{Key: []byte("user/email/a"), Digest: f.state.Digest([]byte("user/email/a"), []byte("1"))}}},
		"removed, and is missing":          {f.state.Remove, f.seen("user/email/a", "user/email/c")},
		"removed, and was seen otherwise":  {f.state.Remove, []state.Seen{{Key: []byte("user/email/a"), Digest: "0123456789abcdef"}}},
	} {
		if err := c.do(t.Context(), f.raw, c.rows, appendEntry); fault.Of(err) != fault.Conflict {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(digests) > 0 || string(f.own()["state/head"]) != string(before["state/head"]) {
		t.Errorf("%d entries; or the state has changed", len(digests))
	}
	f.must(f.state.Accept(t.Context(), f.raw, f.seen("user/email/a"), appendEntry))
	f.must(f.state.Remove(t.Context(), f.raw, f.seen("user/email/b", "user/email/new", "slowdown/a"), appendEntry))
	if len(digests) != 2 || digests[0] == digests[1] {
		t.Errorf("digests of the entries: %q", digests)
	}
	for range 2 { // also after a start
		found, err := f.state.Scan(t.Context(), f.raw, 1)
		if err != nil || len(found.Refused) != 1 || found.Refused[0].Reason != state.Removed { // user/email/c
			t.Errorf("%+v, %v", found, err)
		}
		if v, err := f.get("user/email/a"); err != nil || string(v) != "2" {
			t.Errorf("the accepted row: %q, %v", v, err)
		}
		for _, key := range []string{"user/email/b", "user/email/new", "slowdown/a"} {
			if v, err := f.get(key); err != nil || v != nil {
				t.Errorf("%s was removed: %q, %v", key, v, err)
			}
		}
		f.must(f.reopen())
	}
}
