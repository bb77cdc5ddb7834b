package kmsplugin

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

func TestASeedIsWrappedAndOpened(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	for _, a := range []envelope.KEM{envelope.MLKEM768, envelope.MLKEM1024} {
		dir := filepath.Join(t.TempDir(), "cp-1")
		_, err := Init(t.Context(), c, dir, "cp-1", url, a)
		must(t, err)
		p := start(t, dir)
		request := p.encrypt(t, "a seed of kube-apiserver")
		if request.GetKeyId() != p.status(t) || number(request.GetKeyId()) != "1" {
			t.Errorf("%s: key id %s", a, request.GetKeyId())
		}
		want := map[envelope.KEM]int{envelope.MLKEM768: 1088, envelope.MLKEM1024: 1568}[a]
		if n := len(request.GetAnnotations()["kem.latticekeep.dev"]); n != want || len(request.GetCiphertext()) >= 1<<10 {
			t.Errorf("%s: %d bytes of ciphertext, %d in the annotation", a, len(request.GetCiphertext()), n)
		}
		p.decrypts(t, request, "a seed of kube-apiserver")
	}
}

func TestSeedsAreRefused(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	_, err := Rotate(t.Context(), c, dir, "", "")
	must(t, err)
	p := start(t, dir)
	good := p.encrypt(t, "a seed of kube-apiserver")
	pending := read(t, dir).pending().KeyID
	for name, x := range map[string]struct {
		edit func(*kmsapi.DecryptRequest)
		code codes.Code
	}{
		"nothing":                 {func(r *kmsapi.DecryptRequest) { proto.Reset(r) }, codes.FailedPrecondition},
		"an unknown key id":       {func(r *kmsapi.DecryptRequest) { r.KeyId = "7-ab" }, codes.FailedPrecondition},
		"another generation's id": {func(r *kmsapi.DecryptRequest) { r.KeyId = pending }, codes.InvalidArgument},
		"no annotation":           {func(r *kmsapi.DecryptRequest) { r.Annotations = nil }, codes.InvalidArgument},
		"one annotation more":     {func(r *kmsapi.DecryptRequest) { r.Annotations["a.example.com"] = nil }, codes.InvalidArgument},
		"a changed annotation":    {func(r *kmsapi.DecryptRequest) { r.Annotations[annotation][5] ^= 1 }, codes.InvalidArgument},
		"a shorter annotation":    {func(r *kmsapi.DecryptRequest) { r.Annotations[annotation] = r.Annotations[annotation][1:] }, codes.InvalidArgument},
		"a changed ciphertext":    {func(r *kmsapi.DecryptRequest) { r.Ciphertext[80] ^= 1 }, codes.InvalidArgument},
		"no ciphertext":           {func(r *kmsapi.DecryptRequest) { r.Ciphertext = nil }, codes.InvalidArgument},
		"a message of 100 KiB":    {func(r *kmsapi.DecryptRequest) { r.Ciphertext = make([]byte, 100<<10) }, codes.ResourceExhausted},
	} {
		request := proto.CloneOf(good)
		x.edit(request)
		if _, err := p.Decrypt(t.Context(), request); status.Code(err) != x.code {
			t.Errorf("%s: %v, want %s", name, err, x.code)
		}
	}
	for _, n := range []int{0, envelope.MaxEtcdSeed + 1} {
		if _, err := p.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: make([]byte, n)}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("a seed of %d bytes: %v", n, err)
		}
	}
	p.decrypts(t, good, "a seed of kube-apiserver")
}

func TestThePluginServesWithoutTheKMS(t *testing.T) {
	url := newKMS(t)
	dir := initialized(t, newCustody(t), url)
	p := start(t, dir)
	must(t, os.Remove(strings.TrimPrefix(url, "file://")))
	p.decrypts(t, p.encrypt(t, "a seed"), "a seed")
	p.status(t)
	must(t, p.stop())
	refused(t, "a start without the KMS", Serve(t.Context(), Config{Dir: dir, Socket: p.socket}), "KMS key file does not exist")
}

