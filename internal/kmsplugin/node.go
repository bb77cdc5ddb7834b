package kmsplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/frame"
)

const labelAcknowledgement = "latticekeep/key-set-acknowledgement/v1" // as labelKeySet

// Names of the files in a directory of the plugin.
const (
	keySetFile = "keyset.json"
	nodeFile   = "node.json"
	recordFile = "newest.json"
)

// identity is the content of node.json: a node and its wrapped signing key.
type identity struct {
	Version int    `json:"version"`
	Node    Node   `json:"node"`
	KMS     string `json:"kms"` // URL of the KMS key
	Wrapped []byte `json:"wrapped_seed"`
}

// NodeFile is the public part of a node's identity, for the node where the key set is changed.
type NodeFile struct {
	Version int  `json:"version"`
	Node    Node `json:"node"`
}

// ParseNode decodes what [NewNode] returned, in the encoding of [Encode].
func ParseNode(b []byte) (NodeFile, error) {
	var f NodeFile
	err := canonical.Decode(b, &f)
	if err == nil {
		err = checkVersion(f.Version)
	}
	if err == nil {
		err = f.Node.check()
	}
	if err != nil {
		return NodeFile{}, fmt.Errorf("decoding a node's identity: %w", err)
	}
	return f, nil
}

// Acknowledgement is a node's signed statement that its plugin has loaded a key set file.
type Acknowledgement struct {
	Version   int       `json:"version"`
	KeySet    string    `json:"key_set"` // id
	Revision  uint64    `json:"revision"`
	Digest    string    `json:"digest"` // SHA3-256 of the file, in hexadecimal digits
	Node      string    `json:"node"`
	At        time.Time `json:"at"` // UTC, in whole seconds
	Signature []byte    `json:"signature"`
}

func (a Acknowledgement) signed() []byte {
	return frame.Join(labelAcknowledgement, []byte(a.KeySet), []byte(strconv.FormatUint(a.Revision, 10)), []byte(a.Digest),
		[]byte(a.Node), []byte(a.At.Format(time.RFC3339)))
}

// ParseAcknowledgement decodes what [Acknowledge] returned, in the encoding of [Encode].
func ParseAcknowledgement(b []byte) (Acknowledgement, error) {
	var a Acknowledgement
	err := canonical.Decode(b, &a)
	if err == nil {
		err = checkVersion(a.Version)
	}
	if err != nil {
		return Acknowledgement{}, fmt.Errorf("decoding an acknowledgement: %w", err)
	}
	return a, nil
}

// Encode returns the file of a [NodeFile] or an [Acknowledgement].
func Encode[T NodeFile | Acknowledgement](v T) ([]byte, error) { return canonical.Encode(v) }

// NewNode makes the identity of a node in dir, which it creates, under the KMS key of that URL. If the
// node has one of that name already, NewNode returns its public part.
func NewNode(ctx context.Context, c *Custody, dir, name, url string) (NodeFile, error) {
	if i, err := parseIdentity(dir); err == nil && i.Node.Name == name {
		return NodeFile{formatVersion, i.Node}, nil
	}
	i, err := newIdentity(ctx, c, dir, name, url)
	if err == nil {
		err = i.write(dir)
	}
	return NodeFile{formatVersion, i.Node}, err
}

// newIdentity returns a new identity for a node, whose directory it makes.
func newIdentity(ctx context.Context, c *Custody, dir, name, url string) (i identity, err error) {
	if err := checkName(name); err != nil {
		return i, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return i, fmt.Errorf("creating the directory: %w", err)
	}
	if err := durable.CheckAbsent(filepath.Join(dir, nodeFile)); err != nil {
		return i, fmt.Errorf("this node has an identity of another name or one that cannot be read: give another --dir, or remove %s to make a new one", filepath.Join(dir, nodeFile))
	}
	key, wrapped, err := c.newSigningKey(ctx, url, nodeContext)
	if err != nil {
		return i, err
	}
	return identity{formatVersion, Node{name, key.Public().Bytes()}, url, wrapped}, nil
}

func (i identity) write(dir string) error {
	b, err := canonical.Encode(i)
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, nodeFile), b)
}

