// Package kmstest runs key-management services on loopback for tests and benchmarks. They implement
// the wire protocols of Vault's Transit engine, AWS KMS and Google Cloud KMS as far as this product
// uses them, and are as strict as the real services about that part.
//
// They encrypt for real, keep keys in memory and count calls. They can be slow, throttle, fail,
// drop connections, and refuse as the real ones do when a permission is revoked or a key is
// disabled. No part of the product imports this package.
package kmstest

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"
)

// DefaultKey is the name of the key that every server starts with.
const DefaultKey = "latticekeep"

// Server is a running service. Its methods may be called at any time.
type Server struct {
	listener net.Listener
	tls      *tls.Config
	stop     func()
	url      func(key string) string // returns kms.url of a key
	env      func() []string

	mu        sync.Mutex
	keys      map[string]*key
	token     string // Vault: accepted token
	sealed    bool   // Vault: sealed
	namespace string // Vault: required namespace
	latency   time.Duration
	throttle  float64
	random    *mathrand.Rand
	failing   bool
	dropping  bool
	garbling  bool // Vault
	revoked   bool
	forbidden map[string]bool // refused operations
	calls     map[string]int
	inFlight  int
	peak      int
}

// key is a named key with numbered versions of AES-256 keys.
type key struct {
	name, kind  string
	disabled    bool
	derived     bool              // Vault: each call needs a context
	versions    map[int][]byte    // AES-256 keys
	destroyed   map[int]time.Time // Google: versions and the times of their destruction
	latest      int
	oldest      int // Vault: oldest version that still decrypts
	deletable   bool
	gone        time.Time // AWS: scheduled time of deletion
	multiRegion bool      // AWS
	created     time.Time
}

// Option configures a server before it starts.
type Option func(*Server)

// TLS makes a server speak TLS with this configuration.
func TLS(config *tls.Config) Option { return func(s *Server) { s.tls = config } }

