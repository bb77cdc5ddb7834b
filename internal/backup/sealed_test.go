package backup

import (
	"bytes"
	"crypto/sha3"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"filippo.io/age"
	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
)

func recipient(t testing.TB) Identity {
	t.Helper()
	i, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// sealed returns an encrypted backup and the statement that follows it.
func sealed(t testing.TB, k *dualsig.PrivateKey, r rows, to Recipient) (file, statement []byte) {
	t.Helper()
	var b bytes.Buffer
	if err := Write(t.Context(), &b, r, header(k), someKeys, to, signer(k)); err != nil {
		t.Fatal(err)
	}
	at := b.Len() - StatementSize
	return b.Bytes()[:at:at], b.Bytes()[at:]
}

// unseal returns the content of a backup after verifying all of it.
func unseal(in io.Reader, with ...Identity) (*Reader, rows, error) {
	r, err := Open(in, with)
	if err != nil {
		return nil, nil, err
	}
	var got rows
	_, err = r.Rows(func(key, value []byte) error {
		got = append(got, pair{bytes.Clone(key), bytes.Clone(value)})
		return nil
	})
	return r, got, err
}

func TestOnlyTheRecipientOpensABackup(t *testing.T) {
	k, to, other := identity(t, 1), recipient(t), recipient(t)
	long := rows{{[]byte("visible"), bytes.Repeat([]byte("visible"), 50_000)}}
	for name, in := range map[string]rows{"rows": some, "nothing": nil, "many chunks": long} {
		file, _ := sealed(t, k, in, to.Recipient())
		for _, source := range []io.Reader{bytes.NewReader(file), iotest.OneByteReader(bytes.NewReader(file))} {
			r, got, err := unseal(source, other, to)
			if err != nil || !equal(got, in) || len(r.KMSKeys) != 2 || !bytes.Equal(r.KMSKeys[0], someKeys[0]) || !bytes.Equal(r.KMSKeys[1], someKeys[1]) {
				t.Fatalf("%s: %d rows, %v", name, len(got), err)
			}
		}
		if _, _, err := unseal(bytes.NewReader(file), other); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "another recipient") {
			t.Errorf("%s: %v", name, err)
		}
		for _, word := range []string{"visible", "v1.2.3", "KMS key", "latticekeep", string(k.Public().Bytes()[:16]), strings.Repeat("\x0a", 8)} {
			if bytes.Contains(file, []byte(word)) {
				t.Errorf("%s: %q is in the encrypted file", name, word)
			}
		}
	}
}

// The encrypted file is a plain age file, without any additions.
func TestABackupIsAFileOfAge(t *testing.T) {
	k, to := identity(t, 1), recipient(t)
	file, _ := sealed(t, k, some, to.Recipient())
	i, err := age.ParseHybridIdentity(to.age.String())
	if err != nil {
		t.Fatal(err)
	}
	plain, err := age.Decrypt(bytes.NewReader(file), i)
	if err != nil {
		t.Fatal(err)
	}
	_, got, err := read(plain)
	if err != nil || !equal(got, some) {
		t.Error(got, err)
	}
	all, err := age.ParseIdentities(bytes.NewReader(to.File(time.Now())))
	if err != nil || len(all) != 1 {
		t.Error(all, err)
	}
}

