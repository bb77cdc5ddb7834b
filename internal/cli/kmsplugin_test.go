package cli

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
	"github.com/latticekeep/latticekeep/internal/kmsplugin/etcd"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// encryptionConfiguration has no provider identity, so no plain Secret is read either.
const encryptionConfiguration = `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - kms: {apiVersion: v2, name: latticekeep, endpoint: unix://%s, timeout: 10s}
`

// apiServer is an API server whose Secrets a plugin encrypts.
type apiServer struct {
	*cluster
	program, dir, socket string
	plugin               *kubetest.Process
}

// The steps share one API server, which takes seconds to start.
func TestTheKMSPluginServesARealAPIServer(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a Kubernetes control plane")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("", "latticekeep-kms-") // short, for the path of the socket
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	kek := filepath.Join(dir, "kms.key")
	must(t, kms.CreateLocal(kek))
	s := &apiServer{program: programFor(t), dir: filepath.Join(dir, "cp-1"), socket: filepath.Join(dir, "kms.sock")}
	mustRun(t, "kms-plugin", "init", "--dir", s.dir, "--node", "cp-1", "--kms", "file://"+kek)
	config := filepath.Join(dir, "encryption.yaml")
	machine.WriteFile(t, config, fmt.Appendf(nil, encryptionConfiguration, s.socket))
	s.startPlugin(t)
	s.cluster = &cluster{t, kubetest.ForTest(t, "--encryption-provider-config", config)}

	first := s.currentKeyID(t)
	s.kubectl("", "create", "secret", "generic", "old", "--from-literal=password=correct horse")
	old := s.stored(t, "old")
	if bytes.Contains(old.raw, []byte("correct horse")) || bytes.Contains(old.raw, []byte("Y29ycmVjdCBob3JzZQ")) || bytes.Contains(old.raw, []byte("password")) {
		t.Error("etcd has the plaintext of a Secret")
	}
	if old.keyID != first || len(old.kem) != 1088 {
		t.Errorf("etcd has key id %s and %d bytes of KEM ciphertext", old.keyID, len(old.kem))
	}

	// A killed plugin leaves its socket. The API server starts before the next plugin and waits for it.
	must(t, s.plugin.Stop(0))
	if _, err := os.Lstat(s.socket); err != nil {
		t.Errorf("the killed plugin left no socket: %v", err)
	}
	must(t, s.plane.RestartAPIServer())
	awaitOutput(t, "[-]kms-provider", func() string {
		out, _ := s.try("", "get", "--raw", "/readyz?verbose")
		return out
	})
	s.startPlugin(t)
	s.awaitReady(t)
	s.reads(t, "old", "correct horse")

	// The API server restarts while the KMS is away.
	must(t, os.Rename(kek, kek+".away"))
	must(t, s.plane.RestartAPIServer())
	s.awaitReady(t)
	s.reads(t, "old", "correct horse")
	s.kubectl("", "create", "secret", "generic", "meanwhile", "--from-literal=password=battery")
	must(t, os.Rename(kek+".away", kek))

	s.refusesWhatIsPlanted(t, kek)

	// After a rotation new Secrets have the new key id, and what is there stays readable.
	mustRun(t, "kms-plugin", "rotate", "--dir", s.dir, "--algorithm", "ML-KEM-1024")
	mustRun(t, "kms-plugin", "promote", "--dir", s.dir, s.acknowledged(t))
	second := s.currentKeyID(t)
	if second == first || !strings.HasPrefix(second, "2-") {
		t.Fatalf("key id %s after %s", second, first)
	}
	awaitOutput(t, second, func() string {
		_, _ = s.try("", "get", "--raw", "/healthz") // asks the plugin which key is current
		s.kubectl("", "create", "secret", "generic", "new", "--from-literal=password=staple")
		defer s.kubectl("", "delete", "secret", "new")
		return s.stored(t, "new").keyID
	})
	s.kubectl("", "create", "secret", "generic", "new", "--from-literal=password=staple")
	if o := s.stored(t, "new"); o.keyID != second || len(o.kem) != 1568 {
		t.Errorf("etcd has key id %s and %d bytes of KEM ciphertext after the rotation", o.keyID, len(o.kem))
	}
	must(t, s.plane.RestartAPIServer()) // it forgets the seeds that it has
	s.awaitReady(t)
	s.reads(t, "old", "correct horse")
	s.reads(t, "new", "staple")
	if o := s.stored(t, "old"); o.keyID != first {
		t.Errorf("the Secret of before the rotation has key id %s", o.keyID)
	}
	s.retiresTheFirstGeneration(t)
	if err := s.plugin.Stop(30 * time.Second); err != nil {
		t.Errorf("the end of the plugin: %v", err)
	}
	if _, err := os.Lstat(s.socket); err == nil {
		t.Error("the plugin left its socket")
	}
	s.logVerifies(t)
	s.shipsItsLog(t)
	s.losesItsKeySet(t, kek)
}

