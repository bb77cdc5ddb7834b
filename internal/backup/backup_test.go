package backup

import (
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func identity(t testing.TB, seed byte) *dualsig.PrivateKey {
	t.Helper()
	k, err := dualsig.NewPrivateKey(bytes.Repeat([]byte{seed}, dualsig.SeedSize))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func header(k *dualsig.PrivateKey) Header {
	return Header{
		Chain: strings.Repeat("0a", 32), Identity: k.Public(),
		CreatedAt: time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC), Program: "v1.2.3",
	}
}

// signing signs like a keyring.
type signing struct {
	inside, file func([]byte) ([]byte, error)
}

func (s signing) SignBackup(message []byte) ([]byte, error)     { return s.inside(message) }
func (s signing) SignBackupFile(message []byte) ([]byte, error) { return s.file(message) }

func in(k *dualsig.PrivateKey, context string) func([]byte) ([]byte, error) {
	return func(message []byte) ([]byte, error) { return k.Sign(context, message) }
}

func signer(k *dualsig.PrivateKey) signing {
	return signing{in(k, SigningContext), in(k, FileContext)}
}

var someKeys = [][]byte{[]byte("the KMS key\n"), []byte("a former one")}

type pair struct{ key, value []byte }

// rows implements Source.
type rows []pair

func (r rows) Copy(_ context.Context, emit func(key, value []byte) error) error {
	for _, p := range r {
		if err := emit(p.key, p.value); err != nil {
			return err
		}
	}
	return nil
}

var some = rows{
	{[]byte("a"), []byte("value")},
	{[]byte("b"), []byte{}},
	{[]byte{0, 0xff}, []byte{0}},
	{[]byte("a"), nil},
	{bytes.Repeat([]byte("k"), store.MaxKeySize), bytes.Repeat([]byte("v"), 300)},
}

func write(t testing.TB, k *dualsig.PrivateKey, r rows) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := writePlain(t.Context(), &b, r, header(k), someKeys, signer(k)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// read returns the content of a backup after verifying all of it.
func read(in io.Reader) (Header, rows, error) {
	r, err := newReader(in)
	if err != nil {
		return Header{}, nil, err
	}
	var got rows
	n, err := r.Rows(func(key, value []byte) error {
		got = append(got, pair{bytes.Clone(key), bytes.Clone(value)})
		return nil
	})
	if err == nil && n != uint64(len(got)) {
		return Header{}, nil, fmt.Errorf("%d rows, and it says %d", len(got), n)
	}
	return r.Header, got, err
}

func equal(a, b rows) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i].key, b[i].key) || !bytes.Equal(a[i].value, b[i].value) || (a[i].value == nil) != (b[i].value == nil) {
			return false
		}
	}
	return true
}

func TestABackupReadsAsItWasWritten(t *testing.T) {
	k := identity(t, 1)
	for name, in := range map[string]rows{"rows": some, "nothing": nil, "the largest value": {{[]byte("a"), make([]byte, MaxValue)}}} {
		b := write(t, k, in)
		for _, source := range []io.Reader{bytes.NewReader(b), iotest.HalfReader(bytes.NewReader(b))} {
			h, got, err := read(source)
			if err != nil || !equal(got, in) {
				t.Fatalf("%s: %d rows, %v", name, len(got), err)
			}
			if want := header(k); h.Chain != want.Chain || h.Identity.ID() != want.Identity.ID() || !h.CreatedAt.Equal(want.CreatedAt) || h.Program != want.Program {
				t.Errorf("%s: header %+v", name, h)
			}
		}
	}
}

// raised is the header of a backup of a store that not every release reads.
func raised(k *dualsig.PrivateKey) Header {
	h := header(k)
	h.Format = []byte(`{"reader":2,"writer":2,"written_by":"v1.2.3"}`)
	return h
}

