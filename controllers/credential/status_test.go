package credential

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault"
)

const day = 24 * time.Hour

var (
	epoch      = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	errDown    = fault.Wrap(fault.Unavailable, "the vault is down", errors.New("secret detail for the log"))
	errRefused = &refusal{reason: v1beta1.ReasonInvalidSealed, err: fault.New(fault.Invalid, "the values do not open")}
)

// ownedAt is a version that lives ninety days from at.
func ownedAt(version uint64, at time.Time) *vault.Owned {
	return &vault.Owned{
		Credential: vault.Credential{ID: "cred_one", Version: version, SealedAt: at, ExpiresAt: at.Add(90 * day)},
		Trigger:    "first", SealingKey: "key", ValuesChangedAt: at,
		Audit: audit.Receipt{Sequence: 40 + version, Hash: strings.Repeat("ab", 32)},
	}
}

// conditions writes them as "Ready=False/Reason Stalled=True/Reason", without Expiring while that is false.
func conditions(s v1beta1.SealedCredentialStatus) string {
	var text []string
	for _, c := range s.Conditions {
		if c.Type == v1beta1.ConditionExpiring && c.Status == metav1.ConditionFalse {
			continue
		}
		text = append(text, c.Type+"="+string(c.Status)+"/"+c.Reason)
	}
	return strings.Join(text, " ")
}

func TestStatusSaysWhatWasObserved(t *testing.T) {
	// An object of generation 2 that was sealed as of generation 1 at epoch, looked at an hour later.
	sealed := func() *v1beta1.SealedCredential {
		sc := new(v1beta1.SealedCredential)
		sc.Generation, sc.Status.ObservedGeneration = 1, -1
		sc.Spec.Sealed = &v1beta1.Sealed{KeyID: "old"}
		sc.Status = (&outcome{owned: ownedAt(1, epoch), entryKnown: true, entryCurrent: true}).status(sc, epoch)
		sc.Generation, sc.Spec.Sealed.KeyID = 2, "new"
		return sc
	}
	unseen := func() *v1beta1.SealedCredential {
		sc := sealed()
		sc.Status = v1beta1.SealedCredentialStatus{ObservedGeneration: -1}
		return sc
	}
	suspended := func() *v1beta1.SealedCredential {
		sc := sealed()
		sc.Spec.Suspend = true
		return sc
	}
	deleted := func() *v1beta1.SealedCredential {
		sc := sealed()
		sc.DeletionTimestamp = &metav1.Time{Time: epoch}
		return sc
	}
	missing := &vault.Owned{Credential: vault.Credential{ID: "cred_one", Version: 1}, Trigger: "first", SealingKey: "key", Missing: true}

	for name, c := range map[string]struct {
		object     func() *v1beta1.SealedCredential
		saw        outcome
		now        time.Time // default an hour after epoch
		conditions string
		observed   int64
		version    int64
		key        string
		rotation   bool   // nextRotationTime is set
		message    string // part of the last condition's
	}{
		"sealed for the first time": {
			object: unseen, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, entryCurrent: true},
			conditions: "Ready=True/Sealed", observed: 2, version: 1, key: "key", rotation: true,
			message: "version 1 is served until 2026-05-30T12:00:00Z",
		},
		"sealed again": {
			object: sealed, saw: outcome{owned: ownedAt(2, epoch.Add(time.Hour)), entryKnown: true, entryCurrent: true},
			conditions: "Ready=True/Sealed", observed: 2, version: 2, key: "key", rotation: true,
		},
		"the vault has never answered": {
			object: unseen, saw: outcome{err: errDown},
			conditions: "Ready=False/VaultUnavailable Reconciling=True/VaultUnavailable", observed: -1,
			message: "the vault is down; the operator retries",
		},
		"the vault does not answer": {
			object: sealed, saw: outcome{err: errDown},
			conditions: "Ready=True/Sealed Reconciling=True/VaultUnavailable", observed: 1, version: 1, key: "key", rotation: true,
		},
		"the vault does not answer and the version has expired": {
			object: sealed, saw: outcome{err: errDown}, now: epoch.Add(90 * day),
			conditions: "Ready=False/VaultUnavailable Reconciling=True/VaultUnavailable Expiring=True/Expired", observed: 1, version: 1, key: "key", rotation: true,
		},
		"the change could not be sealed": {
			object: sealed, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, err: errDown},
			conditions: "Ready=True/Sealed Reconciling=True/VaultUnavailable", observed: 1, version: 1, key: "key", rotation: true,
		},
		"refused from the start": {
			object: unseen, saw: outcome{entryKnown: true, specRefused: errRefused},
			conditions: "Ready=False/InvalidSealed Stalled=True/InvalidSealed", observed: 2,
			message: "the values do not open",
		},
		"refused while a version serves": {
			object: sealed, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, specRefused: errRefused},
			conditions: "Ready=False/InvalidSealed Stalled=True/InvalidSealed", observed: 2, version: 1, key: "key", rotation: true,
		},
		"refused and the version cannot be rotated": {
			object: sealed, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, specRefused: errRefused, err: errDown},
			conditions: "Ready=False/InvalidSealed Reconciling=True/VaultUnavailable Stalled=True/InvalidSealed",
			observed:   2, version: 1, key: "key", rotation: true,
		},
		"refused and the entry is gone": {
			object: sealed, saw: outcome{owned: missing, entryKnown: true, specRefused: errRefused},
			conditions: "Ready=False/InvalidSealed Stalled=True/InvalidSealed", observed: 2, version: 1, key: "key",
		},
		"suspended": {
			object: suspended, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, entryCurrent: true},
			conditions: "Ready=True/Suspended", observed: 2, version: 1, key: "key",
			message: "suspended: nothing is sealed or rotated; version 1 is served until 2026-05-30T12:00:00Z",
		},
		"suspended with another spec than is served": {
			object: suspended, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true},
			conditions: "Ready=False/Suspended", observed: 2, version: 1, key: "key",
		},
		"suspended and the entry is gone": {
			object: suspended, saw: outcome{owned: missing, entryKnown: true},
			conditions: "Ready=False/Suspended", observed: 2, version: 1, key: "key", message: "nothing is served",
		},
		"suspended until the version expired": {
			object: suspended, saw: outcome{owned: ownedAt(1, epoch), entryKnown: true, entryCurrent: true}, now: epoch.Add(90 * day),
			conditions: "Ready=False/Suspended Expiring=True/Expired", observed: 2, version: 1, key: "key", message: "nothing is served",
		},
		"suspended before anything was sealed": {
			object: suspended, saw: outcome{entryKnown: true},
			conditions: "Ready=False/Suspended", observed: 2, message: "nothing is served",
		},
		"deleted while the vault does not answer": {
			object: deleted, saw: outcome{err: errDown},
			conditions: "Ready=True/Sealed Reconciling=True/Deleting", observed: 1, version: 1, key: "key", rotation: true,
			message: "annotate it with latticekeep.dev/abandon=true",
		},
	} {
		t.Run(name, func(t *testing.T) {
			sc, now := c.object(), c.now
			if now.IsZero() {
				now = epoch.Add(time.Hour)
			}
			s := c.saw.status(sc, now)
			if got := conditions(s); got != c.conditions {
				t.Errorf("conditions %s, want %s", got, c.conditions)
			}
			if s.ObservedGeneration != c.observed || s.Version != c.version || s.SealingKeyID != c.key || (s.NextRotationTime != nil) != c.rotation {
				t.Errorf("observed generation %d, version %d, key %q, next rotation %v; want %d, %d, %q, %v",
					s.ObservedGeneration, s.Version, s.SealingKeyID, s.NextRotationTime, c.observed, c.version, c.key, c.rotation)
			}
			if s.Version != 0 && (s.CredentialID != "cred_one" || s.LastTrigger != "first" || s.Audit == nil || s.Audit.Sequence != 40+s.Version) {
				t.Errorf("credential %q, trigger %q, audit %v of version %d", s.CredentialID, s.LastTrigger, s.Audit, s.Version)
			}
			if got := s.Conditions[len(s.Conditions)-2].Message; !strings.Contains(got, c.message) { // the last one is Expiring
				t.Errorf("message %q lacks %q", got, c.message)
			}
			for _, condition := range s.Conditions {
				if strings.Contains(condition.Message, "secret detail") {
					t.Errorf("the cause of an error is in %s: %q", condition.Type, condition.Message)
				}
			}

			// The same observation again, later and after a restart, is the same status: no write, no loop.
			sc.Status = s
			if again := c.saw.status(sc, now.Add(time.Minute)); !apiequality.Semantic.DeepEqual(s, again) {
				t.Errorf("seen again, the status is another one:\n%+v\n%+v", s, again)
			}
		})
	}
}