// logVerifies checks the log of a node whose plugin was killed once, started again once, and ended.
func (s *apiServer) logVerifies(t *testing.T) {
	t.Helper()
	var log struct {
		From    int            `json:"from"`
		To      int            `json:"to"`
		Kinds   map[string]int `json:"kinds"`
		Dropped int            `json:"dropped"`
	}
	must(t, json.Unmarshal([]byte(mustRun(t, "kms-plugin", "verify-log", "--dir", s.dir, "--output", "json")), &log))
	k := log.Kinds
	if log.From != 1 || k["started"] != 2 || k["wrapped"] == 0 || k["opened"] == 0 || log.Dropped != 0 || k["started"]+k["wrapped"]+k["opened"] != log.To {
		t.Errorf("the log of the node has %+v", log)
	}
	t.Logf("the log of the node has %+v", log)
}

// BenchmarkSecretsInEtcd measures what a Secret of 1 KiB takes in etcd, and a request that writes or
// reads it, with the plugin and with a key in the API server's configuration, in turns.
func BenchmarkSecretsInEtcd(b *testing.B) {
	dir, err := os.MkdirTemp("", "latticekeep-kms-") // short, for the path of the socket
	must(b, err)
	b.Cleanup(func() { must(b, os.RemoveAll(dir)) })
	p := servePlugin(b, dir)

	providers := []string{
		`aescbc: {keys: [{name: k, secret: ` + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32)) + `}]}`,
		`kms: {apiVersion: v2, name: latticekeep, endpoint: "unix://` + p.socket + `", timeout: 10s}`,
	}
	type server struct {
		plane  *kubetest.ControlPlane
		client *http.Client
		url    string
		size   int
		write  time.Duration
		read   time.Duration
	}
	var servers []*server
	for i, provider := range providers {
		config := filepath.Join(dir, fmt.Sprintf("encryption-%d.yaml", i))
		must(b, os.WriteFile(config, []byte("apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets]\n  providers:\n  - "+provider+"\n"), 0o600))
		plane := kubetest.ForTest(b, "--encryption-provider-config", config)
		access, err := clientcmd.BuildConfigFromFlags("", plane.Kubeconfig)
		must(b, err)
		client, err := rest.HTTPClientFor(access)
		must(b, err)
		servers = append(servers, &server{plane: plane, client: client, url: access.Host + "/api/v1/namespaces/default/secrets"})
	}
	ask := func(s *server, method, url, body string, status int) time.Duration {
		start := time.Now()
		r, err := http.NewRequestWithContext(b.Context(), method, url, strings.NewReader(body))
		must(b, err)
		r.Header.Set("Content-Type", "application/json")
		answer, err := s.client.Do(r)
		must(b, err)
		_, err = io.Copy(io.Discard, answer.Body)
		must(b, errors.Join(err, answer.Body.Close()))
		if answer.StatusCode != status {
			b.Fatal(answer.Status)
		}
		return time.Since(start)
	}
	value := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{9}, 1<<10))
	n := 0
	b.ResetTimer()
	for b.Loop() {
		n++
		for _, s := range servers {
			name := fmt.Sprintf("s%06d", n)
			s.write += ask(s, http.MethodPost, s.url, fmt.Sprintf(`{"metadata":{"name":%q},"data":{"v":%q}}`, name, value), http.StatusCreated)
			s.read += ask(s, http.MethodGet, s.url+"/"+name, "", http.StatusOK)
			if s.size == 0 {
				raw, err := s.plane.GetFromEtcd(b.Context(), key(name))
				must(b, err)
				s.size = len(raw)
			}
		}
	}
	b.ReportMetric(float64(servers[0].size), "aescbc-bytes")
	b.ReportMetric(float64(servers[1].size), "kms-bytes")
	b.ReportMetric(float64(servers[1].write)/float64(servers[0].write), "kms/aescbc-write")
	b.ReportMetric(float64(servers[1].read)/float64(servers[0].read), "kms/aescbc-read")
}

