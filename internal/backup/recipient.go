package backup

import (
	"bufio"
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"filippo.io/age"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Recipient is the public key that a backup is encrypted to: ML-KEM-768 with X25519, in the form of
// the age tool (age-keygen -pq).
type Recipient struct{ age *age.HybridRecipient }

// Prefixes of recipients and identities. Bech32 puts a 1 after the type.
const (
	recipientPrefix = "age1pq1"
	identityPrefix  = "AGE-SECRET-KEY-PQ-1"
)

// maxRecipient is above the length of any recipient. A recipient has 1959 characters.
const maxRecipient = 4096

// ageMagic begins every file that age encrypted.
const ageMagic = "age-encryption.org/v1"

const keygenHint = "make one with latticekeep backup keygen, or age-keygen -pq"

// ParseRecipient parses age1pq1…. The error is fault.Invalid; it says what is wrong and quotes
// nothing.
func ParseRecipient(text string) (Recipient, error) {
	switch {
	case strings.HasPrefix(strings.ToUpper(text), "AGE-SECRET-KEY-"):
		return Recipient{}, fault.New(fault.Invalid, "this is an identity, which opens backups: keep it to yourself, and give the recipient that belongs to it, age1pq1…")
	case strings.HasPrefix(text, recipientPrefix):
	case strings.HasPrefix(text, "age1"), strings.HasPrefix(text, "ssh-"), strings.HasPrefix(text, "$2"), strings.HasPrefix(text, "-----BEGIN"):
		return Recipient{}, fault.New(fault.Invalid, "a backup is only encrypted to a post-quantum recipient, age1pq1…, since a quantum computer opens what others protect: "+keygenHint)
	default:
		return Recipient{}, fault.New(fault.Invalid, "the recipient is not one of age, which begins with age1pq1: "+keygenHint)
	}
	r, err := age.ParseHybridRecipient(text)
	if len(text) > maxRecipient || err != nil || r.String() != text {
		return Recipient{}, fault.New(fault.Invalid, "the recipient is damaged or cut off: copy the whole of it, some 2000 characters that begin with age1pq1")
	}
	return Recipient{r}, nil
}

// ReadRecipient reads a file with one recipient. It skips empty lines and lines that begin with #.
func ReadRecipient(r io.Reader) (Recipient, error) {
	lines, err := linesOf(r)
	if err != nil {
		return Recipient{}, fmt.Errorf("reading the recipient: %w", err)
	}
	if len(lines) != 1 {
		return Recipient{}, fault.New(fault.Invalid, fmt.Sprintf("the file has %d recipients, and a backup is encrypted to one: give a file with that one", len(lines)))
	}
	return ParseRecipient(lines[0])
}

// String returns age1pq1….
func (r Recipient) String() string { return r.age.String() }

// ID returns the SHA3-256 of the recipient's text as 64 lower-case hex digits.
func (r Recipient) ID() string {
	sum := sha3.Sum256([]byte(r.String()))
	return hex.EncodeToString(sum[:])
}

// Identity opens files that are encrypted to its recipient. It is secret.
type Identity struct{ age *age.HybridIdentity }

// NewIdentity returns a new random identity.
func NewIdentity() (Identity, error) {
	i, err := age.GenerateHybridIdentity()
	if err != nil {
		return Identity{}, fmt.Errorf("making an identity: %w", err)
	}
	return Identity{i}, nil
}

// Recipient returns the recipient that belongs to the identity.
func (i Identity) Recipient() Recipient { return Recipient{i.age.Recipient()} }

// File returns the content of an identity file, in the form of age-keygen.
func (i Identity) File(created time.Time) []byte {
	return fmt.Appendf(nil, "# created: %s\n# public key: %s\n%s\n", created.Format(time.RFC3339), i.Recipient(), i.age)
}

// ReadIdentities reads an identity file in the form of the age tool. Errors: fault.Invalid for a
// file without identities or with another kind of them, and any error of r.
func ReadIdentities(r io.Reader) ([]Identity, error) {
	lines, err := linesOf(r)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	var all []Identity
	for _, line := range lines {
		switch {
		case strings.HasPrefix(line, identityPrefix):
		case strings.HasPrefix(line, "AGE-SECRET-KEY-"), strings.HasPrefix(line, "AGE-PLUGIN-"):
			return nil, fault.New(fault.Invalid, "the identity is not a post-quantum one, AGE-SECRET-KEY-PQ-1…, and no backup was encrypted to it: name the file that latticekeep backup keygen wrote")
		case strings.HasPrefix(line, recipientPrefix):
			return nil, fault.New(fault.Invalid, "this is a recipient, to which backups are encrypted: name the file with the identity that opens them")
		case strings.HasPrefix(line, ageMagic), strings.HasPrefix(line, "-----BEGIN AGE"):
			return nil, fault.New(fault.Invalid, "the identity is encrypted itself: decrypt it first, with age -d")
		default:
			return nil, fault.New(fault.Invalid, "the file is not one of identities: name the file that latticekeep backup keygen wrote")
		}
		i, err := age.ParseHybridIdentity(line)
		if err != nil {
			return nil, fault.New(fault.Invalid, "the identity is damaged or cut off: take another copy of its file")
		}
		all = append(all, Identity{i})
	}
	if len(all) == 0 {
		return nil, fault.New(fault.Invalid, "the file has no identity: name the file that latticekeep backup keygen wrote")
	}
	return all, nil
}

// maxLines bounds a file of recipients or identities, in bytes.
const maxLines = 1 << 20

func linesOf(r io.Reader) (lines []string, err error) {
	var read bytes.Buffer
	if _, err := io.CopyN(&read, r, maxLines); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	s := bufio.NewScanner(&read)
	for s.Scan() {
		if line := strings.TrimSpace(s.Text()); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if s.Err() != nil {
		return nil, fault.New(fault.Invalid, "the file is not one of age: it has lines that are too long")
	}
	return lines, nil
}
