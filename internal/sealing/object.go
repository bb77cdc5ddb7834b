package sealing

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/compose"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/generate"
)

// Patterns of the schema. The vault has the same pattern for the types of all credentials.
var (
	credentialTypePattern = regexp.MustCompile(`^[a-zA-Z0-9][-._a-zA-Z0-9]*$`)
	secretNamePattern     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	reservedPattern       = regexp.MustCompile(`^([^/]*[.])?(kubernetes[.]io|k8s[.]io|latticekeep[.]dev)/`)
)

const maxSecretNameBytes = 253 // as in the schema

// checkObject checks everything except the content of spec.sealed.
func checkObject(obj *v1beta1.SealedCredential) report {
	var found report
	add := found.add
	spec := &obj.Spec
	if len(validation.IsDNS1123Subdomain(obj.Name)) > 0 {
		add("metadata.name", "not a name for an object: 1 to 253 lower-case letters, digits, '-' and '.'")
	}
	if obj.Namespace != "" && len(validation.IsDNS1123Label(obj.Namespace)) > 0 {
		add("metadata.namespace", "not a namespace: 1 to 63 lower-case letters, digits and '-'")
	}
	if n := len(spec.CredentialType); n < 1 || n > v1beta1.MaxCredentialTypeBytes {
		add("spec.credentialType", "has %d bytes; it has 1 to %d", n, v1beta1.MaxCredentialTypeBytes)
	} else if !credentialTypePattern.MatchString(spec.CredentialType) {
		add("spec.credentialType", "has characters that are not allowed: it has letters, digits, '-', '.' and '_', and begins with a letter or digit")
	}
	if ttl := ttlDays(spec); ttl < 1 || ttl > v1beta1.MaxTTLDays {
		add("spec.ttlDays", "is %d; it is 1 to %d", ttl, v1beta1.MaxTTLDays)
	}
	found.checkDeletionPolicy("spec.deletionPolicy", spec.DeletionPolicy)
	found.checkSource(obj)
	found.checkRotation(spec)
	if spec.Target != nil {
		found.checkTarget(spec.Target)
	}
	return found
}

// annotations are those with a meaning on a SealedCredential.
var annotations = []string{v1beta1.AnnotationAbandon, v1beta1.AnnotationSync}

// shownWarnings bounds the annotations that Warnings names.
const shownWarnings = 3

// Warnings returns what in obj has no effect although it looks as if it had: annotations of ours that
// mean nothing on a SealedCredential. No object is refused for them, so that a typing error does not
// keep new values out.
func Warnings(obj *v1beta1.SealedCredential) []Problem {
	var found report
	for _, name := range slices.Sorted(maps.Keys(obj.Annotations)) {
		if strings.HasPrefix(name, v1beta1.AnnotationPrefix) && !slices.Contains(annotations, name) && len(found) < shownWarnings {
			found.add("metadata.annotations", "%.100q has no meaning on a SealedCredential and is ignored; known: %s", name, strings.Join(annotations, ", "))
		}
	}
	return found
}

func (r *report) checkDeletionPolicy(path string, p v1beta1.DeletionPolicy) {
	switch p {
	case "", v1beta1.DeletionDelete, v1beta1.DeletionRetain:
	default:
		r.add(path, "is neither Delete nor Retain")
	}
}

func (r *report) checkSource(obj *v1beta1.SealedCredential) {
	spec := &obj.Spec
	sources := 0
	for _, there := range []bool{spec.Sealed != nil, spec.ValuesFrom != nil, spec.Generate != nil} {
		if there {
			sources++
		}
	}
	if sources != 1 {
		r.add("spec", "has %d sources of values; give it exactly one of sealed, valuesFrom and generate", sources)
	}
	if from := spec.ValuesFrom; from != nil {
		if name := from.SecretRef.Name; !isSecretName(name) {
			r.add("spec.valuesFrom.secretRef.name", "is not the name of a Secret: 1 to 253 lower-case letters, digits, '-' and '.'")
		} else if from.DeleteAfterImport && spec.Target != nil && name == targetName(obj) {
			r.add("spec.valuesFrom.deleteAfterImport", "would delete the target: name another Secret")
		}
	}
	if spec.Generate != nil {
		r.checkGenerate(spec.Generate)
	}
}

