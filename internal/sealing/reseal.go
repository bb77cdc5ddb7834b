package sealing

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// ErrDoesNotOpen is the only answer of [Reseal] to values that do not open, whatever the reason: an
// unknown or retired key, another suite, or values that were changed or sealed for something else.
var ErrDoesNotOpen = errors.New("the values do not open")

// Reseal opens the values of obj and seals them again for another key. Only suite and key id change
// in the header. Scope, namespace, name, credential type, data keys and times stay, and nothing
// else in obj has any influence. A plaintext goes from one key to the other. It is never shown or
// compared, decides nothing, and is zeroed.
//
// Errors: [fault.Invalid] for an obj that is visibly malformed; [ErrDoesNotOpen]; a failure of
// lookup other than fault.NotFound, wrapped.
func Reseal(obj *v1beta1.SealedCredential, lookup func(keyID string) (*envelope.SealingKey, error), to *envelope.SealingPublicKey) (*v1beta1.Sealed, error) {
	sealed := obj.Spec.Sealed
	if sealed == nil {
		return nil, errNotSealed
	}
	if found := check(obj); len(found) > 0 {
		return nil, invalid(found)
	}
	key, err := lookup(sealed.KeyID)
	if errors.Is(err, fault.NotFound) {
		return nil, ErrDoesNotOpen
	}
	if err != nil {
		return nil, fmt.Errorf("looking up sealing key %s: %w", sealed.KeyID, err)
	}
	from := header(&obj.Spec, obj.Namespace, obj.Name)
	under := from
	under.Suite, under.KeyID = to.Suite(), to.ID()
	again := &v1beta1.Sealed{
		Version:    v1beta1.SealedVersion,
		Suite:      v1beta1.Suite(under.Suite),
		KeyID:      under.KeyID,
		Scope:      v1beta1.Scope(under.Scope),
		Values:     make(map[string]v1beta1.SealedValue, len(sealed.Values)),
		AllowOlder: sealed.AllowOlder,
	}
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		v := sealed.Values[k]
		plaintext, err := openValue(key, from, k, v)
		if err != nil {
			return nil, ErrDoesNotOpen
		}
		data, err := to.SealValue(under, k, v.SealedAt.UTC(), plaintext)
		plaintext.Zero()
		if err != nil {
			return nil, fmt.Errorf("sealing a value again: %w", err)
		}
		again.Values[k] = v1beta1.SealedValue{SealedAt: metav1.Time{Time: v.SealedAt.UTC()}, Data: base64.StdEncoding.EncodeToString(data)}
	}
	if found := checkSealed(again); len(found) > 0 { // another suite may need more room
		return nil, invalid(found)
	}
	return again, nil
}