// A backup begins with the format of its store, and earlier releases do not take it for one of
// theirs.
func TestABackupBeginsWithTheFormatOfItsStore(t *testing.T) {
	k := identity(t, 1)
	var b bytes.Buffer
	if _, err := writePlain(t.Context(), &b, some, raised(k), someKeys, signer(k)); err != nil {
		t.Fatal(err)
	}
	// The documentation says: "latticekeep-backup-3" ‖ newline ‖ u16(length) ‖ format, and then as in version 2.
	if want := "latticekeep-backup-3\n\x00\x2d" + `{"reader":2,"writer":2,"written_by":"v1.2.3"}` + strings.Repeat("\x0a", 32); !strings.HasPrefix(b.String(), want) {
		t.Errorf("it begins with %q", b.String()[:len(want)])
	}
	h, got, err := read(&b)
	if err != nil || !equal(got, some) || !bytes.Equal(h.Format, raised(k).Format) || h.Program != "v1.2.3" {
		t.Errorf("%d rows and the header %+v, %v", len(got), h, err)
	}
	for what, size := range map[string]int{"an empty format": 0, "a format too long": maxFormat + 1} {
		h := header(k)
		h.Format = make([]byte, size)
		if _, err := writePlain(t.Context(), io.Discard, some, h, someKeys, signer(k)); err == nil {
			t.Errorf("%s was written", what)
		}
		start := append(binary.BigEndian.AppendUint16([]byte(raisedMagic), uint16(size)), h.Format...)
		rest, err := header(k).marshal()
		if err != nil {
			t.Fatal(err)
		}
		wantRefused(t, what, finish(t, k, append(append(start, rest[len(magic):]...), 0), 0))
	}
}

func wantRefused(t *testing.T, what string, b []byte) {
	t.Helper()
	if _, _, err := read(bytes.NewReader(b)); fault.Of(err) != fault.Invalid {
		t.Errorf("%s: %v", what, err)
	}
}

// Every change of a backup is detected.
func TestAChangedBackupIsRefused(t *testing.T) {
	k := identity(t, 1)
	whole := write(t, k, some)
	for i := range whole {
		wantRefused(t, fmt.Sprint("cut at ", i), whole[:i])
		changed := bytes.Clone(whole)
		changed[i] ^= 1 << (i % 8)
		wantRefused(t, fmt.Sprint("changed at ", i), changed)
	}
	wantRefused(t, "appended", append(bytes.Clone(whole), 0))
	wantRefused(t, "twice", append(bytes.Clone(whole), whole...))

	other := identity(t, 2)
	start := func(k *dualsig.PrivateKey) []byte { b, _ := header(k).marshal(); return append(b, keysBytes...) }
	body := whole[len(start(k)) : len(whole)-sumSize-dualsig.SignatureSize]
	swapped := write(t, k, rows{some[1], some[0], some[2], some[3], some[4]})
	wantRefused(t, "reordered", append(bytes.Clone(swapped[:len(swapped)-sumSize-dualsig.SignatureSize]), whole[len(whole)-sumSize-dualsig.SignatureSize:]...))
	wantRefused(t, "under another identity", append(append(start(other), body...), whole[len(whole)-sumSize-dualsig.SignatureSize:]...))
	for what, sign := range map[string]func([]byte) ([]byte, error){
		"signed by another identity": in(other, SigningContext),
		"signed for another use":     in(k, FileContext),
	} {
		var b bytes.Buffer
		if _, err := writePlain(t.Context(), &b, some, header(k), someKeys, signing{inside: sign}); err != nil {
			t.Fatal(err)
		}
		wantRefused(t, what, b.Bytes())
	}
	wantRefused(t, "another file", []byte("SQLite format 3\x00 and so on and so forth"))
}

// keysBytes is the encoding of someKeys that follows the header.
var keysBytes = []byte("\x02\x00\x00\x00\x0cthe KMS key\n\x00\x00\x00\x0ca former one")

// finish appends the matching trailer to a body, which includes the header.
func finish(t testing.TB, k *dualsig.PrivateKey, body []byte, rows uint64) []byte {
	t.Helper()
	b := binary.BigEndian.AppendUint64(append(bytes.Clone(body), tagEnd), rows)
	sum := sha3.Sum256(b)
	signature, err := k.Sign(SigningContext, signed(sum[:]))
	if err != nil {
		t.Fatal(err)
	}
	return append(append(b, sum[:]...), signature...)
}

