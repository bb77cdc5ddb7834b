package kmsplugin

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Custody opens the KMS keys that files name by their URLs, each once. The zero value is ready to
// use.
type Custody struct {
	TokenFile string       // holds the token for Vault and OpenBao
	Logger    *slog.Logger // logs calls that are retried; default none

	keys map[string]*kms.Key
}

func (c *Custody) key(ctx context.Context, text string) (*kms.Key, error) {
	if k := c.keys[text]; k != nil {
		return k, nil
	}
	if u, err := url.Parse(text); err == nil && u.User != nil {
		return nil, fault.New(fault.Invalid, "the URL of a KMS key is stored and must not have credentials: give them as --kms-token-file, or as the provider's environment")
	}
	k, err := kms.Open(ctx, text, kms.Options{TokenFile: c.TokenFile, Logger: c.Logger})
	if err != nil {
		return nil, err
	}
	if c.keys == nil {
		c.keys = map[string]*kms.Key{}
	}
	c.keys[text] = k
	return k, nil
}

// Close closes the connections to all services.
func (c *Custody) Close() {
	for _, k := range c.keys {
		_ = k.Close() // nothing is left to do on an error
	}
	c.keys = nil
}

// wrap wraps plaintext, and unwraps it again: what the KMS key encrypts and does not decrypt would be lost.
func (c *Custody) wrap(ctx context.Context, url, keyContext string, plaintext []byte) ([]byte, error) {
	k, err := c.key(ctx, url)
	if err != nil {
		return nil, err
	}
	wrapped, err := k.Wrap(ctx, keyContext, plaintext)
	if err != nil {
		return nil, err
	}
	again, err := c.unwrap(ctx, url, keyContext, wrapped)
	if err != nil {
		return nil, fmt.Errorf("unwrapping what was just wrapped: %w", err)
	}
	defer again.Zero()
	if !bytes.Equal(again, plaintext) {
		return nil, errors.New("the KMS key does not decrypt what it encrypts")
	}
	return wrapped, nil
}

// move unwraps a key by one KMS key and wraps it by another.
func (c *Custody) move(ctx context.Context, from, to, keyContext string, wrapped []byte) ([]byte, error) {
	plaintext, err := c.unwrap(ctx, from, keyContext, wrapped)
	if err != nil {
		return nil, fmt.Errorf("unwrapping: %w", err)
	}
	defer plaintext.Zero()
	if wrapped, err = c.wrap(ctx, to, keyContext, plaintext); err != nil {
		return nil, fmt.Errorf("wrapping: %w", err)
	}
	return wrapped, nil
}

func (c *Custody) unwrap(ctx context.Context, url, keyContext string, wrapped []byte) (secret.Bytes, error) {
	k, err := c.key(ctx, url)
	if err != nil {
		return nil, err
	}
	return k.Unwrap(ctx, keyContext, wrapped)
}

// Contexts under which a KMS key wraps. An id is the fingerprint of an ML-DSA-65 key, and that of a
// key set is its signer's.
func generationContext(keySet string, number uint64) string {
	return fmt.Sprintf("latticekeep/key-set/%s/generation/%d", keySet, number)
}
func signerContext(id string) string { return "latticekeep/key-set/" + id + "/signer" }
func nodeContext(id string) string   { return "latticekeep/key-set-node/" + id }

// newGeneration returns a new generation, whose secrets the KMS key of that URL wraps.
func (c *Custody) newGeneration(ctx context.Context, keySet string, number uint64, state State, a envelope.KEM, url string) (Generation, error) {
	secrets := newSecrets(envelope.KEMSeedSize + envelope.EtcdSecretSize)
	defer secrets.Zero()
	key, err := newEtcdKey(a, secrets)
	if err != nil {
		return Generation{}, err
	}
	g := Generation{Number: number, State: state, Algorithm: a, PublicKey: key.PublicKey(), KMS: url}
	if g.Wrapped, err = c.wrap(ctx, url, generationContext(keySet, number), secrets); err != nil {
		return Generation{}, fmt.Errorf("wrapping generation %d: %w", number, err)
	}
	g.KeyID, err = g.keyID()
	return g, err
}

// openGeneration returns the key of a generation.
func (c *Custody) openGeneration(ctx context.Context, keySet string, g Generation) (*envelope.EtcdKey, error) {
	secrets, err := c.unwrap(ctx, g.KMS, generationContext(keySet, g.Number), g.Wrapped)
	if err != nil {
		return nil, fmt.Errorf("unwrapping generation %d: %w", g.Number, err)
	}
	defer secrets.Zero()
	key, err := newEtcdKey(g.Algorithm, secrets)
	if err == nil && !bytes.Equal(key.PublicKey(), g.PublicKey) {
		err = errors.New("its secrets belong to another public key")
	}
	if err != nil {
		return nil, fmt.Errorf("opening generation %d: %w", g.Number, err)
	}
	return key, nil
}

func newEtcdKey(a envelope.KEM, secrets []byte) (*envelope.EtcdKey, error) {
	n := min(envelope.KEMSeedSize, len(secrets))
	return envelope.NewEtcdKey(a, secrets[:n], secrets[n:])
}

// newSigningKey returns a new ML-DSA-65 key, and its seed wrapped for the context that its id gives.
func (c *Custody) newSigningKey(ctx context.Context, url string, keyContext func(id string) string) (*dualsig.PrivateKey, []byte, error) {
	seed := newSecrets(dualsig.SeedSize)
	defer seed.Zero()
	key, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		return nil, nil, err
	}
	wrapped, err := c.wrap(ctx, url, keyContext(key.Public().ID()), seed)
	if err != nil {
		return nil, nil, fmt.Errorf("wrapping signing key: %w", err)
	}
	return key, wrapped, nil
}

// openSigningKey returns the ML-DSA-65 key with this public key.
func (c *Custody) openSigningKey(ctx context.Context, url string, keyContext func(id string) string, public, wrapped []byte) (*dualsig.PrivateKey, error) {
	id, err := dualsig.PublicKeyID(public)
	if err != nil {
		return nil, err
	}
	seed, err := c.unwrap(ctx, url, keyContext(id), wrapped)
	if err != nil {
		return nil, fmt.Errorf("unwrapping signing key: %w", err)
	}
	defer seed.Zero()
	key, err := dualsig.NewPrivateKey(seed)
	if err == nil && key.Public().ID() != id {
		err = errors.New("the seed of a signing key belongs to another public key")
	}
	return key, err
}

func newSecrets(n int) secret.Bytes {
	b := make(secret.Bytes, n)
	rand.Read(b) // never fails: crypto/rand ends the program instead
	return b
}
