package sealingkey

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func TestAManifestMovesToTheNewestKey(t *testing.T) {
	f := newFixture(t)
	for _, scope := range []v1beta1.Scope{v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster} {
		obj := f.manifest(func(r *sealing.Request) { r.Scope = scope })
		_, err := f.service.Rotate(t.Context(), admin)
		must(t, err)
		_, next := f.entries(1)
		again, err := f.service.Reseal(t.Context(), writerKey, obj)
		must(t, err)
		all, _ := f.entries(next)
		if len(all) != 1 || all[0].EventType != audit.ManifestResealed || all[0].Outcome != audit.Success ||
			all[0].Attributes["from_key"] != obj.Spec.Sealed.KeyID || all[0].Attributes["to_key"] != f.current() || all[0].Attributes["count"] != "2" {
			t.Errorf("entries %+v", all)
		}
		if again.KeyID != f.current() || again.Scope != scope {
			t.Errorf("resealed for %s in scope %s", again.KeyID, again.Scope)
		}
		obj.Spec.Sealed = again
		values, err := sealing.Open(obj, func(id string) (*envelope.SealingKey, error) { return f.keys.SealingKey(t.Context(), id) })
		if err != nil || string(values["password"]) != canary || string(values["username"]) != "app" {
			t.Error(err)
		}
	}
}

// manipulations returns changes of a manifest that an attacker could make, with the expected codes.
func manipulations(t *testing.T, f *fixture) map[string]struct {
	change func(*v1beta1.SealedCredential)
	code   Code
} {
	other := f.manifest(func(r *sealing.Request) { r.Namespace = "bank" })
	retired := f.manifest()
	type object = v1beta1.SealedCredential
	value := func(change func(*v1beta1.SealedValue)) func(*object) {
		return func(o *object) {
			v := o.Spec.Sealed.Values["password"]
			change(&v)
			o.Spec.Sealed.Values["password"] = v
		}
	}
	blob := func(change func([]byte) []byte) func(*object) {
		return value(func(v *v1beta1.SealedValue) {
			b, err := base64.StdEncoding.DecodeString(v.Data)
			must(t, err)
			v.Data = base64.StdEncoding.EncodeToString(change(b))
		})
	}
	all := map[string]struct {
		change func(*object)
		code   Code
	}{
		"nothing":         {func(*object) {}, Accepted},
		"labels":          {func(o *object) { o.Labels = map[string]string{"scope": "Cluster"} }, Accepted},
		"namespace":       {func(o *object) { o.Namespace = "bank" }, DoesNotOpen},
		"no namespace":    {func(o *object) { o.Namespace = "" }, DoesNotOpen},
		"name":            {func(o *object) { o.Name = "cache" }, DoesNotOpen},
		"type":            {func(o *object) { o.Spec.CredentialType = "api-key" }, DoesNotOpen},
		"scope":           {func(o *object) { o.Spec.Sealed.Scope = v1beta1.ScopeCluster }, DoesNotOpen},
		"suite":           {func(o *object) { o.Spec.Sealed.Suite = "MLKEM768" }, DoesNotOpen},
		"time":            {value(func(v *v1beta1.SealedValue) { v.SealedAt.Time = v.SealedAt.Add(time.Second) }), DoesNotOpen},
		"foreign value":   {value(func(v *v1beta1.SealedValue) { *v = other.Spec.Sealed.Values["password"] }), DoesNotOpen},
		"longer":          {blob(func(b []byte) []byte { return append(b, 0) }), DoesNotOpen},
		"shorter":         {blob(func(b []byte) []byte { return b[:len(b)-1] }), DoesNotOpen},
		"unknown key":     {func(o *object) { o.Spec.Sealed.KeyID = strings.Repeat("0", 64) }, UnknownKey},
		"retired key":     {func(o *object) { o.Spec.Sealed.KeyID = retired.Spec.Sealed.KeyID }, RetiredKey},
		"no base64":       {value(func(v *v1beta1.SealedValue) { v.Data = canary }), Malformed},
		"no whole second": {value(func(v *v1beta1.SealedValue) { v.SealedAt.Time = v.SealedAt.Add(1) }), Malformed},
		"no values":       {func(o *object) { o.Spec.Sealed.Values = nil }, Malformed},
		"annotation":      {func(o *object) { o.Annotations = map[string]string{"latticekeep.dev/scope": "Cluster"} }, Accepted},
	}
	for _, at := range []int{1, 500, 1088, 1089, 1120, 1121, 1130, 1139} {
		all[fmt.Sprint("bit at ", at)] = struct {
			change func(*object)
			code   Code
		}{blob(func(b []byte) []byte { b[min(at, len(b)-1)] ^= 0x80; return b }), DoesNotOpen}
	}
	_, err := f.service.Rotate(t.Context(), admin)
	must(t, err)
	_, err = f.service.Retire(t.Context(), admin, retired.Spec.Sealed.KeyID)
	must(t, err)
	return all
}