func TestAnEncryptedBackupThatWasChangedIsRefused(t *testing.T) {
	k, to := identity(t, 1), recipient(t)
	file, _ := sealed(t, k, rows{{[]byte("a"), make([]byte, 200_000)}}, to.Recipient())
	refused := func(what string, b []byte) {
		t.Helper()
		if _, _, err := unseal(bytes.NewReader(b), to); fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	for i := 0; i < len(file); i += 997 {
		refused(fmt.Sprint("cut at ", i), file[:i])
		changed := bytes.Clone(file)
		changed[i] ^= 1
		refused(fmt.Sprint("changed at ", i), changed)
	}
	refused("without its last byte", file[:len(file)-1])
	refused("appended", append(bytes.Clone(file), 0))
	refused("twice", append(bytes.Clone(file), file...))
	// Anybody can encrypt to a recipient.
	var other bytes.Buffer
	w, err := age.Encrypt(&other, to.Recipient().age)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, "not a backup"); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	refused("something else that opens", other.Bytes())
	for what, c := range map[string]struct{ content, says string }{
		"a former release's": {"latticekeep-backup-1\n and so on", "earlier release"},
		"another file":       {"SQLite format 3\x00 and so on and so forth", "not a backup"},
		"nothing":            {"", "not a backup"},
	} {
		if _, _, err := unseal(strings.NewReader(c.content), to); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	gone := errors.New("the disk is gone")
	for _, n := range []int{0, 10, 100, 2000, 100_000} {
		_, _, err := unseal(io.MultiReader(bytes.NewReader(file[:n]), iotest.ErrReader(gone)), to)
		if !errors.Is(err, gone) || fault.Of(err) == fault.Invalid {
			t.Errorf("a disk that fails after %d bytes: %v", n, err)
		}
	}
}

// A statement lets the holder of a backup check that its file is whole. It is valid for no other
// file.
func TestAStatementHoldsForItsFileAlone(t *testing.T) {
	k, to := identity(t, 1), recipient(t)
	file, statement := sealed(t, k, some, to.Recipient())
	s, err := ParseStatement(statement)
	if err != nil {
		t.Fatal(err)
	}
	if h := header(k); s.Chain != h.Chain || s.Identity.ID() != k.Public().ID() || !s.CreatedAt.Equal(h.CreatedAt) || s.Rows != 5 || !s.HasKMSKey {
		t.Errorf("%+v", s)
	}
	if err := s.Check(bytes.NewReader(file)); err != nil {
		t.Error(err)
	}
	for i := range file {
		changed := bytes.Clone(file)
		changed[i] ^= 1 << (i % 8)
		if err := s.Check(bytes.NewReader(changed)); !errors.Is(err, errChanged) {
			t.Fatalf("changed at %d: %v", i, err)
		}
	}
	if err := s.Check(bytes.NewReader(file[:len(file)-1])); !errors.Is(err, errCut) {
		t.Error(err)
	}
	if err := s.Check(bytes.NewReader(append(bytes.Clone(file), 0))); !errors.Is(err, errChanged) {
		t.Error(err)
	}
	for i := range statement {
		changed := bytes.Clone(statement)
		changed[i] ^= 1 << (i % 8)
		if _, err := ParseStatement(changed); fault.Of(err) != fault.Invalid {
			t.Fatalf("a statement changed at %d: %v", i, err)
		}
	}
	for _, b := range [][]byte{nil, statement[1:], statement[:len(statement)-1], append(bytes.Clone(statement), 0)} {
		if _, err := ParseStatement(b); fault.Of(err) != fault.Invalid {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
	for _, keys := range [][][]byte{nil, {nil, []byte("a former one")}} {
		var b bytes.Buffer
		if err := Write(t.Context(), &b, some, header(k), keys, to.Recipient(), signer(k)); err != nil {
			t.Fatal(err)
		}
		if s, err := ParseStatement(b.Bytes()[b.Len()-StatementSize:]); err != nil || s.HasKMSKey {
			t.Error("it says that the current key is inside: ", err)
		}
		if r, _, err := unseal(bytes.NewReader(b.Bytes()[:b.Len()-StatementSize]), to); err != nil || len(r.KMSKeys) != len(keys) {
			t.Error(err)
		}
	}
	var foreign bytes.Buffer
	if err := Write(t.Context(), &foreign, some, header(k), nil, to.Recipient(), signing{in(k, SigningContext), in(k, SigningContext)}); err != nil {
		t.Fatal(err)
	}
	if _, err := ParseStatement(foreign.Bytes()[foreign.Len()-StatementSize:]); fault.Of(err) != fault.Invalid {
		t.Error("a signature for another use: ", err)
	}
}

func TestPartsAreToldApartHoweverTheyCome(t *testing.T) {
	k, to := identity(t, 1), recipient(t)
	file, statement := sealed(t, k, rows{{[]byte("a"), make([]byte, 200_000)}}, to.Recipient())
	whole := append(bytes.Clone(file), statement...)
	for name, in := range map[string]io.Reader{
		"at once": bytes.NewReader(whole), "by halves": iotest.HalfReader(bytes.NewReader(whole)),
		"by bytes": iotest.OneByteReader(bytes.NewReader(whole)), "with the end at once": iotest.DataErrReader(bytes.NewReader(whole)),
	} {
		p := Split(in)
		got, err := io.ReadAll(p)
		if err != nil || !bytes.Equal(got, file) || !bytes.Equal(p.Statement(), statement) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	for _, b := range [][]byte{file, file[:100], nil} { // as when only the file is read
		p := Split(bytes.NewReader(b))
		if got, err := io.ReadAll(p); err != nil || !bytes.Equal(got, b) || p.Statement() != nil {
			t.Errorf("%d bytes without a statement: %d, %v", len(b), len(got), err)
		}
	}
	changed := bytes.Clone(whole)
	changed[5000] ^= 1
	cut := append(bytes.Clone(file[:len(file)-1]), statement...)
	lied := bytes.Clone(whole)
	lied[len(lied)-1] ^= 1
	for what, b := range map[string][]byte{"changed": changed, "cut": cut, "a statement that does not hold": lied} {
		if _, err := io.ReadAll(Split(bytes.NewReader(b))); fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := io.ReadAll(Split(io.MultiReader(bytes.NewReader(whole[:100_000]), iotest.ErrReader(io.ErrUnexpectedEOF)))); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error("a connection that breaks: ", err)
	}
}

// The bytes of a statement are those of docs/formats.md, and another implementation of ML-DSA
// verifies them.
func TestAStatementFromTheDocumentation(t *testing.T) {
	k, to := identity(t, 1), recipient(t)
	file, statement := sealed(t, k, some, to.Recipient())
	sum := sha3.Sum256(file)
	var said bytes.Buffer
	said.Write(sum[:])
	said.Write(binary.BigEndian.AppendUint64(nil, uint64(len(file))))
	said.Write(bytes.Repeat([]byte{0x0a}, 32))
	said.Write(k.Public().Bytes())
	said.Write(binary.BigEndian.AppendUint64(nil, uint64(time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC).Unix())))
	said.Write([]byte{0, 0, 0, 0, 0, 0, 0, 5, 1})
	signature, ok := bytes.CutPrefix(statement, append([]byte("latticekeep-backup-signature-1\n"), said.Bytes()...))
	if !ok {
		t.Fatal("the bytes are others")
	}
	message := append([]byte("\x00\x00\x00\x1alatticekeep/backup-file/v1"), binary.BigEndian.AppendUint32(nil, uint32(said.Len()))...)
	message = append(message, said.Bytes()...)
	public, err := mldsa.NewPublicKey(mldsa.MLDSA65(), k.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := mldsa.Verify(public, message, signature, &mldsa.Options{Context: "latticekeep/backup-file/v1"}); err != nil {
		t.Error(err)
	}
}

func TestOnlyPostQuantumRecipientsAreTaken(t *testing.T) {
	i := recipient(t)
	good := i.Recipient().String()
	if r, err := ParseRecipient(good); err != nil || r.String() != good || len(r.ID()) != 64 || r.ID() != i.Recipient().ID() {
		t.Fatal(err)
	}
	classical, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	for text, says := range map[string]string{
		classical.Recipient().String():     "quantum computer",
		"age1yubikey1q2w3e4r":              "quantum computer",
		"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5": "quantum computer",
		"ssh-rsa AAAAB3NzaC1yc2E":          "quantum computer",
		i.age.String():                     "keep it to yourself",
		classical.String():                 "keep it to yourself",
		strings.ToUpper(good):              "begins with age1pq1",
		"":                                 "begins with age1pq1",
		"a passphrase":                     "begins with age1pq1",
		good[:len(good)-1]:                 "damaged",
		good + "q":                         "damaged",
		good + "\n":                        "damaged",
		"age1pq1":                          "damaged",
		strings.Replace(good, "1pq1", "1pq1q", 1): "damaged",
	} {
		_, err := ParseRecipient(text)
		if fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), says) {
			t.Errorf("%.30q: %v, want %q", text, err, says)
		}
		if len(text) > 20 && strings.Contains(err.Error(), text[8:20]) {
			t.Errorf("%.30q: the message repeats it", text)
		}
	}
	for content, ok := range map[string]bool{
		good: true, "# mine\n\n" + good + "\n": true, " " + good + "\r\n": true,
		"": false, good + "\n" + good: false, "# nothing\n": false, strings.Repeat("x", 70_000): false,
	} {
		r, err := ReadRecipient(strings.NewReader(content))
		if ok != (err == nil) || ok && r.String() != good {
			t.Errorf("%.30q: %v", content, err)
		}
	}
	if _, err := ReadRecipient(iotest.ErrReader(io.ErrClosedPipe)); !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}

func TestFilesOfIdentitiesAreRead(t *testing.T) {
	i, other := recipient(t), recipient(t)
	classical, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	file := string(i.File(time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC)))
	if !strings.HasPrefix(file, "# created: 2026-11-21T10:30:00Z\n# public key: age1pq1") || !strings.HasSuffix(file, "\n") {
		t.Errorf("%.200s", file)
	}
	all, err := ReadIdentities(strings.NewReader(file + other.age.String()))
	if err != nil || len(all) != 2 || all[0].Recipient().ID() != i.Recipient().ID() || all[1].Recipient().ID() != other.Recipient().ID() {
		t.Fatal(all, err)
	}
	for content, says := range map[string]string{
		"":                                       "no identity",
		"# nothing\n":                            "no identity",
		classical.String():                       "not a post-quantum one",
		"AGE-PLUGIN-YUBIKEY-1Q2W3E":              "not a post-quantum one",
		i.Recipient().String():                   "this is a recipient",
		"age-encryption.org/v1\n-> scrypt":       "decrypt it first",
		"-----BEGIN AGE ENCRYPTED FILE-----\nYQ": "decrypt it first",
		"hunter2":                                "not one of identities",
		i.age.String()[:50]:                      "damaged",
	} {
		if _, err := ReadIdentities(strings.NewReader(content)); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), says) {
			t.Errorf("%.30q: %v, want %q", content, err, says)
		}
	}
}

// FuzzStatement reads its input. A statement that verifies must be one that was signed, and Split
// must lose no bytes.
func FuzzStatement(f *testing.F) {
	k := identity(f, 1)
	_, statement := sealed(f, k, some, recipient(f).Recipient())
	f.Add(statement)
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := ParseStatement(b); err == nil {
			said, err := s.said()
			if err != nil || s.Identity.ID() != k.Public().ID() || !bytes.Equal(b[len(statementMagic):][:saidSize], said) {
				t.Error("a signature was made up: ", err)
			}
		}
		p := Split(bytes.NewReader(b))
		got, err := io.ReadAll(p)
		if err == nil && len(got)+len(p.Statement()) != len(b) {
			t.Errorf("%d and %d bytes of %d", len(got), len(p.Statement()), len(b))
		}
	})
}