func TestAPromotedGenerationWrapsAndTheFormerOneOpens(t *testing.T) {
	c, url, second := newCustody(t), newKMS(t), newKMS(t)
	dir := initialized(t, c, url)
	p := start(t, dir)
	before := p.encrypt(t, "first")
	_, err := Rotate(t.Context(), c, dir, second, envelope.MLKEM1024)
	must(t, err)
	p.log.await(t, "revision=2")
	if id := p.status(t); id != before.GetKeyId() {
		t.Errorf("a pending generation wraps: %s", id)
	}
	a, err := Acknowledge(t.Context(), c, dir, time.Now())
	must(t, err)
	_, _, err = Promote(t.Context(), c, dir, []Acknowledgement{a}, false)
	must(t, err)
	p.log.await(t, "revision=3")
	after := p.encrypt(t, "second")
	if after.GetKeyId() != p.status(t) || number(after.GetKeyId()) != "2" || len(after.GetAnnotations()[annotation]) != 1568 {
		t.Errorf("key id %s after the promotion", after.GetKeyId())
	}
	p.decrypts(t, before, "first")
	p.decrypts(t, after, "second")
	if s := read(t, dir); s.Signer.KMS != second {
		t.Error("the signing key is not under the KMS key of the new generation")
	}
	if i, err := parseIdentity(dir); err != nil || i.KMS != second {
		t.Errorf("the identity of the node is under %s (%v)", i.KMS, err)
	}
	must(t, os.Remove(strings.TrimPrefix(url, "file://"))) // the node acknowledges without the first KMS key
	_, err = Acknowledge(t.Context(), new(Custody), dir, time.Now())
	must(t, err)
}

func TestABadKeySetFileIsReportedAndThePreviousOneServesOn(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	p := start(t, dir)
	before := p.encrypt(t, "a seed")
	path := filepath.Join(dir, keySetFile)
	good, err := os.ReadFile(path)
	must(t, err)
	must(t, durable.Write(path, bytes.Replace(good, []byte(`"revision":1`), []byte(`"revision":2`), 1)))
	p.log.await(t, "the key set file is refused")
	if id := p.status(t); id != before.GetKeyId() {
		t.Errorf("key id %s", id)
	}
	p.decrypts(t, before, "a seed")
	must(t, durable.Write(path, good))
	p.log.await(t, "key set loaded")
	if id := p.status(t); id != before.GetKeyId() {
		t.Errorf("key id %s", id)
	}
}

// Status and Encrypt read one pointer: whatever Status said last before a call of Encrypt and first
// after it, Encrypt used one of the two.
func TestStatusAndEncryptSwitchTogether(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	p := start(t, dir)
	_, err := Rotate(t.Context(), c, dir, "", "")
	must(t, err)
	seen := map[string]bool{p.encrypt(t, "a seed").GetKeyId(): true} // before the promotion
	promoted := make(chan error, 1)
	go func() {
		_, _, err := Promote(t.Context(), c, dir, nil, true)
		promoted <- err
	}()
	for len(seen) < 2 {
		before := p.status(t)
		used := p.encrypt(t, "a seed").GetKeyId()
		if after := p.status(t); used != before && used != after {
			t.Fatalf("Encrypt used %s between %s and %s", used, before, after)
		}
		seen[used] = true
	}
	must(t, <-promoted)
}

func TestOnePluginServesFromADirectory(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	p := start(t, dir)
	another := Config{Dir: dir, Socket: p.socket + "2"}
	refused(t, "a second plugin", Serve(t.Context(), another), "another plugin serves from")
	must(t, p.stop())
	another.Dir = t.TempDir()
	refused(t, "an empty directory", Serve(t.Context(), another), "kms-plugin init")
}
