// Package agent keeps the files of a pod or of a service up to date with credentials.
//
// An [Agent] reads over REST as the ServiceAccount of a token or with an API key, writes files into a folder in
// memory, and waits for the next version of each credential. It never takes a file away because it can read
// no more: each file stays until there is a newer one.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	maxWaits    = 4                // credentials that are waited for; the server allows no more
	waitSeconds = 55               // seconds of a wait
	pollPause   = time.Minute      // between reads of the other credentials
	busyPause   = 10 * time.Minute // for which such reads stand in for a wait that the server had no place for
	firstPause  = time.Second      // pause after a failure, and twice as long after each further one
	lastPause   = 30 * time.Second // longest such pause

	// A wait ends sooner when the server stops or needs the place, or when a proxy takes the wait away. The next one
	// begins after a pause then, as after a failure.
	shortestWait = 10 * time.Second
)

// Config configures [New].
type Config struct {
	Server    *delivery.Server
	TokenFile string // file with the ServiceAccount's token, read again for each read; "": the API key of the server
	Plan      delivery.Plan
	Dir       string
	Logger    *slog.Logger
}

// Agent keeps the files of a plan. [Agent.Write] is called before [Agent.Follow].
type Agent struct {
	c    Config
	dir  *os.Root
	lock *os.File // the folder, locked against another agent

	mu      sync.Mutex
	current map[string]delivery.Credential // keyed by name
}

// New returns an agent for a folder that exists. The caller calls [Agent.Close].
func New(c Config) (*Agent, error) {
	dir, err := os.OpenRoot(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("opening the folder of --into: %w", err)
	}
	lock, err := dir.Open(".")
	if err == nil {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		_ = lock.Close() // does nothing without a file
		_ = dir.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errors.New("another agent writes there: give each its own")
		}
		return nil, fmt.Errorf("locking the folder of --into: %w", err)
	}
	return &Agent{c: c, dir: dir, lock: lock, current: make(map[string]delivery.Credential)}, nil
}

// Close overwrites the values in memory. The files stay.
func (a *Agent) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.current {
		c.Zero()
	}
	return errors.Join(a.lock.Close(), a.dir.Close())
}

// Write reads all credentials and writes all files. What may pass is tried again until ctx ends. Errors: those of
// [delivery.Server.Read] and [delivery.Plan.Render].
func (a *Agent) Write(ctx context.Context) error {
	for _, name := range a.c.Plan.Credentials() {
		var c delivery.Credential
		err := a.retry(ctx, func() (err error) {
			c, err = a.read(ctx, name)
			return err
		})
		if err != nil {
			return err
		}
		a.mu.Lock()
		a.current[name].Zero()
		a.current[name] = c
		a.mu.Unlock()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.write(a.current)
}

// retry calls do until it succeeds, fails for good, or ctx ends. It returns the last error of do.
func (a *Agent) retry(ctx context.Context, do func() error) error {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := do()
		if err == nil || !errors.Is(err, fault.Unavailable) && !errors.Is(err, fault.Exhausted) || ctx.Err() != nil {
			return err
		}
		a.c.Logger.Warn("not written yet; retrying", "in", pause, "error", textOf(err))
		if !sleep(ctx, pause) {
			return err
		}
	}
}

func (a *Agent) read(ctx context.Context, name string, options ...client.CallOption) (delivery.Credential, error) {
	token := ""
	if a.c.TokenFile != "" {
		b, err := os.ReadFile(a.c.TokenFile)
		if err != nil {
			return delivery.Credential{}, fault.Wrap(fault.Unavailable, "reading --token-file: "+err.Error()+": mount a projected serviceAccountToken with the audience "+delivery.Audience, err)
		}
		token = strings.TrimSpace(string(b))
	}
	return a.c.Server.Read(ctx, token, name, options...)
}