// refusesWhatIsPlanted writes into etcd without the API server. What the attacker makes opens with the
// key of the generation, so only the secret is what the attacker lacks.
func (s *apiServer) refusesWhatIsPlanted(t *testing.T, kek string) {
	t.Helper()
	changed := s.stored(t, "old")
	at := bytes.Index(changed.raw, changed.kem)
	changed.raw[at+7] ^= 1
	must(t, s.plane.PutIntoEtcd(t.Context(), key("changed"), changed.raw))
	s.refusesToRead(t, "changed")

	seed, secret := s.secretsOfGeneration(t, kek)
	id := s.currentKeyID(t)
	for name, guess := range map[string][]byte{"known": secret, "zeros": make([]byte, len(secret)), "guessed": bytes.Repeat([]byte{0xa5}, len(secret))} {
		// With the public key alone: the seed of the key pair is not used to wrap.
		k, err := envelope.NewEtcdKey(envelope.MLKEM768, seed, guess)
		must(t, err)
		must(t, s.plane.PutIntoEtcd(t.Context(), key(name), planted(t, k, id, name)))
		if name == "known" {
			s.reads(t, name, "planted")
			s.kubectl("", "delete", "secret", name)
			continue
		}
		s.refusesToRead(t, name)
	}
}

// acknowledged returns a file with the node's acknowledgement of the key set, once the plugin has loaded it.
func (s *apiServer) acknowledged(t *testing.T) string {
	t.Helper()
	file := s.dir + ".ack"
	awaitOutput(t, "key_set", func() string {
		out, err := run(t, "kms-plugin", "acknowledge", "--dir", s.dir)
		if err != nil {
			return err.Error() // the plugin has not looked at the file yet
		}
		machine.WriteFile(t, file, []byte(out))
		return out
	})
	return file
}

