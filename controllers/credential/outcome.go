package credential

import (
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// entryMissing reports whether the vault lacks an entry for the object.
func (o *outcome) entryMissing() bool { return o.owned == nil || o.owned.Missing }

// matchesSpec reports whether the vault entry was made from the current spec of sc.
func matchesSpec(owned *vault.Owned, sc *v1beta1.SealedCredential) bool {
	return owned != nil && !owned.Missing && owned.SpecDigest == sealing.SpecDigest(sc)
}

// outcome is what one reconcile observed. The object, the outcome and the time together determine
// the status.
type outcome struct {
	owned        *vault.Owned // the object's vault entry; nil for none
	entryKnown   bool         // the vault answered, so owned is valid
	entryCurrent bool         // owned was made from the current spec
	specRefused  *refusal     // why the spec cannot be applied
	err          error        // temporary failure; the operator retries

	target          *v1beta1.TargetStatus   // observed target Secret; nil if not observed
	targetRefused   *refusal                // why the target Secret cannot match the spec
	values          map[string]secret.Bytes // values of owned if already opened
	given           map[string]secret.Bytes // values that the target Secret was handed over with
	previousValues  string                  // what to do about the values of a previous object; empty for none
	targetDropped   bool                    // a previous target was deleted or released
	targetUnwritten bool                    // err is a failure to write the target Secret
	targetDrifted   bool                    // the target Secret changed and stays so while suspended
}

// refusal is a mistake of the object's author. It stands until the object or something around it
// changes.
type refusal struct {
	reason    string
	err       error // its fault.Message is shown in the condition
	transient bool  // a change outside the object may resolve it, without an event to the operator
}

// recordError records why the spec could not be applied: a fault.Invalid error as a refusal of the
// author's spec, any other as a failure to retry.
func (o *outcome) recordError(reason string, err error) {
	if fault.Of(err) == fault.Invalid {
		o.specRefused = &refusal{reason: reason, err: err}
	} else {
		o.err = err
	}
}

// recordAPIError records that a request to the API server failed. It records no conflict and no
// terminating namespace, but returns those errors: they are no failures.
func (o *outcome) recordAPIError(err error) error {
	if err == nil || apierrors.IsConflict(err) || errors.Is(err, errTerminating) {
		return err
	}
	o.err = fault.Outage(fault.ReasonCluster, "the API server does not answer as it should", apiError{err})
	return nil
}

// refuseTransiently records a refusal that a change outside the object may resolve.
func (o *outcome) refuseTransiently(reason, format string, args ...any) {
	o.specRefused = &refusal{reason: reason, err: fault.New(fault.Invalid, fmt.Sprintf(format, args...)), transient: true}
}

// setValues keeps values until the end of the reconcile.
func (o *outcome) setValues(values map[string]secret.Bytes) {
	o.zeroValues()
	o.values = values
}

// zeroValues overwrites the values.
func (o *outcome) zeroValues() {
	for _, value := range o.values {
		value.Zero()
	}
	o.values = nil
}

// zeroGiven overwrites the values that the target Secret was handed over with.
func (o *outcome) zeroGiven() {
	for _, value := range o.given {
		value.Zero()
	}
	o.given = nil
}

// entryVersion returns the version of the vault entry, or 0 for none.
func (o *outcome) entryVersion() uint64 {
	if o.owned == nil {
		return 0
	}
	return o.owned.Version
}

// Error implements error, so target functions can return a refusal.
func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// refuseTarget returns a refusal of a target. It is transient only for ReasonTargetConflict; any
// other reason means that the spec itself is wrong.
func refuseTarget(reason, format string, args ...any) *refusal {
	return &refusal{reason: reason, err: fault.New(fault.Invalid, "spec.target: "+fmt.Sprintf(format, args...)), transient: reason == v1beta1.ReasonTargetConflict}
}
