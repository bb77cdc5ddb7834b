package kmsplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
)

// backup is a key set with the secrets that a KMS key wraps in it. Whoever has it reads all Secrets.
type backup struct {
	Version int    `json:"version"`
	File    []byte `json:"key_set_file"`
	Seed    []byte `json:"signer_seed"`

	// Secrets has those of each generation, in the order of the key set.
	Secrets [][]byte `json:"secrets"`
}

func (b *backup) clear() {
	clear(b.Seed)
	for _, s := range b.Secrets {
		clear(s)
	}
}

// Backup returns a backup of the key set in dir, which opens without the KMS. The caller encrypts it, and
// clears it then.
func Backup(ctx context.Context, c *Custody, dir string) (plain []byte, s *KeySet, err error) {
	s, file, err := readKeySet(dir)
	if err != nil {
		return nil, nil, err
	}
	b := backup{Version: formatVersion, File: file}
	defer b.clear()
	seed, err := c.unwrap(ctx, s.Signer.KMS, signerContext(s.ID), s.Signer.Wrapped)
	if err != nil {
		return nil, nil, fmt.Errorf("unwrapping the signing key: %w", err)
	}
	b.Seed = seed
	for _, g := range s.Generations {
		secrets, err := c.unwrap(ctx, g.KMS, generationContext(s.ID, g.Number), g.Wrapped)
		if err != nil {
			return nil, nil, fmt.Errorf("unwrapping generation %d: %w", g.Number, err)
		}
		b.Secrets = append(b.Secrets, secrets)
	}
	if _, err := b.open(); err != nil {
		return nil, nil, err
	}
	plain, err = canonical.Encode(b)
	return plain, s, err
}

// opened is what a backup holds, once it was checked.
type opened struct {
	set *KeySet
	key *dualsig.PrivateKey // the signer's
}

// open checks that the secrets are those of the key set.
func (b *backup) open() (opened, error) {
	s, err := ParseKeySet(b.File)
	if err != nil {
		return opened{}, err
	}
	key, err := dualsig.NewPrivateKey(b.Seed)
	if err == nil && key.Public().ID() != s.ID {
		err = errors.New("it belongs to another key set")
	}
	if err != nil {
		return opened{}, fmt.Errorf("the signing key of the backup: %w", err)
	}
	if len(b.Secrets) != len(s.Generations) {
		return opened{}, fmt.Errorf("the backup has the secrets of %d generations, and its key set has %d", len(b.Secrets), len(s.Generations))
	}
	for i, g := range s.Generations {
		key, err := newEtcdKey(g.Algorithm, b.Secrets[i])
		if err == nil && !bytes.Equal(key.PublicKey(), g.PublicKey) {
			err = errors.New("they belong to another public key")
		}
		if err != nil {
			return opened{}, fmt.Errorf("the secrets of generation %d in the backup: %w", g.Number, err)
		}
	}
	return opened{s, key}, nil
}

// Restore makes the key set of a backup that [Backup] returned the next revision in dir, under the KMS key
// of that URL, with this node alone. It keeps the key ids, so what is in etcd is read. If this node has no
// identity, Restore makes one.
func Restore(ctx context.Context, c *Custody, dir, node, url string, plain []byte) (*KeySet, error) {
	var b backup
	defer b.clear()
	err := canonical.Decode(plain, &b)
	if err == nil {
		err = checkVersion(b.Version)
	}
	if err != nil {
		return nil, fault.New(fault.Invalid, "the file is no backup of a key set: give one that latticekeep kms-plugin backup wrote: "+err.Error())
	}
	from, err := b.open()
	if err != nil {
		return nil, err
	}
	s := from.set
	path := filepath.Join(dir, keySetFile)
	if err := durable.CheckAbsent(path); err != nil {
		return nil, fmt.Errorf("this node has a key set in %s: if its keys are lost, move %s out of the directory", dir, path)
	}
	r, err := readRecord(dir)
	if err == nil && r != nil && r.KeySet != s.ID {
		err = fmt.Errorf("the backup is of key set %s, and this node has served %s: give a backup of that one, or remove %s if the key set was replaced on purpose", s.ID, r.KeySet, recordFile)
	} else if err == nil && r != nil && s.Revision < r.Revision {
		err = fmt.Errorf("the backup has revision %d of the key set, and this node has loaded revision %d: copy %s from another node, or restore a newer backup; if both are lost, remove %s", s.Revision, r.Revision, keySetFile, recordFile)
	}
	if err != nil {
		return nil, err
	}
	self, err := c.identityFor(ctx, dir, node, url)
	if err != nil {
		return nil, err
	}
	if err := c.rewrap(ctx, s, url, &b); err != nil {
		return nil, err
	}
	s.Nodes = []Node{self.Node}
	s.Revision++
	file, err := s.sign(from.key)
	if err == nil {
		err = self.write(dir)
	}
	if err == nil {
		err = durable.WriteNew(path, file)
	}
	return s, err
}

// identityFor returns the identity of this node under the KMS key of that URL: the one that is there if it
// has that name, or else a new one.
func (c *Custody) identityFor(ctx context.Context, dir, node, url string) (identity, error) {
	i, err := parseIdentity(dir)
	if err != nil || i.Node.Name != node {
		return newIdentity(ctx, c, dir, node, url)
	}
	id, err := dualsig.PublicKeyID(i.Node.PublicKey)
	if err == nil {
		i.Wrapped, err = c.move(ctx, i.KMS, url, nodeContext(id), i.Wrapped)
	}
	if err != nil {
		return i, fmt.Errorf("this node has an identity that cannot be opened: move %s out of the directory to make a new one: %w", filepath.Join(dir, nodeFile), err)
	}
	i.KMS = url
	return i, nil
}

// rewrap puts the secrets of a backup under the KMS key of that URL.
func (c *Custody) rewrap(ctx context.Context, s *KeySet, url string, b *backup) (err error) {
	if s.Signer.Wrapped, err = c.wrap(ctx, url, signerContext(s.ID), b.Seed); err != nil {
		return fmt.Errorf("wrapping the signing key: %w", err)
	}
	s.Signer.KMS = url
	for i := range s.Generations {
		g := &s.Generations[i]
		if err := g.rememberKMS(); err != nil {
			return err
		}
		if g.Wrapped, err = c.wrap(ctx, url, generationContext(s.ID, g.Number), b.Secrets[i]); err != nil {
			return fmt.Errorf("wrapping generation %d: %w", g.Number, err)
		}
		g.KMS = url
	}
	return nil
}

// rememberKMS has the key id stay that of the KMS key under which the generation was made.
func (g *Generation) rememberKMS() error {
	if g.FirstKMS != "" {
		return nil
	}
	custodian, ok := kms.KeyOf(g.Wrapped)
	if !ok {
		return kms.ErrForm
	}
	g.FirstKMS = custodian
	return nil
}