func TestTransitionTimeMovesWithTheStatusOfACondition(t *testing.T) {
	sc := new(v1beta1.SealedCredential)
	good := outcome{owned: ownedAt(1, epoch), entryKnown: true, entryCurrent: true}
	bad := outcome{owned: ownedAt(1, epoch), entryKnown: true, specRefused: errRefused}
	for i, step := range []struct {
		saw   outcome
		since int // the step that made Ready what it is
	}{
		{good, 0}, {good, 0}, {outcome{err: errDown}, 0}, {bad, 3}, {bad, 3}, {good, 5},
	} {
		at := epoch.Add(time.Duration(i) * time.Minute)
		sc.Generation++
		sc.Status = step.saw.status(sc, at)
		ready := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReady)
		if want := epoch.Add(time.Duration(step.since) * time.Minute); !ready.LastTransitionTime.Time.Equal(want) {
			t.Errorf("step %d: Ready is %s since %v, want %v", i, ready.Status, ready.LastTransitionTime, want)
		}
		if stalled := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionStalled); (stalled != nil) != (step.saw.specRefused != nil) {
			t.Errorf("step %d: Stalled is %v", i, stalled)
		}
	}
}

func TestRotationIsDueBeforeTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		life, before, want time.Duration // want after the version was sealed
	}{
		"a third by default":                     {90 * day, 0, 60 * day},
		"as the spec says":                       {90 * day, 10 * day, 80 * day},
		"the longest the schema allows":          {day, 23 * time.Hour, time.Hour},
		"never at once, though the spec says so": {day, 30 * day, 16 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			owned := ownedAt(1, epoch.Add(123456*time.Microsecond))
			owned.ExpiresAt = owned.SealedAt.Add(c.life)
			sc := new(v1beta1.SealedCredential)
			if c.before != 0 {
				sc.Spec.Rotation = &v1beta1.Rotation{Before: &metav1.Duration{Duration: c.before}}
			}
			seen := make(map[time.Duration]bool)
			for i := range 100 {
				sc.UID = types.UID(strconv.Itoa(i))
				got := nextRotation(sc, owned).Sub(epoch)
				if got > c.want || got < c.want-min(c.want, c.life-c.want)/10-time.Second || got != nextRotation(sc, owned).Sub(epoch) {
					t.Errorf("due after %v, want up to a tenth before %v", got, c.want)
				}
				seen[got] = true
			}
			if len(seen) < 50 {
				t.Errorf("100 objects are due at %d times", len(seen))
			}
		})
	}
}