// Values that do not open all give the same answer and the same entry. Neither reveals the reason,
// the value, or how far the check got.
func TestResealingAndCheckingAreNoOracle(t *testing.T) {
	f := newFixture(t)
	_, err := f.service.Check(t.Context(), writerKey, f.manifest()) // the first entry of a tenant's history has more attributes
	must(t, err)
	answers := make(map[string]bool)
	for name, tc := range manipulations(t, f) {
		obj := f.manifest()
		tc.change(obj)
		_, next := f.entries(1)
		again, err := f.service.Reseal(t.Context(), writerKey, obj)
		entries, next := f.entries(next)
		switch tc.code {
		case Accepted:
			must(t, err)
		case Malformed:
			if fault.Of(err) != fault.Invalid || again != nil {
				t.Errorf("%s: resealed %v", name, err)
			}
		default:
			if err != ErrDoesNotOpen || again != nil { //nolint:errorlint // the same, not one like it
				t.Errorf("%s: resealed %v", name, err)
			}
			if len(entries) != 1 || entries[0].Outcome != audit.Failure || fmt.Sprint(entries[0].Attributes) != "map[reason:does_not_open]" {
				t.Errorf("%s: entries %+v", name, entries)
			}
		}
		v, err := f.service.Check(t.Context(), writerKey, obj)
		if err != nil || v.Code != tc.code || (v.Message == "") != (tc.code == Accepted) || strings.Contains(v.Message, canary) {
			t.Errorf("%s: checked %+v %v", name, v, err)
		}
		want := string(tc.code)
		if tc.code == Accepted {
			want = "accepted"
		}
		entries, _ = f.entries(next)
		if len(entries) != 1 || entries[0].EventType != audit.ManifestChecked || entries[0].Outcome != audit.Success ||
			fmt.Sprint(entries[0].Attributes) != "map[verdict:"+want+"]" {
			t.Errorf("%s: entries %+v", name, entries)
		}
		if tc.code == DoesNotOpen {
			answers[v.Message] = true
		}
	}
	if len(answers) != 1 {
		t.Errorf("%d different messages about values that do not open: %v", len(answers), answers)
	}
}

func TestThePolicyIsCheckedOfEverySource(t *testing.T) {
	f := newFixture(t)
	f.service.options.Policy = sealing.Policy{MaxTTLDays: 60, Scopes: []v1beta1.Scope{v1beta1.ScopeStrict}}
	short := func(r *sealing.Request) { r.TTLDays = 60 }
	for name, tc := range map[string]struct {
		obj  *v1beta1.SealedCredential
		code Code
	}{
		"allowed":  {f.manifest(short), Accepted},
		"too long": {f.manifest(), NotAllowed}, // 90 days
		"too wide": {f.manifest(short, func(r *sealing.Request) { r.Scope = v1beta1.ScopeNamespace }), NotAllowed},
		"another source": {&v1beta1.SealedCredential{Spec: v1beta1.SealedCredentialSpec{
			CredentialType: "database", Generate: []v1beta1.Generator{{Key: "k"}}}}, NotAllowed},
		"another source, allowed": {&v1beta1.SealedCredential{Spec: v1beta1.SealedCredentialSpec{CredentialType: "database", TTLDays: 1}}, Accepted},
	} {
		if v, err := f.service.Check(t.Context(), writerKey, tc.obj); err != nil || v.Code != tc.code {
			t.Errorf("%s: %+v %v", name, v, err)
		}
	}
}

func TestTroubleIsNoVerdict(t *testing.T) {
	f := newFixture(t)
	obj := f.manifest()
	must(t, f.store.Close())
	if _, err := f.service.Check(t.Context(), writerKey, obj); fault.Of(err) != fault.Unavailable {
		t.Errorf("checked: %v", err)
	}
	if _, err := f.service.Reseal(t.Context(), writerKey, obj); fault.Of(err) != fault.Unavailable || errors.Is(err, ErrDoesNotOpen) {
		t.Errorf("resealed: %v", err)
	}
}