// Acknowledge signs that the plugin of this node has loaded the key set file as it is now. Only the
// running plugin writes the record that shows it. It also moves the node's identity to the KMS key that
// the key set has moved to.
func Acknowledge(ctx context.Context, c *Custody, dir string, now time.Time) (Acknowledgement, error) {
	set, file, err := readKeySet(dir)
	if err != nil {
		return Acknowledgement{}, err
	}
	digest := digestOf(file)
	i, err := readIdentity(dir, set)
	if err != nil {
		return Acknowledgement{}, err
	}
	r, err := readRecord(dir)
	switch {
	case err != nil:
		return Acknowledgement{}, err
	case r == nil || r.KeySet != set.ID || r.Digest != digest:
		return Acknowledgement{}, fmt.Errorf("the plugin of this node has not loaded revision %d of the key set: see that it runs, and what it logs, and try again", set.Revision)
	}
	key, err := c.openSigningKey(ctx, i.KMS, nodeContext, i.Node.PublicKey, i.Wrapped)
	if err != nil {
		return Acknowledgement{}, err
	}
	if i.KMS != set.Signer.KMS {
		if err := c.moveIdentity(ctx, dir, i, set.Signer.KMS); err != nil {
			return Acknowledgement{}, err
		}
	}
	a := Acknowledgement{
		Version: formatVersion, KeySet: set.ID, Revision: set.Revision, Digest: digest,
		Node: i.Node.Name, At: now.UTC().Truncate(time.Second),
	}
	a.Signature, err = key.Sign(labelAcknowledgement, a.signed())
	return a, err
}

// moveIdentity wraps the seed of a node's identity by the KMS key of that URL.
func (c *Custody) moveIdentity(ctx context.Context, dir string, i identity, url string) error {
	id, err := dualsig.PublicKeyID(i.Node.PublicKey)
	if err == nil {
		i.Wrapped, err = c.move(ctx, i.KMS, url, nodeContext(id), i.Wrapped)
	}
	if err == nil {
		i.KMS = url
		err = i.write(dir)
	}
	if err != nil {
		return fmt.Errorf("moving this node's identity to %s: %w", url, err)
	}
	return nil
}

// missing verifies acknowledgements of the file of s, which has this digest, and returns the nodes that
// have given none.
func (s *KeySet) missing(given []Acknowledgement, digest string) (nodes []string, err error) {
	acknowledged := map[string]bool{}
	for _, a := range given {
		if err := s.verify(a, digest); err != nil {
			return nil, err
		}
		acknowledged[a.Node] = true
	}
	for _, n := range s.Nodes {
		if !acknowledged[n.Name] {
			nodes = append(nodes, n.Name)
		}
	}
	return nodes, nil
}

// verify returns an error unless a is a node's acknowledgement of the file of s, which has this digest.
func (s *KeySet) verify(a Acknowledgement, digest string) error {
	n := s.node(a.Node)
	switch {
	case n == nil:
		return fmt.Errorf("node %.260q acknowledges, and the key set does not name it: run latticekeep kms-plugin add-node first", a.Node)
	case a.KeySet != s.ID:
		return fmt.Errorf("node %s acknowledges key set %.64q, and this is %s", n.Name, a.KeySet, s.ID)
	case a.Digest != digest:
		return fmt.Errorf("node %s acknowledges another file, of revision %d, and this has revision %d: copy keyset.json there, and run latticekeep kms-plugin acknowledge again", n.Name, a.Revision, s.Revision)
	}
	key, err := dualsig.ParsePublicKey(n.PublicKey)
	if err != nil {
		return err
	}
	if !key.Verify(labelAcknowledgement, a.signed(), a.Signature) {
		return fmt.Errorf("the signature of the acknowledgement of node %s does not hold: run latticekeep kms-plugin acknowledge there again", n.Name)
	}
	return nil
}

// readIdentity reads the identity of this node, which set must name.
func readIdentity(dir string, set *KeySet) (identity, error) {
	i, err := parseIdentity(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return i, fmt.Errorf("this node has no identity: make it with latticekeep kms-plugin node --dir %s: %w", dir, err)
	}
	if err != nil {
		return i, fmt.Errorf("reading this node's identity: %w", err)
	}
	if n := set.node(i.Node.Name); n == nil || !bytes.Equal(n.PublicKey, i.Node.PublicKey) {
		return i, fmt.Errorf("the key set does not name this node, %.260q, with its key: run latticekeep kms-plugin add-node where the key set is changed, and copy keyset.json here", i.Node.Name)
	}
	return i, nil
}

// openNodeKey returns the signing key of this node.
func (c *Custody) openNodeKey(ctx context.Context, dir string, set *KeySet) (*dualsig.PrivateKey, error) {
	i, err := readIdentity(dir, set)
	if err != nil {
		return nil, err
	}
	key, err := c.openSigningKey(ctx, i.KMS, nodeContext, i.Node.PublicKey, i.Wrapped)
	if err != nil {
		return nil, fmt.Errorf("opening the key of this node: %w", err)
	}
	return key, nil
}

func parseIdentity(dir string) (i identity, err error) {
	b, err := readFile(filepath.Join(dir, nodeFile))
	if err == nil {
		err = canonical.Decode(b, &i)
	}
	if err == nil {
		err = checkVersion(i.Version)
	}
	return i, err
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, durable.ExplainRefusal(path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%s is larger than %d KiB", path, maxFile>>10)
	}
	return b, err
}
