package identity

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
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Bounds of a password in bytes.
const (
	minPassword = 12
	maxPassword = 1024
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
	errPasswordBounds = fault.New(fault.Invalid, "a password has 12 to 1024 bytes")
	errPasswordsBusy  = fault.New(fault.Unavailable, "too many passwords are being checked at the moment: retry")
	errPasswordHash   = fault.New(fault.Internal, "a stored password hash is damaged: reset the password or restore a backup")
)

func checkPassword(p secret.Bytes) error {
	if len(p) < minPassword || len(p) > maxPassword {
		return errPasswordBounds
	}
	return nil
}

// passwordHash is an argon2id hash, stored as the PHC string $argon2id$v=19$m=…,t=…,p=…$salt$hash.
type passwordHash struct {
	memory, passes uint32
	lanes          uint8
	salt, hash     []byte
}

func (h passwordHash) String() string {
	b64 := base64.RawStdEncoding.EncodeToString
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, h.memory, h.passes, h.lanes, b64(h.salt), b64(h.hash))
}

// parsePasswordHash accepts exactly what String writes.
func parsePasswordHash(s string) (h passwordHash, err error) {
	parts := strings.Split(s, "$")
	if len(parts) != 6 {
		return h, errPasswordHash
	}
	_, err1 := fmt.Sscanf(parts[3], "m=%d,t=%d,p=%d", &h.memory, &h.passes, &h.lanes)
	var err2, err3 error
	h.salt, err2 = base64.RawStdEncoding.DecodeString(parts[4])
	h.hash, err3 = base64.RawStdEncoding.DecodeString(parts[5])
	if errors.Join(err1, err2, err3) != nil || h.String() != s || h.passes == 0 || h.lanes == 0 || len(h.hash) != hashSize {
		return h, errPasswordHash
	}
	return h, nil
}

func (h passwordHash) of(p secret.Bytes) []byte {
	return argon2.IDKey(p, h.salt, h.passes, h.memory, h.lanes, hashSize)
}

// passwords hashes and checks passwords, few at a time. Each takes 19 MiB and a core, and a flood
// of sign-ins must not starve everything else. While others wait, a slot rests after each hash, so
// the other work keeps most of the slots' cores. The zero value is ready.
type passwords struct {
	once    sync.Once
	slots   *semaphore.Weighted
	waiting atomic.Int64
	dummy   string // a hash that matches no password
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

func newHash() passwordHash {
	h := passwordHash{argonMemory, argonPasses, argonLanes, make([]byte, saltSize), make([]byte, hashSize)}
	_, _ = rand.Read(h.salt) // never fails
	_, _ = rand.Read(h.hash)
	return h
}

// start waits for a slot. Error: fault.Unavailable when too many callers wait already, or when ctx
// ends.
func (p *passwords) start(ctx context.Context) (done func(), err error) {
	p.once.Do(func() {
		p.slots = semaphore.NewWeighted(int64(max(1, runtime.GOMAXPROCS(0)/2)))
		p.dummy = newHash().String()
	})
	defer p.waiting.Add(-1)
	if p.waiting.Add(1) > maxWaiting {
		return nil, errPasswordsBusy
	}
	if err := p.slots.Acquire(ctx, 1); err != nil {
		return nil, fault.Wrap(fault.Unavailable, fault.Message(errPasswordsBusy), err)
	}
	began := time.Now()
	return func() { p.release(time.Since(began)) }, nil
}

// release gives back the slot of a hash that took the given time.
func (p *passwords) release(took time.Duration) {
	if p.waiting.Load() == 0 {
		p.slots.Release(1)
		return
	}
	time.AfterFunc(min(resting*took, longestRest), func() { p.slots.Release(1) })
}

// hash returns the PHC string of a new password.
func (p *passwords) hash(ctx context.Context, password secret.Bytes) (string, error) {
	done, err := p.start(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	h := newHash()
	h.hash = h.of(password)
	return h.String(), nil
}

// check reports whether the password matches a stored hash. An empty stored hash stands for an
// unknown user: check does the same work and returns false.
func (p *passwords) check(ctx context.Context, stored string, password secret.Bytes) (bool, error) {
	done, err := p.start(ctx)
	if err != nil {
		return false, err
	}
	defer done()
	h, err := parsePasswordHash(cmp.Or(stored, p.dummy))
	if err != nil {
		return false, err
	}
	same := subtle.ConstantTimeCompare(h.of(password), h.hash) == 1
	return same && stored != "", nil
}
