// Package kms holds the outermost of the three key layers: the key-encryption key, which wraps
// every tenant's keys and is never stored in the database.
//
// A [Key] is kept by a key-management service (AWS KMS, Google Cloud KMS, the Transit engine of
// Vault and OpenBao) and never leaves it, or it is kept in a file on the same machine. A file is
// one layer less, because a reader of the disk can read both.
//
// Only symmetric keys are used, because a quantum computer breaks wrapping with RSA or elliptic
// curves. Every call is bounded, is retried when the service says so, and uses TLS.
// [Options.PQRequired] requires a hybrid key exchange.
package kms

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	openTimeout = 10 * time.Second // limit for reaching the service at start, with all attempts
	callTimeout = 10 * time.Second // limit for one operation with its attempts, when the caller's context allows more
	firstPause  = 25 * time.Millisecond
	lastPause   = time.Second
)

// Key is a key-encryption key. It is safe for concurrent use.
type Key struct {
	id      string
	service service
	logger  *slog.Logger
	calls   outcomes
}

// service is a symmetric key in its custody. Its errors have kinds: fault.Unavailable for failures
// that may pass, and ErrForeign from decrypt for ciphertext that the key does not open. decrypt
// opens what encrypt returned as long as the key exists, however often it was rotated.
type service interface {
	encrypt(ctx context.Context, plaintext []byte) ([]byte, error)
	decrypt(ctx context.Context, ciphertext []byte) ([]byte, error)
	destroy(ctx context.Context) (Destruction, error)
	close() error
}

// Destruction says what happens to a key after a request to destroy it.
type Destruction struct {
	When time.Time // the key opens nothing any more, and from When on nobody can undo that; zero: at once
	Undo string    // how to keep the key until then; "" if that is impossible
	Left string    // what may still hold the key; "" when nothing known does
}

// ID names the provider and the key. It is stable and reveals nothing about the key.
func (k *Key) ID() string { return k.id }

// Wrap encrypts a key for keyContext. Errors: fault.Unavailable when the service does not answer in
// time, fault.Forbidden when it refuses.
func (k *Key) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	plaintext := bind(keyContext, key)
	defer clear(plaintext)
	var ciphertext []byte
	err := k.try(ctx, "wrapping", func(ctx context.Context) (err error) {
		ciphertext, err = k.service.encrypt(ctx, plaintext)
		return err
	})
	k.calls.note(err)
	if err != nil {
		return nil, err
	}
	return wrapped{k.id, ciphertext}.marshal(), nil
}

// Unwrap decrypts what [Key.Wrap] returned for the same keyContext. It returns the errors of Wrap,
// and [ErrForeign] for text that this key did not wrap for this context.
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
		k.calls.note(err)
		return nil, err
	}
	defer clear(plaintext)
	key, err := unbind(keyContext, plaintext)
	if err != nil {
		k.logger.Warn(failedCall, "call", "unwrapping", "error", err)
		return nil, err // no outcome: whether the service or the stored text is wrong, only a probe can tell
	}
	k.calls.note(nil)
	return key, nil
}

// Destroy destroys the key, so that nothing it wrapped can be opened any more. It returns the
// errors of [Key.Wrap]. The error for a key that must not be deleted names the remedy.
func (k *Key) Destroy(ctx context.Context) (d Destruction, err error) {
	err = k.try(ctx, "destroying", func(ctx context.Context) (err error) {
		d, err = k.service.destroy(ctx)
		return err
	})
	return d, err
}

// Close closes the connections to the service.
func (k *Key) Close() error { return k.service.close() }

func (k *Key) try(ctx context.Context, what string, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return try(ctx, k.logger, what, call)
}

// failedCall is the line of the log for a call that failed, whatever the reason.
const failedCall = "a call of the key-management service failed"

// try repeats a call while its error may pass, until the deadline of ctx. The pauses grow, and are
// random so that callers spread out. It returns the last error that came from the service, and logs
// only one attempt.
func try(ctx context.Context, logger *slog.Logger, what string, call func(context.Context) error) error {
	var last error
	told := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := call(ctx)
		if err == nil {
			return nil
		}
		if !errors.Is(err, fault.Unavailable) {
			if !errors.Is(err, context.Canceled) { // the caller left
				logger.Warn(failedCall, "call", what, "error", err)
			}
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		wait := pause/2 + rand.N(pause/2) //nolint:gosec // spreads retries, hides nothing
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
			if !told && !errors.Is(ctx.Err(), context.Canceled) {
				logger.Warn(failedCall, "call", what, "error", last)
			}
			return last
		}
		if !told {
			logger.Warn(failedCall+"; retrying", "call", what, "error", last)
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

// unavailable and forbidden return the two failures that all providers share.
func unavailable(err error) error {
	return fault.Outage(fault.ReasonKMS, "the key-management service cannot be reached or is busy: retry, and check it if this lasts", err)
}

func forbidden(err error) error {
	return fault.Wrap(fault.Forbidden, "the key-management service refuses this key: see that it is enabled, and that the server's credentials may use it", err)
}

// failed gives err its kind. passes reports whether the service allows a retry. A request that
// never reached the service may be repeated, unless the other end failed to authenticate.
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

// unfit returns the error for a key or a configuration that cannot be used.
func unfit(format string, args ...any) error {
	return fault.New(fault.Invalid, fmt.Sprintf(format, args...))
}

// needs returns the error for a missing permission to read the type of the key.
func needs(permission string, err error) error {
	if fault.Of(err) != fault.Forbidden {
		return err
	}
	return fault.Wrap(fault.Invalid, "the KMS key cannot be read: see that it exists, and give the server's credentials the permission "+permission, err)
}

// Options configure [Open]. Zero fields take the defaults.
type Options struct {
	TokenFile  string         // holds the token for Vault and OpenBao, read for every call; default VAULT_SERVER_TOKEN or VAULT_TOKEN
	PQRequired bool           // reject every key exchange with the service other than X25519MLKEM768
	RootCAs    *x509.CertPool // authorities for the service's certificate; default those of the provider's environment and the system
	Logger     *slog.Logger   // logs calls that are retried; default none
}