// retiresTheFirstGeneration has etcd read as on a node of kubeadm: with TLS and a client certificate.
func (s *apiServer) retiresTheFirstGeneration(t *testing.T) {
	t.Helper()
	certificate, key, roots := machine.WriteCertificate(t, t.TempDir(), 1)
	pair, err := tls.LoadX509KeyPair(certificate, key)
	must(t, err)
	url, err := s.plane.ServeEtcd(t.Context(), &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert,
		VerifyConnection: func(c tls.ConnectionState) error {
			_, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots})
			return err
		},
	})
	must(t, err)
	acknowledgement := s.acknowledged(t)
	admission := []string{"--etcd-ca", certificate, "--etcd-cert", certificate, "--etcd-key", key}
	retire := func(flags ...string) string {
		out, err := run(t, append([]string{"kms-plugin", "retire", "--dir", s.dir, "--generation", "1", acknowledgement, "--etcd", url}, flags...)...)
		return fmt.Sprint(out, err)
	}
	wantOutput(t, retire(admission...), "may still write under a previous generation: try again after")
	given, err := kmsplugin.ParseAcknowledgement([]byte(readText(t, acknowledgement)))
	must(t, err)
	later := func() (*kmsplugin.KeySet, string, error) { // five minutes
		return kmsplugin.Retire(t.Context(), new(kmsplugin.Custody), s.dir, kmsplugin.Retirement{
			Number: 1, Acknowledgements: []kmsplugin.Acknowledgement{given}, Now: time.Now().Add(6 * time.Minute),
			KeyIDsInEtcd: func() (map[string]etcd.Use, error) {
				return etcd.KeyIDs(t.Context(), etcd.Config{CA: certificate, Certificate: certificate, Key: key}, []string{url})
			},
		})
	}
	_, _, err = later()
	wantOutput(t, fmt.Sprint(err), "2 objects in etcd still name generation 1, such as /registry/secrets/default/")
	_, err = etcd.KeyIDs(t.Context(), etcd.Config{CA: certificate}, []string{url})
	wantOutput(t, fmt.Sprint(err), "reading etcd at "+url)

	s.kubectl(s.kubectl("", "get", "secrets", "--all-namespaces", "-o", "json"), "replace", "-f", "-")
	set, kept, err := later()
	must(t, err)
	if len(set.Generations) != 1 || kept != filepath.Join(s.dir, fmt.Sprintf("keyset-%d.json", set.Revision-1)) {
		t.Errorf("%d generations, and %s is kept", len(set.Generations), kept)
	}
	s.acknowledged(t) // the plugin has loaded it
	must(t, s.plane.RestartAPIServer())
	s.awaitReady(t)
	s.reads(t, "old", "correct horse")
	s.reads(t, "meanwhile", "battery")
}

func wantOutput(t *testing.T, out, words string) {
	t.Helper()
	if !strings.Contains(out, words) {
		t.Errorf("%q, want %q", out, words)
	}
}

func (s *apiServer) refusesToRead(t *testing.T, name string) {
	t.Helper()
	if out, err := s.try("", "get", "secret", name, "-o", "yaml"); err == nil || !strings.Contains(out, "a seed was refused") {
		t.Errorf("%s: %v: %s", name, err, out)
	}
	must(t, s.plane.DeleteFromEtcd(t.Context(), key(name)))
}

func (s *apiServer) startPlugin(t *testing.T) {
	t.Helper()
	cmd := exec.Command(s.program, "kms-plugin", "serve", "--dir", s.dir, "--socket", s.socket)
	log, err := os.OpenFile(s.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(t, err)
	defer log.Close() // the child has its own descriptor
	cmd.Stderr = log
	p, err := kubetest.StartProcess(cmd)
	must(t, err)
	s.plugin = p
	t.Cleanup(func() {
		_ = p.Stop(0) // it may have ended already
		if t.Failed() {
			t.Logf("%s", readText(t, s.dir+".log"))
		}
	})
}

func (s *apiServer) awaitReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	must(t, s.plane.AwaitReady(ctx))
}

func (s *apiServer) reads(t *testing.T, name, password string) {
	t.Helper()
	got := s.kubectl("", "get", "secret", name, "-o", "jsonpath={.data.password}")
	if want := base64.StdEncoding.EncodeToString([]byte(password)); got != want {
		t.Errorf("Secret %s has %s, want %s", name, got, want)
	}
}

type generation struct {
	State   string `json:"state"`
	KeyID   string `json:"key_id"`
	Number  int    `json:"number"`
	Wrapped []byte `json:"wrapped_secrets"`
}

func (s *apiServer) current(t *testing.T) (keySet string, current generation) {
	t.Helper()
	var set struct {
		ID          string       `json:"id"`
		Generations []generation `json:"generations"`
	}
	must(t, json.Unmarshal([]byte(mustRun(t, "kms-plugin", "show", "--dir", s.dir, "--output", "json")), &set))
	for _, g := range set.Generations {
		if g.State == "current" {
			return set.ID, g
		}
	}
	t.Fatal("there is no current generation")
	return "", generation{}
}

