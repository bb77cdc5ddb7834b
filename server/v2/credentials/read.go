package credentials

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server/gate"
)

// These are the limits of waits. Each look reads a few rows in a view of its own, so that the store can reuse
// pages during a wait.
const (
	waitsOfCaller = 4
	waitsOfTenant = 256
	waitsOfAll    = 1024

	waitLook  = time.Second     // pause between two looks at the version
	waitCheck = 5 * time.Second // pause between two looks at the caller, and at what the name leads to

	looksAtOnce = 16 // looks in all; a wait that finds no room looks a second later
)

// reads answers reads of values.
type reads struct {
	vault *vault.Vault
	guard *guard.Guard
	waits *gate.Places
	looks *semaphore.Weighted
}

func newReads(v *vault.Vault, g *guard.Guard) *reads {
	return &reads{v, g, gate.NewPlaces(waitsOfCaller, waitsOfTenant, waitsOfAll), semaphore.NewWeighted(looksAtOnce)}
}

// answer answers a read with the values, or with 304 if the caller has the current version. With wait, it delays the
// 304 until there is another version or the time is over.
func (a *reads) answer(c *gin.Context, r vault.Reference, ifNoneMatch *string, wait *int) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		switch {
		case wait != nil && ifNoneMatch == nil:
			return nil, gate.BadRequest("wait needs the header If-None-Match, with the ETag of the version that you have")
		case wait != nil && !r.Changes():
			return nil, gate.BadRequest("wait and version exclude each other: a version does not change")
		case ifNoneMatch == nil:
			return unsealed(c)(a.vault.Read(ctx, call.Principal(), r))
		}
		w := waiting{reads: a, c: c, call: call, r: r, tags: vault.Condition(*ifNoneMatch)}
		if wait == nil {
			answer, _, err := w.answerNow(ctx, false)
			return answer, err
		}
		return w.startWait(ctx, time.Duration(*wait)*time.Second)
	})
}

// waiting is a read by a caller that has a version already.
type waiting struct {
	*reads
	c    *gin.Context
	call *gate.Call
	r    vault.Reference
	tags vault.Condition
}

// answerNow answers with the values, or with 304 if the caller has them.
func (w *waiting) answerNow(ctx context.Context, waits bool) (answer any, held *vault.Held, err error) {
	held, err = w.vault.FindHeld(ctx, w.call.Principal(), w.r, w.tags, waits)
	switch {
	case err != nil:
		return nil, nil, err
	case held != nil:
		return gate.NotModified{EntityTag: held.EntityTag}, held, nil
	}
	answer, err = unsealed(w.c)(w.vault.Read(ctx, w.call.Principal(), w.r))
	return answer, nil, err
}

// startWait is answerNow, but it waits for another version before it answers with 304.
//
//nolint:contextcheck // the wait outlasts the context of the request
func (w *waiting) startWait(ctx context.Context, most time.Duration) (any, error) {
	ended, end := context.WithCancel(context.Background())
	release, err := w.takePlace(ctx, w.call.Principal(), end)
	if err != nil {
		end()
		return nil, cmp.Or(w.guard.RecordAttemptOncePerMinute(ctx, w.call.Principal(), authz.UnsealCredential, audit.Failure, "too_many_waits"), err)
	}
	done, waits := func() { end(); release() }, false
	defer func() {
		if !waits { // also after a panic
			done()
		}
	}()
	answer, held, err := w.answerNow(ctx, true)
	if err != nil || held == nil {
		return answer, err
	}
	waits = true
	return gate.Later{
		Wait: func(ctx context.Context) error {
			defer done()
			ctx, cancel := context.WithTimeout(ctx, most)
			defer cancel()
			defer context.AfterFunc(ended, cancel)()
			return w.untilChanged(ctx, held.ID)
		},
		// The caller may have lost its rights meanwhile. The entry of the start stands for a 304.
		Then: func(ctx context.Context) (any, error) {
			if err := w.recheckCaller(ctx); err != nil {
				return nil, err
			}
			held, err := w.vault.StillHeld(ctx, w.call.Principal(), w.r, w.tags)
			switch {
			case err != nil:
				return nil, err
			case held != nil: // tags may name several versions
				return gate.NotModified{EntityTag: held.EntityTag}, nil
			}
			return unsealed(w.c)(w.vault.Read(ctx, w.call.Principal(), w.r))
		},
	}, nil
}

// takePlace takes a place for a wait. Error: fault.Exhausted, whoever has the places: a server without one serves
// other reads as ever, so this is no outage.
func (a *reads) takePlace(ctx context.Context, p authz.Principal, end func()) (release func(), err error) {
	if release, err = a.waits.Take(ctx, p, end); err != nil {
		return nil, fault.Exhausted
	}
	return release, nil
}

// untilChanged returns when the caller has not the newest version any more, or at the end of ctx. It looks at the
// credential by its id, which is cheaper, and now and then at what the name leads to. An outage does not end the
// wait. Error: the caller may not read any more.
func (w *waiting) untilChanged(ctx context.Context, id string) error {
	look, check := time.NewTicker(waitLook), time.NewTicker(waitCheck)
	defer look.Stop()
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-check.C:
			if err := w.recheckCaller(ctx); err != nil && !errors.Is(err, fault.Unavailable) && ctx.Err() == nil {
				return err
			}
			if w.isOther(ctx, w.r) {
				return nil
			}
		case <-look.C:
			if w.isOther(ctx, vault.ByID(id)) {
				return nil
			}
		}
	}
}

// isOther reports whether a look finds another version, or none.
func (w *waiting) isOther(ctx context.Context, r vault.Reference) bool {
	if !w.looks.TryAcquire(1) {
		return false
	}
	defer w.looks.Release(1)
	held, err := w.vault.StillHeld(ctx, w.call.Principal(), r, w.tags)
	return err == nil && held == nil
}

// recheckCaller looks the caller up again. A refusal has its entry.
func (w *waiting) recheckCaller(ctx context.Context) error {
	err := w.call.Still(ctx, w.c)
	reason := ""
	switch {
	case errors.Is(err, fault.Forbidden):
		reason = string(authz.MissingScope)
	case errors.Is(err, fault.Unauthenticated):
		reason = "caller_ended" // the key was revoked, or the token has expired
	default:
		return err
	}
	return cmp.Or(w.guard.RecordAttempt(ctx, w.call.Principal(), authz.UnsealCredential, audit.Denied, reason), err)
}

// unsealed returns the function that answers an unsealed credential, with its entity tag.
func unsealed(c *gin.Context) func(vault.Unsealed, error) (any, error) {
	return func(u vault.Unsealed, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		defer secret.ZeroAll(u.Values)
		c.Header("ETag", u.EntityTag())
		answer := api.UnsealedCredential{
			Success: true, CredentialId: u.ID, Name: u.Name, CredentialType: u.Type, Values: make(map[string]string),
			Version: int64(u.Version), CreatedAt: u.CreatedAt.UTC(), ExpiresAt: u.ExpiresAt.UTC(), NeverExpires: gate.NonZero(u.NeverExpires()),
		}
		binary := make(map[string][]byte)
		for key, value := range u.Values {
			if utf8.Valid(value) {
				answer.Values[key] = string(value)
			} else {
				binary[key] = append([]byte(nil), value...)
			}
		}
		if len(binary) > 0 {
			answer.BinaryValues = &binary
		}
		return answer, nil
	}
}