// Only a bounded number of manifests is worked on at the same time. A caller who gets no place in
// time is told to retry.
func TestWorkOnValuesIsBounded(t *testing.T) {
	f := newFixture(t)
	obj := f.manifest(func(r *sealing.Request) {
		for i := range 62 {
			r.Values[fmt.Sprint("k", i)] = secret.Bytes("v")
		}
	})
	all := halfOfTheCores()
	must(t, f.service.values.Acquire(t.Context(), all))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := f.service.Reseal(ctx, writerKey, obj); fault.Of(err) != fault.Unavailable {
		t.Errorf("resealed: %v", err)
	}
	if _, err := f.service.Check(ctx, writerKey, obj); fault.Of(err) != fault.Unavailable {
		t.Errorf("checked: %v", err)
	}
	// A pod whose checks the cluster allows does not wait for tenants, and they do not wait for
	// pods.
	patient, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	if v, err := f.service.Check(patient, pod, obj); err != nil || v.Code != Accepted {
		t.Errorf("a pod's check behind others: %+v %v", v, err)
	}
	f.service.values.Release(all)
	must(t, f.service.reviews.Acquire(t.Context(), all))
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := f.service.Check(ended, pod, obj); fault.Of(err) != fault.Unavailable {
		t.Errorf("a pod's check whose turn does not come: %v", err)
	}
	if _, err := f.service.Check(patient, writerKey, obj); err != nil {
		t.Errorf("a check behind pods: %v", err)
	}
	f.service.reviews.Release(all)
	_, err := f.service.Reseal(t.Context(), writerKey, obj)
	must(t, err)
	if !f.service.values.TryAcquire(all) || !f.service.reviews.TryAcquire(all) {
		t.Error("a place is not given back")
	}
}

// A webhook checks with every kubectl apply, and a compromised webhook can check as often as it
// likes.
func TestTheChecksOfAPodAreRecordedOnceAMinute(t *testing.T) {
	f := newFixture(t)
	good, bad := f.manifest(), f.manifest()
	bad.Name = "cache"
	another := pod
	another.Pod = "another"
	check := func(p authz.Principal, obj *v1beta1.SealedCredential, want Code) {
		t.Helper()
		for range 3 {
			if v, err := f.service.Check(t.Context(), p, obj); err != nil || v.Code != want {
				t.Errorf("%+v %v", v, err)
			}
		}
	}
	_, next := f.entries(1)
	recorded := func(want int) {
		t.Helper()
		var all []audit.Entry
		if all, next = f.entries(next); len(all) != want {
			t.Errorf("%d entries, want %d: %+v", len(all), want, all)
		}
	}
	check(pod, good, Accepted)
	recorded(1)
	check(pod, bad, DoesNotOpen) // another verdict
	recorded(1)
	check(another, bad, DoesNotOpen)
	recorded(1)
	check(pod, good, Accepted)
	recorded(0)
	check(writerKey, good, Accepted) // not a pod
	recorded(3)
	f.advance(time.Minute)
	check(pod, good, Accepted)
	recorded(1)
}

// Only a change of the object that has newer values is refused, and only values that open are
// compared.
func TestOlderValuesAreRefusedForTheObjectAndElseAWarning(t *testing.T) {
	f := newFixture(t)
	at := f.now().UTC().Truncate(time.Second)
	accepted := map[string]time.Time{"password": at.Add(time.Hour), "gone": at.Add(time.Hour)}
	var lost error
	f.service.options.Accepted = func(_ context.Context, p authz.Principal, obj *v1beta1.SealedCredential) (map[string]time.Time, error) {
		if p.Tenant != writerKey.Tenant || obj.Namespace != "shop" {
			t.Errorf("%+v asks about %s/%s", p, obj.Namespace, obj.Name)
		}
		return accepted, lost
	}
	object := func(change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
		obj := f.manifest()
		obj.UID = "8c2b1c1e"
		if change != nil {
			change(obj)
		}
		return obj
	}
	times := []string{at.Format(time.RFC3339), at.Add(time.Hour).Format(time.RFC3339), "values[password]", "allowOlder"}
	check := func(name string, obj *v1beta1.SealedCredential, code Code, warns bool) {
		t.Helper()
		v, err := f.service.Check(t.Context(), writerKey, obj)
		if err != nil || v.Code != code || (v.Message == "") != (code == Accepted) || (v.Warning == "") == warns {
			t.Errorf("%s: %+v %v", name, v, err)
		}
		for _, says := range times {
			if (code == OlderValue || warns && lost == nil) && !strings.Contains(v.Message+v.Warning, says) {
				t.Errorf("%s: %+v does not say %s", name, v, says)
			}
		}
	}
	check("the object", object(nil), OlderValue, false)
	check("a new object", f.manifest(), Accepted, true)
	check("on purpose", object(func(o *v1beta1.SealedCredential) { o.Spec.Sealed.AllowOlder = true }), Accepted, false)
	check("another source", &v1beta1.SealedCredential{Spec: v1beta1.SealedCredentialSpec{CredentialType: "database"}}, Accepted, false)
	check("it does not open", object(func(o *v1beta1.SealedCredential) { o.Name = "cache" }), DoesNotOpen, false)
	lost = fault.Unavailable
	check("nothing can be found out", object(nil), Accepted, true)
	lost, accepted["password"] = nil, at
	check("the same values", object(nil), Accepted, false)
	accepted = nil
	check("nothing was accepted yet", object(nil), Accepted, false)
}
