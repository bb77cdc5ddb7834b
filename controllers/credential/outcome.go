package credential

import (
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// entryMissing reports that the vault has no entry for the object.
func (o *outcome) entryMissing() bool { return o.owned == nil || o.owned.Missing }

// matchesSpec reports whether the vault entry was made from the spec of sc.
func matchesSpec(owned *vault.Owned, sc *v1alpha1.SealedCredential) bool {
	return owned != nil && !owned.Missing && owned.SpecDigest == sealing.SpecDigest(sc)
}

// outcome is what one reconcile observed of an object. Together with the object and the time it decides the status.
type outcome struct {
	owned        *vault.Owned // what the vault holds for the object; nil for nothing
	entryKnown   bool         // owned is what the vault answered, not the lack of an answer
	entryCurrent bool         // owned holds what the spec says
	specRefused  *refusal     // why the spec cannot be applied as it is written
	err          error        // why something could not be done just now: it is tried again

	target          *v1alpha1.TargetStatus  // what the target Secret was seen to be; nil when it was not looked at
	targetRefused   *refusal                // why the target Secret cannot be what the spec says
	values          map[string]secret.Bytes // values of owned, if already opened
	targetDropped   bool                    // a former target was let go
	targetUnwritten bool                    // the trouble is that the target Secret could not be written
	targetDrifted   bool                    // the target Secret is not what it was, and is left alone
}

// refusal is a mistake of an object's author. It stands until the object changes, or the world around it does.
type refusal struct {
	reason    string
	err       error // its fault.Message goes into the condition
	transient bool  // something beside the object may mend it, which nobody tells the operator
}

// recordError records why the spec could not be applied: as its author's mistake, or as trouble that passes.
func (o *outcome) recordError(reason string, err error) {
	if fault.Of(err) == fault.Invalid {
		o.specRefused = &refusal{reason: reason, err: err}
	} else {
		o.err = err
	}
}

// recordAPIError records that the API server could not be asked about something beside the object, or did not take it. That it changed
// meanwhile, or that its namespace is terminating, is no trouble, and returned.
func (o *outcome) recordAPIError(err error) error {
	if err == nil || apierrors.IsConflict(err) || errors.Is(err, errTerminating) {
		return err
	}
	o.err = fault.Wrap(fault.Unavailable, "the API server does not answer as it should", apiError{err})
	return nil
}

// refuseTransiently records a mistake that something beside the object may mend.
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

// entryVersion is that of the vault entry, 0 for none.
func (o *outcome) entryVersion() uint64 {
	if o.owned == nil {
		return 0
	}
	return o.owned.Version
}

// Error makes a refusal an error on its way out of a Secret.
func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// refuseTarget is a refusal of a target: one that something beside the object may mend, unless the spec itself is wrong.
func refuseTarget(reason, format string, args ...any) *refusal {
	return &refusal{reason: reason, err: fault.New(fault.Invalid, "spec.target: "+fmt.Sprintf(format, args...)), transient: reason == v1alpha1.ReasonTargetConflict}
}
