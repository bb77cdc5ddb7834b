package kmsplugin

import (
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

// defaultPatience is that of the program.
var defaultPatience = patience

func TestMain(m *testing.M) {
	patience = time.Minute
	os.Exit(m.Run())
}

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
	must(t, start(t, dir).stop())
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

// hanging is a plugin whose log hangs.
type hanging struct {
	service
	t         *testing.T
	dir       string
	goOn      chan struct{}
	logged    bytes.Buffer
	encrypted *kmsapi.DecryptRequest
}

// hangs runs a test with a log that hangs before its first entry, as the first write to a disk does. Time
// passes when all wait.
func hangs(t *testing.T, required bool, test func(h *hanging)) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	k, err := load(t.Context(), c, dir, nil)
	must(t, err)
	key, err := c.openNodeKey(t.Context(), dir, k.set)
	must(t, err)
	synctest.Test(t, func(t *testing.T) {
		h := &hanging{t: t, dir: dir, goOn: make(chan struct{})}
		p := &plugin{logger: slog.New(slog.NewTextHandler(&h.logged, nil)), requireLog: required}
		p.keys.Store(k)
		h.service = service{p: p}
		id := k.set.current().KeyID
		ciphertext, encapsulated, err := k.byID[id].Wrap(id, []byte("a seed"))
		must(t, err)
		h.encrypted = &kmsapi.DecryptRequest{Ciphertext: ciphertext, KeyId: id, Annotations: map[string][]byte{annotation: encapsulated}}
		p.log = startRecorder(dir, key, nodelog.Options{Required: required, Logger: p.logger, Now: func() time.Time {
			<-h.goOn
			return time.Now()
		}})
		test(h)
	})
}

// takes fails unless a call takes this long.
func (h *hanging) takes(want time.Duration, what string, call func() error) {
	h.t.Helper()
	began := time.Now()
	if err := call(); err != nil {
		h.t.Errorf("%s: %v", what, err)
	}
	if took := time.Since(began); took != want {
		h.t.Errorf("%s takes %v, want %v", what, took, want)
	}
}

func (h *hanging) encrypt() error {
	_, err := h.Encrypt(h.t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte("a seed")})
	return err
}

func (h *hanging) decryptIn(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(h.t.Context(), limit)
	defer cancel()
	_, err := h.Decrypt(ctx, h.encrypted)
	return err
}

func (h *hanging) wantsLogged(times int, words string) {
	h.t.Helper()
	if n := strings.Count(h.logged.String(), words); n != times {
		h.t.Errorf("%q was logged %d times, want %d: %s", words, n, times, h.logged.String())
	}
}

func TestALogThatHangsKeepsNoCallAndNoEndWaiting(t *testing.T) {
	if defaultPatience != time.Second {
		t.Errorf("a call waits %v, want a second", defaultPatience)
	}
	hangs(t, false, func(h *hanging) {
		h.takes(0, "status", func() error {
			_, err := h.Status(h.t.Context(), nil)
			return err
		})
		h.takes(patience, "encrypting", h.encrypt)
		h.takes(time.Second, "decrypting with a deadline", func() error { return h.decryptIn(2 * time.Second) })
		const more = 3
		for range maxWaiting - 2 {
			must(h.t, h.decryptIn(time.Millisecond))
		}
		for range more {
			h.takes(0, "encrypting when the queue is full", h.encrypt)
		}
		h.wantsLogged(1, "does not answer in time\"")
		h.takes(endTimeout, "the end", func() error { h.p.log.end(); return nil })
		h.wantsLogged(1, "entries were not written\" entries=259")
		close(h.goOn)
		<-h.p.log.ended
		wantsEntries(h.t, h.dir, 1, maxWaiting-1, more)
	})
}

func TestALogThatAnswersAgainIsWaitedFor(t *testing.T) {
	hangs(t, false, func(h *hanging) {
		for range maxWaiting + 3 {
			must(h.t, h.decryptIn(time.Millisecond))
		}
		close(h.goOn)
		synctest.Wait()
		must(h.t, h.encrypt())
		wantsEntries(h.t, h.dir, 1, maxWaiting, 3)
		h.p.log.end()
		h.wantsLogged(1, "does not answer in time\"")
		h.wantsLogged(1, "answers in time again")
		h.wantsLogged(0, "not written")
	})
}

func TestALogThatHangsRefusesSeedsWhenItIsRequired(t *testing.T) {
	hangs(t, true, func(h *hanging) {
		for range maxWaiting + 3 {
			if err := h.decryptIn(time.Millisecond); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "does not answer in time") {
				h.t.Fatalf("decrypting: %v", err)
			}
		}
		h.p.log.end()
		h.wantsLogged(1, "entries were not written\" entries=256")
		close(h.goOn)
		<-h.p.log.ended
		wantsEntries(h.t, h.dir, 0, maxWaiting, 0)
	})
}

// The reader of a pipe waits for its writer, as the reader of a file on a disk that hangs does.
func TestThePluginServesAndEndsWhileTheLogIsOpened(t *testing.T) {
	t.Parallel()
	dir := initialized(t, newCustody(t), newKMS(t))
	_, n, err := ReadNode(dir)
	must(t, err)
	key, err := dualsig.ParsePublicKey(n.PublicKey)
	must(t, err)
	folder := nodelog.Folder(dir, key.ID())
	must(t, os.MkdirAll(folder, 0o700))
	pipe := filepath.Join(folder, "00000000000000000001.jsonl")
	must(t, syscall.Mkfifo(pipe, 0o600))

	p := start(t, dir)
	p.status(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = p.Encrypt(ctx, &kmsapi.EncryptRequest{Plaintext: []byte("a seed")})
	must(t, err)
	must(t, p.stop())
	p.log.await(t, "entries=1")
	refused(t, "another plugin, while this one may write yet", Serve(ctx, Config{Dir: dir, Socket: p.socket}), "another plugin serves")

	must(t, os.WriteFile(pipe, []byte("no entry\n"), 0o600))
	lock, err := os.Open(filepath.Join(dir, "serve.lock"))
	must(t, err)
	defer lock.Close()
	must(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	wantsEntries(t, dir, 1, 0, 0)
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
