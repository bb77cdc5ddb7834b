// Package password hashes passwords with argon2id and checks them, few at a time. Nothing is stored
// here. Each check takes the same work, whether there is such a user or not.
package password

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/argon2"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Bounds of a password in bytes.
const (
	minSize = 12
	maxSize = 1024
)

// Parameters of argon2id (RFC 9106): the OWASP minimum, about 25 ms of one core. A stored hash
// names its own parameters, so these can be raised.
const (
	argonMemory = 19 << 10 // KiB
	argonPasses = 2
	argonLanes  = 1
	saltSize    = 16
	hashSize    = 32
)

var (
	errBounds = fault.New(fault.Invalid, "a password has 12 to 1024 bytes")
	errBusy   = fault.Outage(fault.ReasonOverload, "too many passwords are being checked at the moment: retry", nil)
	errHash   = fault.New(fault.Internal, "a stored password hash is damaged: reset the password, or find the row with latticekeep doctor and restore a backup")
)

// Validate refuses a new password that is too short or too long. Error: fault.Invalid.
func Validate(p secret.Bytes) error {
	if len(p) < minSize || len(p) > maxSize {
		return errBounds
	}
	return nil
}

// phc is an argon2id hash, stored as the PHC string $argon2id$v=19$m=…,t=…,p=…$salt$hash.
type phc struct {
	memory, passes uint32
	lanes          uint8
	salt, hash     []byte
}

func (h phc) String() string {
	b64 := base64.RawStdEncoding.EncodeToString
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, h.memory, h.passes, h.lanes, b64(h.salt), b64(h.hash))
}

// parsePHC accepts exactly what String writes.
func parsePHC(s string) (h phc, err error) {
	parts := strings.Split(s, "$")
	if len(parts) != 6 {
		return h, errHash
	}
	_, err1 := fmt.Sscanf(parts[3], "m=%d,t=%d,p=%d", &h.memory, &h.passes, &h.lanes)
	var err2, err3 error
	h.salt, err2 = base64.RawStdEncoding.DecodeString(parts[4])
	h.hash, err3 = base64.RawStdEncoding.DecodeString(parts[5])
	if errors.Join(err1, err2, err3) != nil || h.String() != s || h.passes == 0 || h.lanes == 0 || len(h.hash) != hashSize {
		return h, errHash
	}
	return h, nil
}

func (h phc) of(p secret.Bytes) []byte {
	return argon2.IDKey(p, h.salt, h.passes, h.memory, h.lanes, hashSize)
}

// Hasher hashes and checks passwords, few at a time. Each takes 19 MiB and a core, and a flood of
// sign-ins must not starve everything else. While others wait, a slot rests after each hash, so the
// other work keeps most of the slots' cores. The zero value is ready.
type Hasher struct {
	once    sync.Once
	slots   *semaphore.Weighted
	waiting atomic.Int64
	dummy   string // see Unmatchable
}

const (
	// maxWaiting bounds the queue. A longer queue would take too long to work off, so the caller
	// gets an error and retries later.
	maxWaiting = 16
	// resting is how long a slot rests while others wait, as a multiple of the time of its hash.
	resting = 3
	// longestRest bounds the rest. Something else, such as a stopped process, can make one hash
	// very slow, and that must not block all sign-ins afterwards.
	longestRest = time.Second
)

// Unmatchable returns the PHC string of a hash that matches no password.
func Unmatchable() string { return newHash().String() }

func newHash() phc {
	h := phc{argonMemory, argonPasses, argonLanes, make([]byte, saltSize), make([]byte, hashSize)}
	_, _ = rand.Read(h.salt) // never fails
	_, _ = rand.Read(h.hash)
	return h
}

// start waits for a slot. Error: fault.Unavailable when too many callers wait already, or when ctx
// ends.
func (h *Hasher) start(ctx context.Context) (done func(), err error) {
	h.once.Do(func() {
		h.slots = semaphore.NewWeighted(int64(memory.Share(4, argonMemory<<10, runtime.GOMAXPROCS(0)/2)))
		h.dummy = Unmatchable()
	})
	defer h.waiting.Add(-1)
	if h.waiting.Add(1) > maxWaiting {
		return nil, errBusy
	}
	if err := h.slots.Acquire(ctx, 1); err != nil {
		return nil, fault.Outage(fault.ReasonOverload, fault.Message(errBusy), err)
	}
	began := time.Now()
	return func() { h.release(time.Since(began)) }, nil
}

// release gives back the slot of a hash that took the given time.
func (h *Hasher) release(took time.Duration) {
	if h.waiting.Load() == 0 {
		h.slots.Release(1)
		return
	}
	time.AfterFunc(min(resting*took, longestRest), func() { h.slots.Release(1) })
}

// Hash returns the PHC string of a new password. Error: fault.Unavailable.
func (h *Hasher) Hash(ctx context.Context, password secret.Bytes) (string, error) {
	done, err := h.start(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	fresh := newHash()
	fresh.hash = fresh.of(password)
	return fresh.String(), nil
}

// Matches reports whether the password matches a stored hash. An empty stored hash stands for an
// unknown user: Matches does the same work and returns false. Errors: fault.Unavailable,
// fault.Internal for a damaged hash.
func (h *Hasher) Matches(ctx context.Context, stored string, password secret.Bytes) (bool, error) {
	done, err := h.start(ctx)
	if err != nil {
		return false, err
	}
	defer done()
	known, err := parsePHC(cmp.Or(stored, h.dummy))
	if err != nil {
		return false, err
	}
	same := subtle.ConstantTimeCompare(known.of(password), known.hash) == 1
	return same && stored != "", nil
}
