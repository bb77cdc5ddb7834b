package sealing

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

func TestDigestsChangeWithWhatTheySpeakOf(t *testing.T) {
	base := seal(t, mustGenerate(t), request())
	for name, tc := range map[string]struct {
		change       func(*v1beta1.SealedCredential)
		spec, values bool // whether the digest changes
	}{
		"nothing":     {func(*v1beta1.SealedCredential) {}, false, false},
		"labels":      {func(o *v1beta1.SealedCredential) { o.Labels = map[string]string{"a": "b"} }, false, false},
		"suspend":     {func(o *v1beta1.SealedCredential) { o.Spec.Suspend = true }, false, false},
		"policy":      {func(o *v1beta1.SealedCredential) { o.Spec.DeletionPolicy = v1beta1.DeletionRetain }, false, false},
		"rotation":    {func(o *v1beta1.SealedCredential) { o.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }, false, false},
		"allow older": {func(o *v1beta1.SealedCredential) { o.Spec.Sealed.AllowOlder = true }, false, false},
		"no scope":    {func(o *v1beta1.SealedCredential) { o.Spec.Sealed.Scope = "" }, false, false},
		"ttl":         {func(o *v1beta1.SealedCredential) { o.Spec.TTLDays++ }, true, false},
		"type":        {func(o *v1beta1.SealedCredential) { o.Spec.CredentialType += "x" }, true, false},
		"scope":       {func(o *v1beta1.SealedCredential) { o.Spec.Sealed.Scope = v1beta1.ScopeCluster }, true, true},
		"suite":       {func(o *v1beta1.SealedCredential) { o.Spec.Sealed.Suite = "MLKEM768" }, true, true},
		"key":         {func(o *v1beta1.SealedCredential) { o.Spec.Sealed.KeyID = "0" }, true, true},
		"removed":     {func(o *v1beta1.SealedCredential) { delete(o.Spec.Sealed.Values, "username") }, true, true},
		"renamed": {func(o *v1beta1.SealedCredential) {
			o.Spec.Sealed.Values["user"] = o.Spec.Sealed.Values["username"]
			delete(o.Spec.Sealed.Values, "username")
		}, true, true},
		"sealed again": {func(o *v1beta1.SealedCredential) {
			v := o.Spec.Sealed.Values["username"]
			v.Data = "AQ" + v.Data[2:3] + "A" + v.Data[4:]
			o.Spec.Sealed.Values["username"] = v
		}, true, true},
		"time": {func(o *v1beta1.SealedCredential) {
			v := o.Spec.Sealed.Values["username"]
			v.SealedAt.Time = v.SealedAt.Add(-time.Second)
			o.Spec.Sealed.Values["username"] = v
		}, true, true},
	} {
		obj := base.DeepCopy()
		tc.change(obj)
		if got := SpecDigest(obj) != SpecDigest(base); got != tc.spec {
			t.Errorf("%s: spec digest changed: %v", name, got)
		}
		if got := sealedDigest(obj.Spec.Sealed) != sealedDigest(base.Spec.Sealed); got != tc.values {
			t.Errorf("%s: digest of the sealed values changed: %v", name, got)
		}
	}
	defaulted := base.DeepCopy()
	defaulted.Spec.TTLDays = 0
	explicit := base.DeepCopy()
	explicit.Spec.TTLDays = 90
	if SpecDigest(defaulted) != SpecDigest(explicit) {
		t.Error("the default TTL has another digest than the same one written out")
	}
}
