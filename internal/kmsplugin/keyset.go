package kmsplugin

import (
	"bytes"
	"crypto/sha3"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/kms"
)

const (
	formatVersion = 1

	labelKeySet = "latticekeep/key-set/v1" // label of the signed frame, and context of its signature
	labelKeyID  = "latticekeep/etcd-key-id/v1"

	maxFile = 1 << 20 // bytes of any file of this package
)

// KeySet is the content of the key set file. Only [ParseKeySet] and the commands that change a key
// set make one, so it is consistent and was signed.
type KeySet struct {
	Version     int          `json:"version"`
	ID          string       `json:"id"`       // fingerprint of the signer's public key
	Revision    uint64       `json:"revision"` // rises by one with each change
	Signer      Signer       `json:"signer"`
	Nodes       []Node       `json:"nodes"`
	Generations []Generation `json:"generations"` // sorted by their numbers
}

// Signer is the ML-DSA-65 key that signs a key set.
type Signer struct {
	PublicKey []byte `json:"public_key"`
	KMS       string `json:"kms"`          // URL of the KMS key
	Wrapped   []byte `json:"wrapped_seed"` // wrapped by that KMS key
}

// Node is a control-plane node that runs the plugin, and the ML-DSA-65 key of its acknowledgements.
type Node struct {
	Name      string `json:"name"`
	PublicKey []byte `json:"public_key"`
}

// State says what a generation is for.
type State string

const (
	Pending  State = "pending"  // opens; becomes current when every node has it
	Current  State = "current"  // wraps and opens
	Previous State = "previous" // opens what was wrapped earlier
)

// Generation is one ML-KEM key pair with its secret.
type Generation struct {
	Number    uint64       `json:"number"`
	State     State        `json:"state"`
	KeyID     string       `json:"key_id"` // in kube-apiserver and in etcd
	Algorithm envelope.KEM `json:"algorithm"`
	PublicKey []byte       `json:"public_key"`
	KMS       string       `json:"kms"`             // URL of the KMS key
	Wrapped   []byte       `json:"wrapped_secrets"` // ML-KEM seed ‖ secret, by that key

	// FirstKMS is the id of the KMS key in the key id, if the generation was restored from a backup.
	FirstKMS string `json:"first_kms,omitempty"`
}

// signedKeySet is the form of the file. The signature covers the bytes of the key set as they are in
// the file.
type signedKeySet struct {
	KeySet    json.RawMessage `json:"key_set"`
	Signature []byte          `json:"signature"`
}

// ParseKeySet decodes a key set file, verifies its signature and checks that it is consistent. Whose
// key set it is, only the record of a node can say.
func ParseKeySet(b []byte) (*KeySet, error) {
	var file signedKeySet
	s := new(KeySet)
	if err := canonical.Decode(b, &file); err != nil {
		return nil, fmt.Errorf("decoding key set: %w", err)
	}
	if err := canonical.Decode(append(bytes.Clone(file.KeySet), '\n'), s); err != nil {
		return nil, fmt.Errorf("decoding key set: %w", err)
	}
	signer, err := dualsig.ParsePublicKey(s.Signer.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("parsing the key set's signer: %w", err)
	}
	if !signer.Verify(labelKeySet, frame.Join(labelKeySet, file.KeySet), file.Signature) {
		return nil, errors.New("the signature of the key set does not hold: copy the file again from the node where it was made")
	}
	if err := s.check(signer.ID()); err != nil {
		return nil, fmt.Errorf("the key set is not consistent: %w", err)
	}
	return s, nil
}

// sign returns the file of s.
func (s *KeySet) sign(key *dualsig.PrivateKey) ([]byte, error) {
	if err := s.check(key.Public().ID()); err != nil {
		return nil, fmt.Errorf("signing key set: %w", err)
	}
	b, err := canonical.Encode(s)
	if err != nil {
		return nil, fmt.Errorf("signing key set: %w", err)
	}
	b = bytes.TrimSuffix(b, []byte("\n"))
	signature, err := key.Sign(labelKeySet, frame.Join(labelKeySet, b))
	if err != nil {
		return nil, fmt.Errorf("signing key set: %w", err)
	}
	return canonical.Encode(signedKeySet{b, signature})
}

// nodeName is a DNS subdomain (RFC 1123), as names of Kubernetes nodes are.
var nodeName = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

func (s *KeySet) check(signer string) error {
	if err := checkVersion(s.Version); err != nil {
		return err
	}
	switch {
	case s.ID != signer:
		return errors.New("its id is not that of its signer")
	case s.Revision == 0:
		return errors.New("it has no revision")
	case len(s.Nodes) == 0:
		return errors.New("it names no node")
	}
	names := map[string]bool{}
	for _, n := range s.Nodes {
		if err := n.check(); err != nil {
			return err
		}
		if names[n.Name] {
			return fmt.Errorf("it names node %s twice", n.Name)
		}
		names[n.Name] = true
	}
	return s.checkGenerations()
}

func checkVersion(v int) error {
	if v != formatVersion {
		return fmt.Errorf("it has version %d, and this program reads version %d", v, formatVersion)
	}
	return nil
}

func checkName(node string) error {
	if !nodeName.MatchString(node) {
		return fmt.Errorf("%.260q is no name of a node: use lower-case letters, digits, dots and hyphens", node)
	}
	return nil
}

func (n Node) check() error {
	if err := checkName(n.Name); err != nil {
		return err
	}
	_, err := dualsig.ParsePublicKey(n.PublicKey)
	return err
}

// checkGenerations checks that there are previous ones, then the current one, then at most one pending
// one, and that each has its key id.
func (s *KeySet) checkGenerations() error {
	current, pending := 0, 0
	for i, g := range s.Generations {
		if g.Number == 0 || i > 0 && g.Number <= s.Generations[i-1].Number {
			return errors.New("its generations are not in order")
		}
		if id, err := g.keyID(); err != nil || id != g.KeyID {
			return fmt.Errorf("generation %d does not have the key id of its keys", g.Number)
		}
		switch {
		case g.State == Previous && current == 0:
		case g.State == Current && current == 0:
			current++
		case g.State == Pending && current == 1 && pending == 0:
			pending++
		default:
			return fmt.Errorf("generation %d cannot be %.20q there", g.Number, string(g.State))
		}
	}
	if current == 0 {
		return errors.New("it has no current generation")
	}
	return nil
}

// keyID returns number ‖ "-" ‖ hash of the public key and the KMS key. Numbers are never used twice.
func (g Generation) keyID() (string, error) {
	custodian, ok := g.FirstKMS, g.FirstKMS != ""
	if !ok {
		custodian, ok = kms.KeyOf(g.Wrapped)
	}
	if !ok {
		return "", kms.ErrForm
	}
	sum := sha3.Sum256(frame.Join(labelKeyID, []byte(g.Algorithm), g.PublicKey, []byte(custodian)))
	return fmt.Sprintf("%d-%x", g.Number, sum), nil
}

// current returns the generation that wraps.
func (s *KeySet) current() *Generation { return s.generation(Current) }

// pending returns the generation that waits to be promoted, or nil.
func (s *KeySet) pending() *Generation { return s.generation(Pending) }

func (s *KeySet) generation(state State) *Generation {
	for i := range s.Generations {
		if s.Generations[i].State == state {
			return &s.Generations[i]
		}
	}
	return nil
}

// node returns the node of that name, or nil.
func (s *KeySet) node(name string) *Node {
	for i := range s.Nodes {
		if s.Nodes[i].Name == name {
			return &s.Nodes[i]
		}
	}
	return nil
}