// targetName returns the name of the target, with the default applied.
func targetName(obj *v1beta1.SealedCredential) string {
	if t := obj.Spec.Target; t.Name != "" {
		return t.Name
	}
	return obj.Name
}

func isSecretName(name string) bool {
	return len(name) <= maxSecretNameBytes && secretNamePattern.MatchString(name)
}

func (r *report) checkGenerate(entries []v1beta1.Generator) {
	if err := generate.Check(Specs(entries)); err != nil {
		path, message, _ := strings.Cut(fault.Message(err), ": ")
		r.add(path, "%s", message)
	}
}

// Specs converts spec.generate for package generate.
func Specs(entries []v1beta1.Generator) []generate.Spec {
	specs := make([]generate.Spec, len(entries))
	for i, g := range entries {
		specs[i].Key = g.Key
		if g.Random != nil {
			specs[i].Random = &generate.Random{Length: int(g.Random.Length), Charset: string(g.Random.Charset)}
		}
		if g.KeyPair != nil {
			specs[i].KeyPair = &generate.KeyPair{Algorithm: string(g.KeyPair.Algorithm), PublicKeyName: g.KeyPair.PublicKeyName}
		}
	}
	return specs
}

func (r *report) checkRotation(spec *v1beta1.SealedCredentialSpec) {
	rotation := spec.Rotation
	if rotation == nil {
		return
	}
	ttl := time.Duration(ttlDays(spec)) * 24 * time.Hour
	switch rotation.Policy {
	case "", v1beta1.RotationReencrypt:
	case v1beta1.RotationRegenerate:
		if spec.Generate == nil {
			r.add("spec.rotation.policy", "Regenerate needs generate: other values are not the vault's to renew")
		}
	default:
		r.add("spec.rotation.policy", "is neither Reencrypt nor Regenerate")
	}
	if before := rotation.Before; before != nil && (before.Duration <= 0 || before.Duration > ttl-time.Hour) {
		r.add("spec.rotation.before", "is not more than 0 and at least an hour shorter than the TTL")
	}
	if overlap := rotation.Overlap; overlap != nil {
		if rotation.Policy != v1beta1.RotationRegenerate {
			r.add("spec.rotation.overlap", "needs rotation.policy Regenerate: no other rotation has previous values")
		}
		if overlap.Duration < 0 || overlap.Duration > ttl {
			r.add("spec.rotation.overlap", "is negative or longer than the TTL")
		}
	}
	if len(rotation.Trigger) > v1beta1.MaxTriggerBytes {
		r.add("spec.rotation.trigger", "is longer than %d bytes", v1beta1.MaxTriggerBytes)
	}
	if age := rotation.MaxValueAge; age != nil && age.Duration < 0 {
		r.add("spec.rotation.maxValueAge", "is negative")
	}
	for _, d := range []struct {
		name string
		time *metav1.Duration
	}{{"before", rotation.Before}, {"overlap", rotation.Overlap}, {"maxValueAge", rotation.MaxValueAge}} {
		if d.time != nil && d.time.Duration%time.Second != 0 {
			r.add("spec.rotation."+d.name, "is not in whole seconds")
		}
	}
}

