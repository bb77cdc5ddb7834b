package kmsplugin

import (
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/nodelog"
)

// verified returns what the log of a node has.
func verified(t testing.TB, dir string) LogSummary {
	t.Helper()
	s, err := VerifyLog(dir)
	must(t, err)
	return s
}

// wantsEntries fails unless the log of a node has so many entries of seeds, and counts so many as dropped.
func wantsEntries(t testing.TB, dir string, wrapped, opened, dropped uint64) {
	t.Helper()
	if s := verified(t, dir); s.Kinds[nodelog.Wrapped] != wrapped || s.Kinds[nodelog.Opened] != opened || s.Dropped != dropped {
		t.Errorf("the log has %v and counts %d as dropped; want %d wrapped, %d opened and %d", s.Kinds, s.Dropped, wrapped, opened, dropped)
	}
}

func logFiles(t testing.TB, dir string) []string {
	t.Helper()
	paths, err := nodelog.Files(nodelog.Folder(dir, verified(t, dir).Node))
	must(t, err)
	return paths
}

func TestSeedsAreInTheNodesLogAndRefusalsAreNot(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	p := start(t, dir)
	request := p.encrypt(t, "a seed")
	wantsEntries(t, dir, 1, 0, 0)
	p.decrypts(t, request, "a seed")
	wantsEntries(t, dir, 1, 1, 0)
	request.Ciphertext[80] ^= 1
	if _, err := p.Decrypt(t.Context(), request); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a changed ciphertext: %v", err)
	}
	request.Ciphertext[80] ^= 1
	if _, err := p.Encrypt(t.Context(), &kmsapi.EncryptRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no seed: %v", err)
	}
	s := verified(t, dir)
	if set := read(t, dir); s.Count() != 3 || s.Kinds[nodelog.Started] != 1 || s.NodeName != "cp-1" || s.KeySet != set.ID {
		t.Errorf("the log has %+v", s)
	}
	sum := sha3.Sum256(request.GetCiphertext())
	want := `"key_id":"` + request.GetKeyId() + `","seed":"` + hex.EncodeToString(sum[:]) + `"`
	b, err := os.ReadFile(logFiles(t, dir)[0])
	must(t, err)
	if n := bytes.Count(b, []byte(want)); n != 2 {
		t.Errorf("%d entries have the key id and the digest of the seed, want 2: %s", n, b)
	}
	must(t, p.stop())
	start(t, dir)
	if s := verified(t, dir); s.Count() != 4 || s.Kinds[nodelog.Started] != 2 {
		t.Errorf("after the second start the log has %+v", s)
	}
}

func TestThePluginServesOnWhenTheLogIsFull(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	p := startWith(t, Config{Dir: dir, LogEntries: 4})
	request := p.encrypt(t, "a seed")
	for range 4 {
		p.decrypts(t, request, "a seed")
	}
	p.log.await(t, "takes no entries")
	p.status(t)
	wantsEntries(t, dir, 1, 2, 0)
	must(t, os.Remove(logFiles(t, dir)[0]))
	p.decrypts(t, request, "a seed")
	p.log.await(t, "takes entries again\" dropped=2")
	wantsEntries(t, dir, 0, 3, 2)
}

func TestWhatIsLostWithTheProcessIsLogged(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	p := startWith(t, Config{Dir: dir, LogEntries: 4})
	for range 5 {
		p.encrypt(t, "a seed")
	}
	must(t, p.stop())
	p.log.await(t, "and the number is not in it\" dropped=2")
}

func TestSeedsAreRefusedWithoutTheLogWhenItIsRequired(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	p := startWith(t, Config{Dir: dir, LogEntries: 4, RequireLog: true})
	request := p.encrypt(t, "a seed")
	p.decrypts(t, request, "a seed")
	p.decrypts(t, request, "a seed")
	refuses := func(code codes.Code, words string) {
		t.Helper()
		d, err := p.Decrypt(t.Context(), request)
		if status.Code(err) != code || d.GetPlaintext() != nil {
			t.Errorf("decrypting: %v, want %s", err, code)
		}
		refused(t, "decrypting", err, words)
		e, err := p.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte("a seed")})
		if status.Code(err) != code || e.GetCiphertext() != nil {
			t.Errorf("encrypting: %v, want %s", err, code)
		}
		refused(t, "encrypting", err, words)
	}
	refuses(codes.ResourceExhausted, "copy its oldest files away and remove them")
	p.status(t)
	must(t, os.Remove(logFiles(t, dir)[0]))
	p.decrypts(t, request, "a seed")
	wantsEntries(t, dir, 0, 3, 0)

	folder := filepath.Join(dir, "log")
	must(t, os.Rename(folder, folder+".away"))
	must(t, os.WriteFile(folder, nil, 0o600))
	refuses(codes.Unavailable, "not a directory")
}

