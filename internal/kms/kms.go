// Package kms holds the outermost of the three layers: the key that wraps
// every tenant's keys and never lies in the store.
//
// A [Key] lies with a key-management service (AWS KMS, Google Cloud KMS, the
// Transit engine of Vault and OpenBao) and never leaves it, or in a file on the
// same machine. That is one layer less, since who reads the disk reads both.
//
// Only symmetric keys are used: what is wrapped with RSA or on a curve is
// opened by a quantum computer. Every call is bounded, tried again when the
// service says so, and made over TLS, which [Options.PQRequired] wants hybrid.
package kms

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	openTimeout = 10 * time.Second // limit for all tries to reach the service at start
	callTimeout = 10 * time.Second // limit for one operation with its tries, when the caller's context allows more
	firstPause  = 25 * time.Millisecond
	lastPause   = time.Second
)

// Key is a wrapping key. It is safe for concurrent use.
type Key struct {
	id      string
	service service
	logger  *slog.Logger
}

// service is a symmetric key where it lies. Its errors have kinds:
// fault.Unavailable for what may pass, and ErrForeign from decrypt for what the
// key does not open. decrypt opens what encrypt returned, for as long as the
// key is there, however often it was rotated.
type service interface {
	encrypt(ctx context.Context, plaintext []byte) ([]byte, error)
	decrypt(ctx context.Context, ciphertext []byte) ([]byte, error)
	destroy(ctx context.Context) (Destruction, error)
	close() error
}

// Destruction says what becomes of a key that was told to be destroyed.
type Destruction struct {
	When time.Time // it opens nothing any more, and from When on nobody can undo that; zero: at once
	Undo string    // how to keep it until then; "" if that cannot be
	Left string    // what may still hold it, "" for nothing that is known
}

// ID names the provider and the key. It is stable and tells nothing of the key.
func (k *Key) ID() string { return k.id }

// Wrap encrypts a key for the given context. Errors: fault.Unavailable when the
// service does not answer in time, fault.Forbidden when it refuses.
func (k *Key) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	plaintext := bind(keyContext, key)
	defer clear(plaintext)
	var ciphertext []byte
	err := k.try(ctx, "wrapping", func(ctx context.Context) (err error) {
		ciphertext, err = k.service.encrypt(ctx, plaintext)
		return err
	})
	if err != nil {
		return nil, err
	}
	return wrapped{k.id, ciphertext}.marshal(), nil
}

// Unwrap opens what [Key.Wrap] made for the same context. Errors as for Wrap,
// and [ErrForeign] for what was not made by this key for this context.
func (k *Key) Unwrap(ctx context.Context, keyContext string, text []byte) ([]byte, error) {
	w, err := parseWrapped(text)
	if err != nil {
		return nil, err
	}
	if w.key != k.id {
		return nil, fmt.Errorf("this was wrapped by KMS key %s and not by %s: %w", w.key, k.id, ErrForeign)
	}
	var plaintext []byte
	err = k.try(ctx, "unwrapping", func(ctx context.Context) (err error) {
		plaintext, err = k.service.decrypt(ctx, w.ciphertext)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer clear(plaintext)
	return unbind(keyContext, plaintext)
}

// Destroy ends the key: nothing that it wrapped can be opened any more. Errors
// as for [Key.Wrap]; that of a key which must not be deleted names what to do.
func (k *Key) Destroy(ctx context.Context) (d Destruction, err error) {
	err = k.try(ctx, "destroying", func(ctx context.Context) (err error) {
		d, err = k.service.destroy(ctx)
		return err
	})
	return d, err
}

// Close ends the connections to the service.
func (k *Key) Close() error { return k.service.close() }

func (k *Key) try(ctx context.Context, what string, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return try(ctx, k.logger, what, call)
}

// try repeats a call while its error may pass, with growing pauses that differ
// between callers, until the context's deadline comes. It returns the last
// error that came from the service. Of all tries it logs one.
func try(ctx context.Context, logger *slog.Logger, what string, call func(context.Context) error) error {
	var last error
	told := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := call(ctx)
		if err == nil || !errors.Is(err, fault.Unavailable) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		wait := pause/2 + rand.N(pause/2)
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
			return last
		}
		if !told {
			logger.Warn("a call of the key-management service failed; retrying", "call", what, "error", last)
		}
		told = true
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return last
		}
	}
}

// The kinds of failure that the providers have in common.
func unavailable(err error) error {
	return fault.Wrap(fault.Unavailable, "the key-management service cannot be reached or is busy: retry, and check it if this lasts", err)
}

func forbidden(err error) error {
	return fault.Wrap(fault.Forbidden, "the key-management service refuses this key: see that it is enabled, and that the server's credentials may use it", err)
}

// failed gives an error its kind. passes says whether the service means that
// the call may be repeated; what never reached it may be, unless the other end
// is not who it should be.
func failed(err error, passes bool) error {
	text := err.Error()
	switch {
	case fault.Of(err) != fault.Internal:
		return err // the transport failed
	case strings.Contains(text, "tls: handshake failure"):
		return fault.Wrap(fault.Invalid, "the key-management service agrees on no TLS key exchange; tls.pqRequired wants X25519MLKEM768 of it", err)
	case strings.Contains(text, "x509: "):
		return fault.Wrap(fault.Invalid, "the certificate of the key-management service is not trusted: name its authority", err)
	case passes:
		return unavailable(err)
	}
	return forbidden(err)
}

// unfit is the error of a key or a configuration that does not serve.
func unfit(format string, args ...any) error {
	return fault.New(fault.Invalid, fmt.Sprintf(format, args...))
}

// needs is the error of a missing permission to read what sort of key it is.
func needs(permission string, err error) error {
	if fault.Of(err) != fault.Forbidden {
		return err
	}
	return fault.Wrap(fault.Invalid, "the KMS key cannot be read: see that it exists, and give the server's credentials the permission "+permission, err)
}
