package kmsplugin

import (
	"bytes"
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
		return nil, fmt.Errorf("this node has a key set in %s: give another --dir", dir)
	}
	self, err := newIdentity(ctx, c, dir, node, url)
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
		err = self.write(dir)
	}
	if err == nil {
		err = durable.WriteNew(path, b)
	}
	return s, err
}

// AddNode adds a node to the key set in dir.
func AddNode(ctx context.Context, c *Custody, dir string, n Node) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet, _ []byte) error {
		if s.node(n.Name) != nil {
			return fmt.Errorf("the key set names node %s already", n.Name)
		}
		s.Nodes = append(s.Nodes, n)
		return nil
	})
}

// RemoveNode removes a node that is gone from the key set in dir. A plugin that still runs there loads no
// later key set, and what it writes is lost when its generation is retired.
func RemoveNode(ctx context.Context, c *Custody, dir, name string) (*KeySet, error) {
	return change(ctx, c, dir, func(s *KeySet, _ []byte) error {
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
	return change(ctx, c, dir, func(s *KeySet, _ []byte) error {
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
			wrapped, err := c.move(ctx, s.Signer.KMS, url, signerContext(s.ID), s.Signer.Wrapped)
			if err != nil {
				return fmt.Errorf("moving the signing key to %s: %w", url, err)
			}
			s.Signer.KMS, s.Signer.Wrapped = url, wrapped
		}
		s.Generations = slices.DeleteFunc(s.Generations, func(g Generation) bool { return g.State == Pending })
		s.Generations = append(s.Generations, g)
		return nil
	})
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
	s, err = change(ctx, c, dir, func(s *KeySet, file []byte) error {
		pending := s.pending()
		if pending == nil {
			return errors.New("the key set has no pending generation: run latticekeep kms-plugin rotate first")
		}
		if missing, err = s.missing(given, digestOf(file)); err != nil {
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

// An API server may write under the previous generation for a while after its plugin has loaded a key
// set: it asks for the key id once a minute, and goes on for three when it gets no answer. What a node
// acknowledged long ago says little about what its plugin serves now.
const (
	acknowledgementMinAge = 5 * time.Minute
	acknowledgementMaxAge = time.Hour
)

// checkAge refuses an acknowledgement that says nothing about what the API server of its node writes now.
func (a Acknowledgement) checkAge(now time.Time) error {
	if from := a.At.Add(acknowledgementMinAge); now.Before(from) {
		return fmt.Errorf("the API server of node %s may still write under a previous generation: try again after %s", a.Node, from.Format(time.RFC3339))
	}
	if now.After(a.At.Add(acknowledgementMaxAge)) {
		return fmt.Errorf("the acknowledgement of node %s is older than an hour: run latticekeep kms-plugin acknowledge there again, and wait five minutes", a.Node)
	}
	return nil
}

// Retirement is a previous generation that is to leave the key set, and what shows that it may.
type Retirement struct {
	Number           uint64
	Acknowledgements []Acknowledgement
	Now              time.Time
	KeyIDsInEtcd     func() (map[string]etcd.Use, error)
}

// Retire removes a previous generation from the key set in dir. Every node must have acknowledged the
// file, between five minutes and an hour ago, so that no API server writes under that generation any
// more. The generation stays while one object in etcd names it, and also if none names the current one,
// because then it was another etcd. The file of before is kept as keyset-REVISION.json, because backups
// of etcd need it.
func Retire(ctx context.Context, c *Custody, dir string, r Retirement) (s *KeySet, kept string, err error) {
	s, err = change(ctx, c, dir, func(s *KeySet, file []byte) error {
		i := slices.IndexFunc(s.Generations, func(g Generation) bool { return g.Number == r.Number && g.State == Previous })
		if i < 0 {
			return fmt.Errorf("the key set has no previous generation %d: latticekeep kms-plugin show lists what it has", r.Number)
		}
		missing, err := s.missing(r.Acknowledgements, digestOf(file))
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return &MissingError{missing}
		}
		for _, a := range r.Acknowledgements {
			if err := a.checkAge(r.Now); err != nil {
				return err
			}
		}
		used, err := r.KeyIDsInEtcd()
		if err != nil {
			return err
		}
		if use := used[s.Generations[i].KeyID]; use.Objects > 0 {
			return fmt.Errorf("%d objects in etcd still name generation %d, such as %s: write all objects again, or delete from etcd what the API server cannot read, and try again", use.Objects, r.Number, use.Example)
		}
		if used[s.current().KeyID].Objects == 0 {
			return errors.New("no object in etcd names the current generation: see that --etcd names the etcd of these API servers, write all objects again, and try again")
		}
		kept = filepath.Join(dir, fmt.Sprintf("keyset-%d.json", s.Revision))
		if err := keep(kept, file); err != nil {
			return fmt.Errorf("keeping the key set with generation %d: %w", r.Number, err)
		}
		s.Generations = slices.Delete(s.Generations, i, i+1)
		return nil
	})
	return s, kept, err
}

// keep writes a new file, or finds it there with that content.
func keep(path string, content []byte) error {
	if b, err := readFile(path); err == nil && bytes.Equal(b, content) {
		return nil
	}
	return durable.WriteNew(path, content)
}

// change applies edit to the key set in dir, and writes it as the next revision. A lock keeps two
// changes apart.
func change(ctx context.Context, c *Custody, dir string, edit func(s *KeySet, file []byte) error) (*KeySet, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, durable.ExplainRefusal(dir, err)
	}
	defer d.Close()
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("another command changes the key set in %s: wait for its end", dir)
	} else if err != nil {
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	s, file, err := readKeySet(dir)
	if err != nil {
		return nil, err
	}
	key, err := c.openSigningKey(ctx, s.Signer.KMS, signerContext, s.Signer.PublicKey, s.Signer.Wrapped)
	if err != nil {
		return nil, err
	}
	if err := edit(s, file); err != nil {
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