// start starts a server whose requests handler answers.
func start(handler func(*Server) http.Handler, options []Option) (*Server, error) {
	s, err := listen(options)
	if err != nil {
		return nil, err
	}
	h := &http.Server{Handler: handler(s), ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	s.stop = func() { _ = h.Close() }
	go func() { _ = h.Serve(s.listener) }()
	return s, nil
}

func listen(options []Option) (*Server, error) {
	s := &Server{keys: make(map[string]*key), calls: make(map[string]int), forbidden: make(map[string]bool), random: mathrand.New(mathrand.NewPCG(1, 2))}
	for _, o := range options {
		o(s)
	}
	var err error
	if s.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	if s.tls != nil {
		s.listener = tls.NewListener(s.listener, s.tls)
	}
	return s, nil
}

// Close stops the server and closes its connections.
func (s *Server) Close() { s.stop() }

// URL returns kms.url for the default key.
func (s *Server) URL() string { return s.url(DefaultKey) }

// KeyURL returns kms.url for a key.
func (s *Server) KeyURL(name string) string { return s.url(name) }

// Env returns the environment variables that a process needs to use the server, as NAME=value.
func (s *Server) Env() []string { return s.env() }

// Address returns the server's host and port.
func (s *Server) Address() string { return s.listener.Addr().String() }

func (s *Server) base() string {
	if s.tls != nil {
		return "https://" + s.Address()
	}
	return "http://" + s.Address()
}

// SetLatency delays every call.
func (s *Server) SetLatency(d time.Duration) { s.locked(func() { s.latency = d }) }

// SetThrottle refuses a share of the calls with the provider's "too many requests". The calls are
// chosen at random with a fixed seed.
func (s *Server) SetThrottle(share float64) { s.locked(func() { s.throttle = share }) }

// SetFailing answers every call with the provider's internal error.
func (s *Server) SetFailing(on bool) { s.locked(func() { s.failing = on }) }

// SetDropping closes the connection of every call without an answer.
func (s *Server) SetDropping(on bool) { s.locked(func() { s.dropping = on }) }

// SetGarbling has what Vault decrypts be something else.
func (s *Server) SetGarbling(on bool) { s.locked(func() { s.garbling = on }) }

// SetRevoked refuses every call as if its permission was revoked.
func (s *Server) SetRevoked(on bool) { s.locked(func() { s.revoked = on }) }

// SetForbidden refuses the calls of one operation, named as for [Server.CallsOf].
func (s *Server) SetForbidden(operation string, on bool) {
	s.locked(func() { s.forbidden[operation] = on })
}

// SetDisabled disables or enables a key. Vault has no disabled keys, so there it revokes the
// permission for the key.
func (s *Server) SetDisabled(name string, on bool) { s.locked(func() { s.keys[name].disabled = on }) }

// AddKey creates a key of one of the provider's kinds, such as rsa-2048. An empty kind is the
// provider's AES-256.
func (s *Server) AddKey(name, kind string) {
	s.locked(func() { s.keys[name] = newKey(name, kind) })
}

// Rotate creates a new version of a key. Ciphertexts of older versions can still be opened.
func (s *Server) Rotate(name string) { s.locked(func() { s.keys[name].rotate() }) }

// Exists reports whether the key exists. A key that is scheduled for deletion still exists.
func (s *Server) Exists(name string) (ok bool) {
	s.locked(func() { _, ok = s.keys[name] })
	return ok
}

// Calls returns the number of calls, whatever their result.
func (s *Server) Calls() (n int) {
	s.locked(func() {
		for _, c := range s.calls {
			n += c
		}
	})
	return n
}

// CallsOf returns the number of calls by operation: encrypt, decrypt, describe, delete, or the
// provider's own name for others.
func (s *Server) CallsOf() (calls map[string]int) {
	s.locked(func() { calls = maps.Clone(s.calls) })
	return calls
}

// ResetCalls sets all counts to zero.
func (s *Server) ResetCalls() { s.locked(func() { clear(s.calls); s.peak = s.inFlight }) }

// InFlight returns the number of calls that wait for their answer.
func (s *Server) InFlight() (n int) {
	s.locked(func() { n = s.inFlight })
	return n
}

// Peak returns the largest number of concurrent calls so far.
func (s *Server) Peak() (n int) {
	s.locked(func() { n = s.peak })
	return n
}

func (s *Server) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// Errors that a call may be made to fail with.
var (
	errThrottled = errors.New("throttled")
	errFailing   = errors.New("failing")
	errDropped   = errors.New("dropped")
	errForbidden = errors.New("forbidden")
)

// befall counts a call, delays it, and returns the error that it must fail with, if any. The caller
// calls done after the answer.
func (s *Server) befall(ctx context.Context, operation string) (done func(), err error) {
	s.mu.Lock()
	s.calls[operation]++
	s.inFlight++
	s.peak = max(s.peak, s.inFlight)
	latency, failing, dropping := s.latency, s.failing, s.dropping
	forbidden := s.revoked || s.forbidden[operation]
	throttled := s.throttle > 0 && s.random.Float64() < s.throttle
	s.mu.Unlock()
	done = func() { s.locked(func() { s.inFlight-- }) }
	if latency > 0 {
		timer := time.NewTimer(latency)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return done, errDropped
		}
	}
	switch {
	case dropping:
		return done, errDropped
	case throttled:
		return done, errThrottled
	case failing:
		return done, errFailing
	case forbidden:
		return done, errForbidden
	}
	return done, nil
}

// hangUp closes the connection of an HTTP request without an answer.
func hangUp(w http.ResponseWriter) {
	if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
		_ = c.Close()
	}
}

func newKey(name, kind string) *key {
	k := &key{name: name, kind: kind, versions: make(map[int][]byte), destroyed: make(map[int]time.Time), oldest: 1, created: time.Now()}
	k.rotate()
	return k
}

func (k *key) rotate() {
	k.latest++
	k.versions[k.latest] = random(32)
}

func newAEAD(key []byte) cipher.AEAD {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // the key has 32 bytes
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err)
	}
	return aead
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}
