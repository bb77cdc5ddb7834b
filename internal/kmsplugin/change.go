package kmsplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

// Init makes the first key set in dir, with this node and one generation, under the KMS key of that
// URL.
func Init(ctx context.Context, c *Custody, dir, node, url string, a envelope.KEM) (*KeySet, error) {
	path := filepath.Join(dir, keySetFile)
	if err := durable.CheckAbsent(path); err != nil {
		return nil, fmt.Errorf("this node has a key set: %w", err)
	}
	self, err := NewNode(ctx, c, dir, node, url)
	if err != nil {
		return nil, err
	}
	key, wrapped, err := c.newSigningKey(ctx, url, signerContext)
	if err != nil {
		return nil, err
	}
	s := &KeySet{
		Version: formatVersion, ID: key.Public().ID(), Revision: 1,
		Signer: Signer{key.Public().Bytes(), url, wrapped}, Nodes: []Node{self.Node},
	}
	first, err := c.newGeneration(ctx, s.ID, 1, Current, a, url)
	if err != nil {
		return nil, err
	}
	s.Generations = []Generation{first}
	b, err := s.sign(key)
	if err == nil {
		err = durable.WriteNew(path, b)
	}
	return s, err
}

// AddNode adds a node to the key set in dir.
func AddNode(ctx context.Context, c *Custody, dir string, n Node) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet) error {
		if s.node(n.Name) != nil {
			return fmt.Errorf("the key set names node %s already", n.Name)
		}
		s.Nodes = append(s.Nodes, n)
		return nil
	})
}

// Rotate adds a pending generation to the key set in dir, or replaces the one that is there. An
// empty url or algorithm takes the current generation's. The signer's seed moves to the same KMS key.
func Rotate(ctx context.Context, c *Custody, dir, url string, a envelope.KEM) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet) error {
		current := s.current()
		if url == "" {
			url = current.KMS
		}
		if a == "" {
			a = current.Algorithm
		}
		number := s.Generations[len(s.Generations)-1].Number + 1
		g, err := c.newGeneration(ctx, s.ID, number, Pending, a, url)
		if err != nil {
			return err
		}
		if url != s.Signer.KMS {
			if err := c.moveSigner(ctx, s, url); err != nil {
				return err
			}
		}
		s.Generations = slices.DeleteFunc(s.Generations, func(g Generation) bool { return g.State == Pending })
		s.Generations = append(s.Generations, g)
		return nil
	})
}

// moveSigner wraps the signer's seed by the KMS key of that URL.
func (c *Custody) moveSigner(ctx context.Context, s *KeySet, url string) error {
	seed, err := c.unwrap(ctx, s.Signer.KMS, signerContext(s.ID), s.Signer.Wrapped)
	if err != nil {
		return fmt.Errorf("unwrapping signing key: %w", err)
	}
	defer seed.Zero()
	wrapped, err := c.wrap(ctx, url, signerContext(s.ID), seed)
	if err != nil {
		return fmt.Errorf("wrapping signing key: %w", err)
	}
	s.Signer.KMS, s.Signer.Wrapped = url, wrapped
	return nil
}

// MissingError names the nodes that have not acknowledged the pending generation.
type MissingError struct{ Nodes []string }

// Error implements error.
func (e *MissingError) Error() string {
	return "no acknowledgement from " + strings.Join(e.Nodes, ", ") + ": the plugin there could not open what the others write. " +
		"Run latticekeep kms-plugin acknowledge there and give its output, or give --force if the node is gone"
}

// Promote makes the pending generation of the key set in dir the current one. Every node of the set
// must have acknowledged it, unless force is set. missing names those that have not.
func Promote(ctx context.Context, c *Custody, dir string, given []Acknowledgement, force bool) (s *KeySet, missing []string, err error) {
	s, err = change(ctx, c, dir, func(s *KeySet) error {
		pending := s.pending()
		if pending == nil {
			return errors.New("the key set has no pending generation: run latticekeep kms-plugin rotate first")
		}
		acknowledged := map[string]bool{}
		for _, a := range given {
			if err := s.acknowledges(a, pending); err != nil {
				return err
			}
			acknowledged[a.Node] = true
		}
		for _, n := range s.Nodes {
			if !acknowledged[n.Name] {
				missing = append(missing, n.Name)
			}
		}
		if len(missing) > 0 && !force {
			return &MissingError{missing}
		}
		s.current().State, pending.State = Former, Current
		return nil
	})
	return s, missing, err
}

// change applies edit to the key set in dir, and writes it as the next revision. A lock keeps two
// changes apart.
func change(ctx context.Context, c *Custody, dir string, edit func(*KeySet) error) (*KeySet, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, durable.ExplainRefusal(dir, err)
	}
	defer d.Close()
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("locking %s: another command changes the key set: wait for its end: %w", dir, err)
	}
	s, _, err := readKeySet(dir)
	if err != nil {
		return nil, err
	}
	key, err := c.openSigningKey(ctx, s.Signer.KMS, signerContext, s.Signer.PublicKey, s.Signer.Wrapped)
	if err != nil {
		return nil, err
	}
	if err := edit(s); err != nil {
		return nil, err
	}
	s.Revision++
	b, err := s.sign(key)
	if err == nil {
		err = durable.Write(filepath.Join(dir, keySetFile), b)
	}
	return s, err
}

// Read returns the key set in dir.
func Read(dir string) (*KeySet, error) {
	s, _, err := readKeySet(dir)
	return s, err
}
