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
	"time"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kmsplugin/etcd"
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
	return change(ctx, c, dir, func(s *KeySet, _ string) error {
		if s.node(n.Name) != nil {
			return fmt.Errorf("the key set names node %s already", n.Name)
		}
		s.Nodes = append(s.Nodes, n)
		return nil
	})
}

// RemoveNode removes a node that is gone from the key set in dir. Its plugin, if there is one, loads no
// later key set.
func RemoveNode(ctx context.Context, c *Custody, dir, name string) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet, _ string) error {
		switch {
		case s.node(name) == nil:
			return fmt.Errorf("the key set names no node %.260q: latticekeep kms-plugin show lists them", name)
		case len(s.Nodes) == 1:
			return fmt.Errorf("node %s is the only one of the key set: add another first", name)
		}
		s.Nodes = slices.DeleteFunc(s.Nodes, func(n Node) bool { return n.Name == name })
		return nil
	})
}

// Rotate adds a pending generation to the key set in dir, or replaces the one that is there. An
// empty url or algorithm takes the current generation's. The signer's seed moves to the same KMS key.
func Rotate(ctx context.Context, c *Custody, dir, url string, a envelope.KEM) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet, _ string) error {
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

// MissingError names the nodes that have not acknowledged the key set file.
type MissingError struct{ Nodes []string }

// Error implements error.
func (e *MissingError) Error() string {
	return "no acknowledgement from " + strings.Join(e.Nodes, ", ") +
		": copy keyset.json there, run latticekeep kms-plugin acknowledge there and give its output, or remove a node that is gone with latticekeep kms-plugin remove-node"
}

// Promote makes the pending generation of the key set in dir the current one. Every node of the set
// must have acknowledged the file that has it, because the plugin of another could not open what the
// others write, unless force is set. missing names those that have not.
func Promote(ctx context.Context, c *Custody, dir string, given []Acknowledgement, force bool) (s *KeySet, missing []string, err error) {
	s, err = change(ctx, c, dir, func(s *KeySet, digest string) error {
		pending := s.pending()
		if pending == nil {
			return errors.New("the key set has no pending generation: run latticekeep kms-plugin rotate first")
		}
		if missing, err = s.missing(given, digest); err != nil {
			return err
		}
		if len(missing) > 0 && !force {
			return &MissingError{missing}
		}
		s.current().State, pending.State = Previous, Current
		return nil
	})
	return s, missing, err
}

// settled is how long after a plugin has loaded a key set its API server may still write under the
// previous current generation. kube-apiserver asks for the key id once a minute, and goes on for three
// when it gets no answer.
const settled = 5 * time.Minute

// Retire removes a previous generation from the key set in dir. All nodes must have acknowledged the file
// at least five minutes before now, so that no API server writes under that generation any more. in
// returns the key ids that objects in etcd name; the generation stays while one object names it. Before
// the change the file is kept as keyset-REVISION.json, because backups of etcd need it.
func Retire(ctx context.Context, c *Custody, dir string, number uint64, given []Acknowledgement, now time.Time, in func() (map[string]etcd.Use, error)) (s *KeySet, kept string, err error) {
	s, err = change(ctx, c, dir, func(s *KeySet, digest string) error {
		i := slices.IndexFunc(s.Generations, func(g Generation) bool { return g.Number == number && g.State == Previous })
		if i < 0 {
			return fmt.Errorf("the key set has no previous generation %d: latticekeep kms-plugin show lists what it has", number)
		}
		missing, err := s.missing(given, digest)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return &MissingError{missing}
		}
		for _, a := range given {
			if from := a.At.Add(settled); now.Before(from) {
				return fmt.Errorf("the API server of node %s may still write under a previous generation: try again after %s", a.Node, from.Format(time.RFC3339))
			}
		}
		used, err := in()
		if err != nil {
			return err
		}
		if use := used[s.Generations[i].KeyID]; use.Objects > 0 {
			return fmt.Errorf("%d objects in etcd still name generation %d, such as %s: write all objects again, as the guide says, and try again", use.Objects, number, use.Example)
		}
		b, err := readFile(filepath.Join(dir, keySetFile))
		if err != nil {
			return err
		}
		kept = filepath.Join(dir, fmt.Sprintf("keyset-%d.json", s.Revision))
		if err := durable.Write(kept, b); err != nil {
			return fmt.Errorf("keeping the key set with generation %d: %w", number, err)
		}
		s.Generations = slices.Delete(s.Generations, i, i+1)
		return nil
	})
	return s, kept, err
}

// change applies edit to the key set in dir, and writes it as the next revision. A lock keeps two
// changes apart.
func change(ctx context.Context, c *Custody, dir string, edit func(s *KeySet, digest string) error) (*KeySet, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, durable.ExplainRefusal(dir, err)
	}
	defer d.Close()
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("locking %s: another command changes the key set: wait for its end: %w", dir, err)
	}
	s, digest, err := readKeySet(dir)
	if err != nil {
		return nil, err
	}
	key, err := c.openSigningKey(ctx, s.Signer.KMS, signerContext, s.Signer.PublicKey, s.Signer.Wrapped)
	if err != nil {
		return nil, err
	}
	if err := edit(s, digest); err != nil {
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