func (r *report) checkTarget(t *v1beta1.Target) {
	if t.Name != "" && !isSecretName(t.Name) {
		r.add("spec.target.name", "is not the name of a Secret: 1 to %d lower-case letters, digits, '-' and '.'", maxSecretNameBytes)
	}
	switch t.Type {
	case "", "Opaque", "kubernetes.io/tls", "kubernetes.io/dockerconfigjson", "kubernetes.io/basic-auth", "kubernetes.io/ssh-auth":
	default:
		r.add("spec.target.type", "is none of Opaque, kubernetes.io/tls, kubernetes.io/dockerconfigjson, kubernetes.io/basic-auth and kubernetes.io/ssh-auth")
	}
	r.checkMetadata("spec.target.labels", t.Labels, true)
	r.checkMetadata("spec.target.annotations", t.Annotations, false)
	r.checkDeletionPolicy("spec.target.deletionPolicy", t.DeletionPolicy)
	if t.Keys != nil && (len(t.Keys) < 1 || len(t.Keys) > v1beta1.MaxTargetKeys) {
		r.add("spec.target.keys", "has %d keys; it has 1 to %d", len(t.Keys), v1beta1.MaxTargetKeys)
	}
	taken := make(map[string]bool)
	for i, k := range t.Keys {
		path := fmt.Sprintf("spec.target.keys[%d]", i)
		if !isDataKey(k.To) {
			r.add(path+".to", "is not 1 to %d letters, digits, '-', '_' or '.'", v1beta1.MaxDataKeyBytes)
		} else if taken[k.To] {
			r.add(path+".to", "is the key of another entry too")
		}
		taken[k.To] = true
		if (k.From == "") == (k.Template == "") {
			r.add(path, "needs exactly one of from and template")
		}
		if k.From != "" && !isDataKey(k.From) {
			r.add(path+".from", "is not 1 to %d letters, digits, '-', '_' or '.'", v1beta1.MaxDataKeyBytes)
		}
		if utf8.RuneCountInString(k.Template) > v1beta1.MaxTemplateBytes {
			r.add(path+".template", "is longer than %d characters", v1beta1.MaxTemplateBytes)
		}
		switch k.Encoding {
		case "", v1beta1.EncodingText, v1beta1.EncodingURL, v1beta1.EncodingJSON:
		default:
			r.add(path+".encoding", "is none of Text, URL and JSON")
		}
		if k.Encoding != "" && k.Template == "" {
			r.add(path+".encoding", "is for a template")
		}
	}
}

// Reserved reports whether no object may give its target this label or annotation. Of the labels
// that Kubernetes recommends to applications only one is reserved: what manages a target is the
// operator, and a target that claims to be Helm's could be taken over by a release.
func Reserved(name string, label bool) bool {
	recommended := strings.HasPrefix(name, "app.kubernetes.io/") && name != "app.kubernetes.io/managed-by"
	return reservedPattern.MatchString(name) && !(label && recommended)
}

func (r *report) checkMetadata(path string, all map[string]string, label bool) {
	longest, also := v1beta1.MaxAnnotationBytes, ""
	if label {
		longest, also = v1beta1.MaxLabelBytes, "; of app.kubernetes.io only managed-by is refused"
	}
	if len(all) > v1beta1.MaxMetadata {
		r.add(path, "has %d entries; it has at most %d", len(all), v1beta1.MaxMetadata)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch {
		case Reserved(name, label):
			r.add(path, "the prefix of %.100q is not for objects to give: kubernetes.io, k8s.io and latticekeep.dev are refused%s", name, also)
		case utf8.RuneCountInString(name) > v1beta1.MaxMetadataKeyBytes || utf8.RuneCountInString(all[name]) > longest:
			r.add(path, "a name has at most %d characters and a value at most %d", v1beta1.MaxMetadataKeyBytes, longest)
		default:
			continue
		}
		return
	}
}

// checkComposition finds mistakes that the schema cannot: keys of the target that cannot be made
// from the object's values. The data keys of imported values are unknown, so it does not check for
// missing ones there.
func checkComposition(obj *v1beta1.SealedCredential) report {
	var found report
	t := obj.Spec.Target
	if t == nil {
		return nil
	}
	names, known := dataKeys(&obj.Spec)
	for i, k := range t.Keys {
		path := fmt.Sprintf("spec.target.keys[%d]", i)
		needed := []string{k.From}
		if k.Template != "" {
			path += ".template"
			template, err := compose.Parse(k.Template)
			if err == nil {
				err = template.Check(compose.Encoding(k.Encoding))
			}
			if err != nil {
				found.add(path, "%s", fault.Message(err))
				continue
			}
			needed = template.Keys()
		}
		for _, name := range needed {
			if known && !names[name] && isDataKey(name) {
				found.add(path, "there is no value with the data key %s", name)
			}
		}
	}
	return found
}

// dataKeys returns the data keys of an object's values. known is false when only the cluster knows
// them.
func dataKeys(spec *v1beta1.SealedCredentialSpec) (names map[string]bool, known bool) {
	names = make(map[string]bool)
	if spec.Sealed != nil {
		for k := range spec.Sealed.Values {
			names[k] = true
		}
	}
	for _, s := range Specs(spec.Generate) {
		for _, k := range generate.Names(s) {
			names[k] = true
		}
	}
	return names, spec.ValuesFrom == nil
}
