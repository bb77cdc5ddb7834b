package keyring

import (
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// maxMessageKeys bounds how many parsed keys one set keeps in memory.
const maxMessageKeys = 256

// NewMessageKey makes the seed of a named key's version. It returns the seed as a stored key under
// this set's wrapping key, bound to the context.
func (k *Keys) NewMessageKey(context string) ([]byte, error) {
	seed := random(envelope.KEMSeedSize)
	defer seed.Zero()
	return envelope.SealKey(k.Wrapping, context, seed)
}

// MessageKey returns the key whose seed was stored as blob for the context. The parsed key is
// cached with the set, so it expires together with the wrapping key. Error: fault.Internal for a
// blob that does not open.
func (k *Keys) MessageKey(context string, blob []byte) (*envelope.KEMKey, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key, ok := k.messages[context]; ok {
		return key, nil
	}
	seed, err := k.openSeed(context, blob)
	if err != nil {
		return nil, err
	}
	defer seed.Zero()
	key, err := envelope.NewKEMKey(seed)
	if err != nil {
		return nil, errDamaged
	}
	if len(k.messages) == maxMessageKeys {
		clear(k.messages)
	}
	k.messages[context] = key
	return key, nil
}

// MoveMessageKey returns the stored key in blob under the wrapping key of next, for the same
// context. Error: fault.Internal for a blob that does not open.
func (k *Keys) MoveMessageKey(next *Keys, context string, blob []byte) ([]byte, error) {
	seed, err := k.openSeed(context, blob)
	if err != nil {
		return nil, err
	}
	defer seed.Zero()
	return envelope.SealKey(next.Wrapping, context, seed)
}

func (k *Keys) openSeed(context string, blob []byte) (secret.Bytes, error) {
	seed, err := envelope.OpenKey(k.Wrapping, context, blob)
	if err != nil || len(seed) != envelope.KEMSeedSize {
		return nil, errDamaged
	}
	return seed, nil
}