func TestThePluginServesWithoutALog(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	folder := filepath.Join(dir, "log")
	must(t, os.WriteFile(folder, nil, 0o600))
	p := start(t, dir)
	p.decrypts(t, p.encrypt(t, "a seed"), "a seed")
	must(t, os.Remove(folder))
	p.encrypt(t, "a seed")
	p.log.await(t, "takes entries again\" dropped=2")
	wantsEntries(t, dir, 1, 0, 2)
}

func TestADamagedLogKeepsNoPluginFromServing(t *testing.T) {
	dir := initialized(t, newCustody(t), newKMS(t))
	p := start(t, dir)
	p.encrypt(t, "a seed")
	must(t, p.stop())
	path := logFiles(t, dir)[0]
	b, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, bytes.Replace(b, []byte(`"wrapped"`), []byte(`"opened"`), 1), 0o600))
	if _, err := VerifyLog(dir); err == nil {
		t.Error("a changed log verifies")
	}
	p = start(t, dir)
	p.decrypts(t, p.encrypt(t, "a seed"), "a seed")
	wantsEntries(t, dir, 1, 1, 0)
}

// A write to a slow disk holds the log, and so does a clock that does not answer.
func TestStatusDoesNotWaitForTheLog(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	k, err := load(t.Context(), c, dir, nil)
	must(t, err)
	key, err := c.openNodeKey(t.Context(), dir, k.set)
	must(t, err)
	asked, answer := make(chan bool, 10), make(chan bool)
	started := false
	p := &plugin{logger: slog.New(slog.DiscardHandler)}
	p.keys.Store(k)
	p.log = nodelog.Open(dir, key, nodelog.Options{Now: func() time.Time {
		if started { // the entry of the start is written
			asked <- true
			<-answer
		}
		started = true
		return time.Now()
	}})
	t.Cleanup(func() { p.log.Close() })
	encrypted := make(chan error, 1)
	go func() {
		_, err := service{p: p}.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte("a seed")})
		encrypted <- err
	}()
	<-asked
	if s, err := (service{p: p}).Status(t.Context(), nil); err != nil || s.GetHealthz() != "ok" {
		t.Errorf("status: %v, %v", s, err)
	}
	close(answer)
	must(t, <-encrypted)
}

func TestTheLogGoesOnWhenTheIdentityMovesToAnotherKMSKey(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	p := start(t, dir)
	p.encrypt(t, "first")
	_, err := Rotate(t.Context(), c, dir, newKMS(t), "")
	must(t, err)
	p.log.await(t, "revision=2")
	_, err = Acknowledge(t.Context(), c, dir, time.Now())
	must(t, err)
	p.encrypt(t, "second")
	wantsEntries(t, dir, 2, 0, 0)
	must(t, p.stop())
	start(t, dir).encrypt(t, "third")
	wantsEntries(t, dir, 3, 0, 0)
}

func TestFilesOfALogVerifyByTheKeySet(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	dir := initialized(t, c, url)
	p := startWith(t, Config{Dir: dir, LogEntries: 8})
	for range 5 {
		p.encrypt(t, "a seed")
	}
	set, err := os.ReadFile(filepath.Join(dir, keySetFile))
	must(t, err)
	paths := logFiles(t, dir)
	s, err := VerifyLogFiles(set, paths)
	if err != nil || s.NodeName != "cp-1" || s.Count() != 6 || len(paths) != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err = VerifyLogFiles(set, paths[1:]); err != nil || s.From != 5 {
		t.Errorf("the second file alone: %+v, %v", s, err)
	}
	_, err = VerifyLogFiles(set, []string{paths[1], paths[0]})
	refused(t, "the wrong order", err, "does not follow entry 6")
	_, err = VerifyLogFiles(bytes.Replace(set, []byte(`"revision":1`), []byte(`"revision":2`), 1), paths)
	refused(t, "a changed key set", err, "signature of the key set")
	other, err := os.ReadFile(filepath.Join(initialized(t, c, url), keySetFile))
	must(t, err)
	_, err = VerifyLogFiles(other, paths)
	refused(t, "another key set", err, "does not name")
}