// A valid signature does not make up for a form that no writer produces.
func TestASignedBackupOfAnotherFormIsRefused(t *testing.T) {
	k := identity(t, 1)
	header, err := header(k).marshal()
	if err != nil {
		t.Fatal(err)
	}
	start := append(bytes.Clone(header), 0)
	if _, _, err := read(bytes.NewReader(finish(t, k, append(bytes.Clone(start), "\x01\x00\x01k\x00\x00\x00\x01v"...), 1))); err != nil {
		t.Fatal(err)
	}
	for what, body := range map[string]string{
		"an unknown tag":   "\x03\x00\x01k",
		"an empty key":     "\x01\x00\x00\x00\x00\x00\x01v",
		"a key too long":   "\x02\x04\x01" + strings.Repeat("k", 1025),
		"a value too long": "\x01\x00\x01k\x02\x00\x00\x01",
		"half a row":       "\x01\x00\x01k\x00\x00\x00\x02v",
	} {
		wantRefused(t, what, finish(t, k, append(bytes.Clone(start), body...), 1))
	}
	wantRefused(t, "another number of rows", finish(t, k, start, 1))
	for what, keys := range map[string]string{
		"an empty key file": "\x01\x00\x00\x00\x00", "an empty former one": "\x02\x00\x00\x00\x01k\x00\x00\x00\x00", "a key file too long": "\x01\x00\x00\x10\x01" + strings.Repeat("k", 4097), "too many key files": "\x11" + strings.Repeat("\x00\x00\x00\x01k", 17),
	} {
		wantRefused(t, what, finish(t, k, append(bytes.Clone(header), keys...), 0))
	}
	program := len(header) - len("v1.2.3")
	for what, change := range map[string]func(b []byte){
		"a version that is not printable": func(b []byte) { b[program] = 0x7f },
		"a time after the year 9999":      func(b []byte) { b[program-8] = 0xff },
	} {
		changed := bytes.Clone(start)
		change(changed)
		wantRefused(t, what, finish(t, k, changed, 0))
	}
}

