package kms

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrCredentials marks failures that lie with this process, so that another replica may have better
// credentials: its token file is missing, unreadable or empty, or has another token than the one that
// worked and the service refuses that, or its platform gives it no credentials. Everything else is a
// failure that all replicas share: no answer, a sealed or overloaded service, a key that is disabled or
// deleted, and credentials that worked and are refused now, which were revoked at the service.
var ErrCredentials = errors.New("the credentials for the key-management service do not work")

func credentials(err error) error { return fmt.Errorf("%w: %w", ErrCredentials, err) }

// Outcome says how the latest calls of [Key.Wrap] and [Key.Unwrap] ended.
type Outcome struct {
	Succeeded time.Time // end of the last call that succeeded; zero: none
	Failed    time.Time // end of the last call that failed; zero: none
	Err       error     // error of the call that ended last; nil when it succeeded
}

// outcomes keeps an Outcome. The zero value is ready to use.
type outcomes struct {
	mu   sync.Mutex
	last Outcome
}

// note counts a call. A caller that left says nothing about the service, and neither does text that
// the key does not open.
func (o *outcomes) note(err error) {
	if errors.Is(err, context.Canceled) || errors.Is(err, ErrForeign) {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last.Err = err
	if err == nil {
		o.last.Succeeded = time.Now()
	} else {
		o.last.Failed = time.Now()
	}
}

// Outcome returns how the latest calls ended.
func (k *Key) Outcome() Outcome {
	k.calls.mu.Lock()
	defer k.calls.mu.Unlock()
	return k.calls.last
}