// write writes the files of credentials.
func (a *Agent) write(of map[string]delivery.Credential) error {
	values := make(map[string]map[string]secret.Bytes)
	for name, c := range of {
		values[name] = c.Values
	}
	files, err := a.c.Plan.Render(values)
	if err != nil {
		return err
	}
	defer delivery.Zero(files)
	leftover, err := write(a.dir, files, time.Now())
	if leftover != nil {
		a.c.Logger.Warn("the new files are there, and some of the previous ones cannot be removed: run all agents of the folder as one user", "error", leftover)
	}
	return err
}

// Follow writes the files again after each change, and then calls changed, until ctx ends.
func (a *Agent) Follow(ctx context.Context, changed func()) {
	var all sync.WaitGroup
	for i, name := range a.c.Plan.Credentials() {
		all.Go(func() { a.follow(ctx, name, i < maxWaits, changed) })
	}
	all.Wait()
}

// follow follows one credential. It logs the first of the same failures in a row, and that they are over.
func (a *Agent) follow(ctx context.Context, name string, waits bool, changed func()) {
	pause, said := firstPause, ""
	var busy time.Time // until then the server has no place for a wait
	stale := false     // the newest version could not be written; stays so while there is none after it
	for ctx.Err() == nil {
		begun := time.Now()
		had := a.held(name)
		waits := waits && had.Tag != "" && begun.After(busy) // a proxy may take the tag away
		next, err := a.next(ctx, name, had, waits)
		if waits && errors.Is(err, fault.Exhausted) {
			busy = begun.Add(busyPause)
			continue
		}
		if err == nil {
			err = a.replace(name, next)
			stale = err != nil
		}
		if ctx.Err() != nil {
			return
		}
		readable := err == nil || errors.Is(err, client.ErrNotModified)
		if readable && !stale && said != "" {
			said = ""
			a.c.Logger.Info("the credential can be read again", "credential", name)
		}
		switch {
		case err == nil:
			pause = firstPause
			a.c.Logger.Info("wrote a new version", "credential", name, "version", next.Version)
			changed()
			continue
		case readable && !waits:
			pause = pollPause
		case readable && time.Since(begun) >= shortestWait:
			pause = firstPause
			continue
		case !readable:
			if kind := kindOf(err); kind != said {
				said = kind
				a.c.Logger.Warn("the files that are there stay", "credential", name, "error", textOf(err))
			}
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, lastPause)
	}
}

// kindOf returns what a failure has in common with the same ones after it. The message of one that may pass does not
// do: it names a request or a port.
func kindOf(err error) string {
	switch fault.Of(err) {
	case fault.Unavailable, fault.Exhausted:
		return fault.Of(err).Error()
	}
	return textOf(err)
}

// textOf returns the message of an error, or the error itself if it is one of this machine.
func textOf(err error) string {
	if fault.Of(err) == fault.Internal {
		return err.Error()
	}
	return fault.Message(err)
}

// next reads the next version, once there is one. Otherwise the error is [client.ErrNotModified], also where a proxy
// takes the condition away, so that the version comes again.
func (a *Agent) next(ctx context.Context, name string, had delivery.Credential, waits bool) (delivery.Credential, error) {
	options := []client.CallOption{client.OtherThan(had.Tag)}
	if waits {
		options = append(options, client.Wait(waitSeconds))
	}
	next, err := a.read(ctx, name, options...)
	if err == nil && next.ID == had.ID && next.Version == had.Version {
		next.Zero()
		return delivery.Credential{}, client.ErrNotModified
	}
	return next, err
}

// held returns the version of a credential that the files are made of.
func (a *Agent) held(name string) delivery.Credential {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.current[name]
}

// replace writes the files with another version of a credential. A version that the plan does not fit is passed
// over until the next one; after another failure it is read and tried again.
func (a *Agent) replace(name string, next delivery.Credential) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	previous := a.current[name]
	a.current[name] = next
	if err := a.write(a.current); err != nil {
		if errors.Is(err, fault.Invalid) {
			previous.Tag = next.Tag
		}
		a.current[name] = previous
		next.Zero()
		return err
	}
	previous.Zero()
	return nil
}

// sleep returns false if ctx ends first. A part of the pause is random, so that many agents do not come back at
// the same instant.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause/2 + rand.N(pause/2+1)) //nolint:gosec // spreads retries, hides nothing
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
