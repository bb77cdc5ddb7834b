package kmsplugin

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/latticekeep/latticekeep/internal/envelope"
)

// backedUp returns a key set of two generations with the backup of it.
func backedUp(t *testing.T, c *Custody, url string) (dir string, plain []byte) {
	t.Helper()
	dir = initialized(t, c, url)
	_, err := Rotate(t.Context(), c, dir, "", envelope.MLKEM1024)
	must(t, err)
	plain, s, err := Backup(t.Context(), c, dir)
	must(t, err)
	if s.Revision != 2 {
		t.Errorf("the backup is of revision %d", s.Revision)
	}
	return dir, plain
}

// Promise: a backup opens without the KMS key that is lost, and what is in etcd is read.
func TestABackupIsRestoredUnderAnotherKMSKey(t *testing.T) {
	t.Parallel()
	c := newCustody(t)
	lost := newKMS(t)
	dir, plain := backedUp(t, c, lost)
	before := start(t, dir)
	request := before.encrypt(t, "a seed")
	old := read(t, dir)
	must(t, os.Remove(filepath.FromSlash(lost[len("file://"):])))

	url, again := newKMS(t), filepath.Join(t.TempDir(), "again")
	s, err := Restore(t.Context(), newCustody(t), again, "cp-9", url, plain)
	must(t, err)
	if s.ID != old.ID || s.Revision != 3 || len(s.Nodes) != 1 || s.Nodes[0].Name != "cp-9" || s.Signer.KMS != url {
		t.Errorf("restored %+v", s)
	}
	for i, g := range s.Generations {
		if was := old.Generations[i]; g.KeyID != was.KeyID || g.State != was.State || g.KMS != url || g.FirstKMS == "" {
			t.Errorf("generation %d: %+v", i, g)
		}
	}
	start(t, again).decrypts(t, request, "a seed")

	// It goes on: another node joins, the keys change, and a backup of it is restored.
	n, err := NewNode(t.Context(), c, filepath.Join(t.TempDir(), "cp-2"), "cp-2", url)
	must(t, err)
	_, err = AddNode(t.Context(), c, again, n.Node)
	must(t, err)
	s, err = Rotate(t.Context(), c, again, "", "")
	must(t, err)
	if g := s.pending(); g.Number != 3 || g.FirstKMS != "" {
		t.Errorf("rotated to %+v", g)
	}
	plain, _, err = Backup(t.Context(), c, again)
	must(t, err)
	third := filepath.Join(t.TempDir(), "third")
	s, err = Restore(t.Context(), c, third, "cp-1", newKMS(t), plain)
	must(t, err)
	if s.Generations[0].KeyID != old.Generations[0].KeyID {
		t.Errorf("restored twice: %+v", s.Generations[0])
	}
	start(t, third).decrypts(t, request, "a seed")
}

// Promise: the identity of a node that is there stays, and so do its key set and what it has recorded.
func TestARestoreReplacesNothing(t *testing.T) {
	t.Parallel()
	c, url := newCustody(t), newKMS(t)
	dir, plain := backedUp(t, c, url)
	restore := func() error {
		_, err := Restore(t.Context(), c, dir, "cp-1", url, plain)
		return err
	}
	refused(t, "a restore beside a key set", restore(), "this node has a key set")
	other := initialized(t, c, url)
	loaded(t, c, other)
	must(t, os.Remove(filepath.Join(other, keySetFile)))
	_, err := Restore(t.Context(), c, other, "cp-1", url, plain)
	refused(t, "another key set", err, "and this node has served")
	_, err = Rotate(t.Context(), c, dir, "", "")
	must(t, err)
	loaded(t, c, dir)
	self := read(t, dir).Nodes[0]
	must(t, os.Remove(filepath.Join(dir, keySetFile)))
	refused(t, "a restore of an older revision", restore(), "this node has loaded revision 3")
	must(t, os.Remove(filepath.Join(dir, recordFile)))
	url = newKMS(t) // the restore moves the identity to it, too
	must(t, restore())
	if s := read(t, dir); !bytes.Equal(s.Nodes[0].PublicKey, self.PublicKey) {
		t.Error("the node has another identity")
	}
	if i, err := parseIdentity(dir); err != nil || i.KMS != url {
		t.Errorf("the identity is under %s: %v", i.KMS, err)
	}
	start(t, dir)
	_, err = Restore(t.Context(), c, t.TempDir(), "cp_1", url, plain)
	refused(t, "a bad name", err, "is no name of a node")
}

// Promise: a backup of which something was changed restores nothing.
func TestAChangedBackupIsRefused(t *testing.T) {
	t.Parallel()
	c, url := newCustody(t), newKMS(t)
	_, plain := backedUp(t, c, url)
	_, other := backedUp(t, c, url)
	var b, o backup
	must(t, json.Unmarshal(other, &o))
	for words, change := range map[string]func(){
		"the signing key of the backup":      func() { b.Seed = o.Seed },
		"the secrets of generation 2":        func() { b.Secrets[1] = o.Secrets[1] },
		"the secrets of 1 generations":       func() { b.Secrets = b.Secrets[:1] },
		"has version 2":                      func() { b.Version = 2 },
		"signature of the key set does not":  func() { b.File = bytes.Replace(b.File, []byte(`"revision":2`), []byte(`"revision":9`), 1) },
		"the signing key of the backup: it ": func() { b.File = o.File },
	} {
		b = backup{}
		must(t, json.Unmarshal(plain, &b))
		change()
		changed, err := json.Marshal(b)
		must(t, err)
		dir := filepath.Join(t.TempDir(), "d")
		_, err = Restore(t.Context(), c, dir, "cp-1", url, append(changed, '\n'))
		refused(t, words, err, words)
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: something was written", words)
		}
	}
	_, err := Restore(t.Context(), c, t.TempDir(), "cp-1", url, []byte("{}\n"))
	refused(t, "no backup", err, "is no backup of a key set")
}