func TestNothingIsSignedThatIsNotWhole(t *testing.T) {
	k := identity(t, 1)
	refuse := func([]byte) ([]byte, error) {
		t.Error("it was signed")
		return nil, errors.New("unexpected")
	}
	broken := errors.New("the disk is full")
	to := recipient(t).Recipient()
	attempt := func(s Source, h Header, keys [][]byte) error {
		var b bytes.Buffer
		err := Write(t.Context(), &b, s, h, keys, to, signing{refuse, refuse})
		if b.Len() > 0 {
			t.Error("something of it has left")
		}
		return err
	}
	for what, err := range map[string]error{
		"a source that fails": attempt(failing{broken}, header(k), nil),
		"a value too long":    attempt(rows{{[]byte("a"), make([]byte, MaxValue+1)}}, header(k), nil),
		"a key too long":      attempt(rows{{make([]byte, store.MaxKeySize+1), nil}}, header(k), nil),
		"no key":              attempt(rows{{nil, nil}}, header(k), nil),
		"no chain":            attempt(some, Header{Identity: k.Public()}, nil),
		"no version":          attempt(some, func() Header { h := header(k); h.Program = "\n"; return h }(), nil),
		"an empty key file":   attempt(some, header(k), [][]byte{nil}),
		"an empty former one": attempt(some, header(k), [][]byte{[]byte("k"), nil}),
		"a long key file":     attempt(some, header(k), [][]byte{make([]byte, maxKeyFile+1)}),
		"many key files":      attempt(some, header(k), make([][]byte, maxKeys+1)),
	} {
		if err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	no := func([]byte) ([]byte, error) { return nil, broken }
	for what, s := range map[string]Signer{"inside": signing{no, refuse}, "the file": signing{in(k, SigningContext), no}} {
		if err := Write(t.Context(), io.Discard, some, header(k), nil, to, s); !errors.Is(err, broken) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := Write(t.Context(), iotest.TruncateWriter(nil, 0), some, header(k), nil, to, signer(k)); err != nil {
		t.Error(err) // a writer that lies is detected only when the backup is read
	}
	if _, _, err := read(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Error(err)
	}
}

type failing struct{ err error }

func (f failing) Copy(context.Context, func(key, value []byte) error) error { return f.err }

// A short file that claims 32 MiB does not take 32 MiB of memory.
func TestMemoryGrowsWithWhatIsThere(t *testing.T) {
	k := identity(t, 1)
	start, err := header(k).marshal()
	if err != nil {
		t.Fatal(err)
	}
	b := append(start, "\x00\x01\x00\x01k\x02\x00\x00\x00v"...)
	perRun := testing.Benchmark(func(b2 *testing.B) {
		for b2.Loop() {
			if _, _, err := read(bytes.NewReader(b)); !errors.Is(err, errCut) {
				b2.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if perRun > 1<<20 {
		t.Errorf("%d bytes", perRun)
	}
}

// The bytes are those of docs/formats.md, and another implementation of ML-DSA verifies them.
func TestABackupFromTheDocumentation(t *testing.T) {
	k := identity(t, 1)
	b := write(t, k, some)
	var want bytes.Buffer
	want.WriteString("latticekeep-backup-2\n")
	want.Write(bytes.Repeat([]byte{0x0a}, 32))
	want.Write(k.Public().Bytes())
	want.Write(binary.BigEndian.AppendUint64(nil, uint64(time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC).Unix())))
	want.WriteString("\x06v1.2.3")
	want.WriteString("\x02\x00\x00\x00\x0cthe KMS key\n\x00\x00\x00\x0ca former one")
	for _, row := range some {
		if row.value == nil {
			want.WriteByte(2)
		} else {
			want.WriteByte(1)
		}
		want.Write([]byte{byte(len(row.key) >> 8), byte(len(row.key))})
		want.Write(row.key)
		if row.value != nil {
			want.Write([]byte{0, 0, byte(len(row.value) >> 8), byte(len(row.value))})
			want.Write(row.value)
		}
	}
	want.Write([]byte{0, 0, 0, 0, 0, 0, 0, 0, 5})
	sum := sha3.Sum256(want.Bytes())
	want.Write(sum[:])
	signature, ok := bytes.CutPrefix(b, want.Bytes())
	if !ok {
		t.Fatal("the bytes are others")
	}
	message := append([]byte("\x00\x00\x00\x15latticekeep/backup/v1\x00\x00\x00\x20"), sum[:]...)
	public, err := mldsa.NewPublicKey(mldsa.MLDSA65(), k.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := mldsa.Verify(public, message, signature, &mldsa.Options{Context: "latticekeep/backup/v1"}); err != nil {
		t.Error(err)
	}
}

// FuzzRead reads its input as it is, and behind a header with a valid signature. An accepted file
// must equal what the writer would produce.
func FuzzRead(f *testing.F) {
	k := identity(f, 1)
	first, err := header(k).marshal()
	if err != nil {
		f.Fatal(err)
	}
	later, err := raised(k).marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte, n uint64) {
		if _, _, err := read(bytes.NewReader(body)); err == nil {
			t.Error("a signature was made up")
		}
		for _, b := range [][]byte{append(bytes.Clone(first), body...), append(bytes.Clone(later), body...), body} {
			file := finish(t, k, b, n)
			r, err := newReader(bytes.NewReader(file))
			if err != nil {
				continue
			}
			var got rows
			if _, err := r.Rows(func(key, value []byte) error {
				got = append(got, pair{bytes.Clone(key), bytes.Clone(value)})
				return nil
			}); err != nil {
				continue
			}
			var again bytes.Buffer
			if _, err := writePlain(t.Context(), &again, got, r.Header, r.KMSKeys, signer(k)); err != nil {
				t.Fatal(err)
			}
			unsigned := len(file) - dualsig.SignatureSize
			if again.Len() != len(file) || !bytes.Equal(again.Bytes()[:unsigned], file[:unsigned]) {
				t.Error("it would be written otherwise")
			}
		}
	})
}
