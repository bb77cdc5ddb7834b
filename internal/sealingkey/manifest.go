package sealingkey

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// ErrDoesNotOpen is the only answer to values that are not resealed. It has no [fault.Kind],
// because unlike an invalid request it is recorded.
var ErrDoesNotOpen = sealing.ErrDoesNotOpen

// lookup returns the function with which package sealing finds private keys.
func (s *Service) lookup(ctx context.Context) func(string) (*envelope.SealingKey, error) {
	return func(id string) (*envelope.SealingKey, error) { return s.keys.SealingKey(ctx, id) }
}

func manifestEvent(what audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ManifestResource}}
}

// Reseal seals the values of obj for the current key. Only the sealed values and the fields that
// they are bound to have any influence. Errors: fault.Forbidden, fault.Invalid for an object that
// is visibly malformed, [ErrDoesNotOpen], fault.Unavailable.
func (s *Service) Reseal(ctx context.Context, p authz.Principal, obj *v1beta1.SealedCredential) (*v1beta1.Sealed, error) {
	if err := s.guard.Admit(ctx, p, authz.ResealManifest); err != nil {
		return nil, err
	}
	if err := s.guard.AuthorizePath(ctx, p, authz.ResealManifest, obj.Name); err != nil {
		return nil, err
	}
	if err := sealing.Check(obj); err != nil {
		return nil, fault.Wrap(fault.Invalid, "the manifest is malformed: see what is wrong with latticekeep validate", err)
	}
	document, err := s.keys.SealingDocument(ctx)
	if err != nil {
		return nil, err
	}
	if s.values.Acquire(ctx, 1) != nil {
		return nil, fault.Unavailable
	}
	again, err := sealing.Reseal(obj, s.lookup(ctx), document.Key())
	s.values.Release(1)
	e := manifestEvent(audit.ManifestResealed, p)
	if errors.Is(err, sealing.ErrDoesNotOpen) {
		return nil, s.guard.Refuse(ctx, e, audit.Failure, reasonOpen, ErrDoesNotOpen)
	}
	if err != nil {
		return nil, fmt.Errorf("resealing a manifest: %w", err)
	}
	e.Attributes = map[string]string{
		attributeFrom: obj.Spec.Sealed.KeyID, attributeTo: again.KeyID, attributeCount: strconv.Itoa(len(again.Values)),
	}
	if err := s.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return again, nil
}

// Code says why a manifest would be refused. It is empty when the manifest would be accepted.
type Code string

// These are the codes. An object with several mistakes gets the first code that applies.
const (
	Accepted    Code = ""
	Malformed   Code = "malformed"
	UnknownKey  Code = "unknown_key"
	RetiredKey  Code = "retired_key"
	DoesNotOpen Code = "does_not_open"
	NotAllowed  Code = "policy"
	OlderValue  Code = "older_value"
)

// Verdict is the answer of [Service.Check].
type Verdict struct {
	Code    Code
	Message string // remedy; empty when accepted
	Warning string // what the author should know about an accepted manifest
}

// unknownAge is the warning about values that may be older than the accepted ones.
const unknownAge = "it could not be found out whether the values are older than those that were last accepted; the condition Ready of the object will say"

// doesNotOpen is the same for every mistake and every value.
const doesNotOpen = "spec.sealed: the values do not open here: either they were sealed for another object, scope or credential type than this one, " +
	"or they were changed afterwards; restore the manifest as it was sealed, or seal the values again for this object (latticekeep seal)"

// Check reports whether obj would be accepted: whether its values open, if it has sealed ones, and
// whether the policy allows it. With a UID, it also reports whether the values are older than those
// last accepted for that object. Without a UID the object may be new, so newer values of one with its
// name are only a warning. A refused manifest is a verdict and not an error. Errors:
// fault.Forbidden; fault.Unavailable, also when the semaphore stays full until ctx ends.
func (s *Service) Check(ctx context.Context, p authz.Principal, obj *v1beta1.SealedCredential) (Verdict, error) {
	if err := s.guard.Admit(ctx, p, authz.CheckManifest); err != nil {
		return Verdict{}, err
	}
	if err := s.guard.AuthorizePath(ctx, p, authz.CheckManifest, obj.Name); err != nil {
		return Verdict{}, err
	}
	slots, record := s.values, s.guard.Record
	if p.Kind == authz.ServiceAccount {
		slots, record = s.reviews, s.guard.RecordOncePerMinute
	}
	v, err := s.judge(ctx, obj, slots)
	if err == nil && v.Code == Accepted {
		v = s.judgeAge(ctx, p, obj)
	}
	if err != nil {
		return Verdict{}, fmt.Errorf("checking a manifest: %w", err)
	}
	e := manifestEvent(audit.ManifestChecked, p)
	e.Attributes = map[string]string{attributeVerdict: "accepted"}
	if v.Code != Accepted {
		e.Attributes[attributeVerdict] = string(v.Code)
	}
	if err := record(ctx, e); err != nil {
		return Verdict{}, err
	}
	return v, nil
}

// judge first checks what needs no private key. For an object without sealed values the caller
// passes no source of values, and only the policy decides.
func (s *Service) judge(ctx context.Context, obj *v1beta1.SealedCredential, slots *semaphore.Weighted) (Verdict, error) {
	if obj.Spec.Sealed != nil {
		if err := sealing.Check(obj); err != nil {
			return Verdict{Code: Malformed, Message: fault.Message(err)}, nil
		}
	}
	if err := s.options.Policy.Check(obj); err != nil {
		return Verdict{Code: NotAllowed, Message: fault.Message(err)}, nil
	}
	if obj.Spec.Sealed == nil {
		return Verdict{}, nil
	}
	if slots.Acquire(ctx, 1) != nil {
		return Verdict{}, fault.Unavailable
	}
	defer slots.Release(1)
	values, err := sealing.Open(obj, s.lookup(ctx))
	for _, value := range values {
		value.Zero()
	}
	switch {
	case err == nil:
		return Verdict{}, nil
	case errors.Is(err, keyring.ErrRetired):
		return Verdict{Code: RetiredKey, Message: fault.Message(err)}, nil
	case errors.Is(err, fault.NotFound):
		return Verdict{Code: UnknownKey, Message: fault.Message(err)}, nil
	case fault.Of(err) == fault.Invalid:
		return Verdict{Code: DoesNotOpen, Message: doesNotOpen}, nil
	}
	return Verdict{}, err
}

// judgeAge compares the ages of values that open with those of the accepted ones.
func (s *Service) judgeAge(ctx context.Context, p authz.Principal, obj *v1beta1.SealedCredential) Verdict {
	if obj.Spec.Sealed == nil || obj.Spec.Sealed.AllowOlder || s.options.Accepted == nil {
		return Verdict{}
	}
	accepted, err := s.options.Accepted(ctx, p, obj)
	if err != nil {
		return Verdict{Warning: unknownAge} // the operator compares them too
	}
	switch older := sealing.Older(obj, accepted); {
	case older == nil:
		return Verdict{}
	case obj.UID == "":
		return Verdict{Warning: "an object with this name has newer values in the vault: " + fault.Message(older)}
	default:
		return Verdict{Code: OlderValue, Message: fault.Message(older)}
	}
}