func (s *apiServer) currentKeyID(t *testing.T) string {
	t.Helper()
	_, g := s.current(t)
	return g.KeyID
}

// secretsOfGeneration unwraps the KEM seed and the secret of the current generation.
func (s *apiServer) secretsOfGeneration(t *testing.T, kek string) (seed, secret []byte) {
	t.Helper()
	set, g := s.current(t)
	k, err := kms.OpenLocal(kek)
	must(t, err)
	b, err := k.Unwrap(t.Context(), fmt.Sprintf("latticekeep/key-set/%s/generation/%d", set, g.Number), g.Wrapped)
	must(t, err)
	return b[:64], b[64:]
}

func key(secret string) string { return "/registry/secrets/default/" + secret }

// prefix is what kube-apiserver writes before what the provider latticekeep encrypted.
const prefix = "k8s:enc:kms:v2:latticekeep:"

// storedSecret is what etcd has of a Secret.
type storedSecret struct {
	raw   []byte
	keyID string
	kem   []byte
}

// stored reads a Secret from etcd: kube-apiserver's EncryptedObject after the prefix.
func (s *apiServer) stored(t *testing.T, name string) storedSecret {
	t.Helper()
	raw, err := s.plane.GetFromEtcd(t.Context(), key(name))
	must(t, err)
	message, ok := bytes.CutPrefix(raw, []byte(prefix))
	if !ok {
		t.Fatalf("etcd has %.40q", raw)
	}
	fields := bytesFields(t, message)
	annotation := bytesFields(t, fields[4])
	if string(annotation[1]) != "kem.latticekeep.dev" {
		t.Fatalf("the annotation is %q", annotation[1])
	}
	return storedSecret{raw, string(fields[2]), annotation[2]}
}

// bytesFields returns the fields of a message that have bytes, by their numbers.
func bytesFields(t *testing.T, message []byte) map[protowire.Number][]byte {
	t.Helper()
	fields := map[protowire.Number][]byte{}
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		must(t, protowire.ParseError(n))
		message = message[n:]
		size := protowire.ConsumeFieldValue(number, kind, message)
		must(t, protowire.ParseError(size))
		if kind == protowire.BytesType {
			fields[number], _ = protowire.ConsumeBytes(message)
		}
		message = message[size:]
	}
	return fields
}

// planted returns what kube-apiserver would store for a Secret, had it chosen the seed.
func planted(t *testing.T, k *envelope.EtcdKey, keyID, name string) []byte {
	t.Helper()
	seed, info, nonce := make([]byte, 32), make([]byte, 32), make([]byte, 12)
	rand.Read(seed)
	rand.Read(info)
	derived, err := hkdf.Expand(sha256.New, seed, string(info), 32)
	must(t, err)
	block, err := aes.NewCipher(derived)
	must(t, err)
	aead, err := cipher.NewGCM(block)
	must(t, err)
	object := fmt.Sprintf(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":%q,"namespace":"default","uid":"1"},"data":{"password":%q}}`,
		name, base64.StdEncoding.EncodeToString([]byte("planted")))
	data := append(append(info, nonce...), aead.Seal(nil, nonce, []byte(object), []byte(key(name)))...)
	ciphertext, kem, err := k.Wrap(keyID, seed)
	must(t, err)
	var annotation, message []byte
	for i, field := range [][]byte{[]byte("kem.latticekeep.dev"), kem} {
		annotation = protowire.AppendBytes(protowire.AppendTag(annotation, protowire.Number(i+1), protowire.BytesType), field)
	}
	for i, field := range [][]byte{data, []byte(keyID), ciphertext, annotation} {
		message = protowire.AppendBytes(protowire.AppendTag(message, protowire.Number(i+1), protowire.BytesType), field)
	}
	const seedOfHKDF = 1 // HKDF_SHA256_XNONCE_AES_GCM_SEED
	message = protowire.AppendVarint(protowire.AppendTag(message, 5, protowire.VarintType), seedOfHKDF)
	return append([]byte(prefix), message...)
}
