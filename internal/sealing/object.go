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

	"github.com/latticekeep/latticekeep/api/v1alpha1"
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

// Bounds of the schema that have no name in v1alpha1.
const (
	maxSecretNameBytes  = 253
	maxMetadataKeyBytes = 317 // prefix, slash and name
	maxLabelBytes       = 63
)

// checkObject checks everything except the content of spec.sealed.
func checkObject(obj *v1alpha1.SealedCredential) report {
	var found report
	add := found.add
	spec := &obj.Spec
	if len(validation.IsDNS1123Subdomain(obj.Name)) > 0 {
		add("metadata.name", "not a name for an object: 1 to 253 lower-case letters, digits, '-' and '.'")
	}
	if obj.Namespace != "" && len(validation.IsDNS1123Label(obj.Namespace)) > 0 {
		add("metadata.namespace", "not a namespace: 1 to 63 lower-case letters, digits and '-'")
	}
	for _, name := range slices.Sorted(maps.Keys(obj.Annotations)) {
		if strings.HasPrefix(name, v1alpha1.AnnotationPrefix) && name != v1alpha1.AnnotationAbandon {
			add("metadata.annotations", "an annotation that begins with %s has no meaning here, and never one for the sealed values; remove it (only %s is known)",
				v1alpha1.AnnotationPrefix, v1alpha1.AnnotationAbandon)
			break
		}
	}
	if n := len(spec.CredentialType); n < 1 || n > v1alpha1.MaxCredentialTypeBytes {
		add("spec.credentialType", "has %d bytes; it has 1 to %d", n, v1alpha1.MaxCredentialTypeBytes)
	} else if !credentialTypePattern.MatchString(spec.CredentialType) {
		add("spec.credentialType", "has characters that are not allowed: it has letters, digits, '-', '.' and '_', and begins with a letter or digit")
	}
	if ttl := ttlDays(spec); ttl < 1 || ttl > v1alpha1.MaxTTLDays {
		add("spec.ttlDays", "is %d; it is 1 to %d", ttl, v1alpha1.MaxTTLDays)
	}
	found.checkDeletionPolicy("spec.deletionPolicy", spec.DeletionPolicy)
	found.checkSource(obj)
	found.checkRotation(spec)
	if spec.Target != nil {
		found.checkTarget(spec.Target)
	}
	return found
}

func (r *report) checkDeletionPolicy(path string, p v1alpha1.DeletionPolicy) {
	switch p {
	case "", v1alpha1.DeletionDelete, v1alpha1.DeletionRetain:
	default:
		r.add(path, "is neither Delete nor Retain")
	}
}

func (r *report) checkSource(obj *v1alpha1.SealedCredential) {
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
func targetName(obj *v1alpha1.SealedCredential) string {
	if t := obj.Spec.Target; t.Name != "" {
		return t.Name
	}
	return obj.Name
}

func isSecretName(name string) bool {
	return len(name) <= maxSecretNameBytes && secretNamePattern.MatchString(name)
}

func (r *report) checkGenerate(entries []v1alpha1.Generator) {
	if err := generate.Check(Specs(entries)); err != nil {
		path, message, _ := strings.Cut(fault.Message(err), ": ")
		r.add(path, "%s", message)
	}
}

// Specs converts spec.generate for package generate.
func Specs(entries []v1alpha1.Generator) []generate.Spec {
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

func (r *report) checkRotation(spec *v1alpha1.SealedCredentialSpec) {
	rotation := spec.Rotation
	if rotation == nil {
		return
	}
	ttl := time.Duration(ttlDays(spec)) * 24 * time.Hour
	switch rotation.Policy {
	case "", v1alpha1.RotationReencrypt:
	case v1alpha1.RotationRegenerate:
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
		if rotation.Policy != v1alpha1.RotationRegenerate {
			r.add("spec.rotation.overlap", "needs rotation.policy Regenerate: no other rotation has previous values")
		}
		if overlap.Duration < 0 || overlap.Duration > ttl {
			r.add("spec.rotation.overlap", "is negative or longer than the TTL")
		}
	}
	if len(rotation.Trigger) > v1alpha1.MaxTriggerBytes {
		r.add("spec.rotation.trigger", "is longer than %d bytes", v1alpha1.MaxTriggerBytes)
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

func (r *report) checkTarget(t *v1alpha1.Target) {
	if t.Name != "" && !isSecretName(t.Name) {
		r.add("spec.target.name", "is not the name of a Secret: 1 to %d lower-case letters, digits, '-' and '.'", maxSecretNameBytes)
	}
	switch t.Type {
	case "", "Opaque", "kubernetes.io/tls", "kubernetes.io/dockerconfigjson", "kubernetes.io/basic-auth", "kubernetes.io/ssh-auth":
	default:
		r.add("spec.target.type", "is none of Opaque, kubernetes.io/tls, kubernetes.io/dockerconfigjson, kubernetes.io/basic-auth and kubernetes.io/ssh-auth")
	}
	r.checkMetadata("spec.target.labels", t.Labels, maxLabelBytes)
	r.checkMetadata("spec.target.annotations", t.Annotations, v1alpha1.MaxAnnotationBytes)
	r.checkDeletionPolicy("spec.target.deletionPolicy", t.DeletionPolicy)
	if t.Keys != nil && (len(t.Keys) < 1 || len(t.Keys) > v1alpha1.MaxTargetKeys) {
		r.add("spec.target.keys", "has %d keys; it has 1 to %d", len(t.Keys), v1alpha1.MaxTargetKeys)
	}
	taken := make(map[string]bool)
	for i, k := range t.Keys {
		path := fmt.Sprintf("spec.target.keys[%d]", i)
		if !isDataKey(k.To) {
			r.add(path+".to", "is not 1 to %d letters, digits, '-', '_' or '.'", v1alpha1.MaxDataKeyBytes)
		} else if taken[k.To] {
			r.add(path+".to", "is the key of another entry too")
		}
		taken[k.To] = true
		if (k.From == "") == (k.Template == "") {
			r.add(path, "needs exactly one of from and template")
		}
		if k.From != "" && !isDataKey(k.From) {
			r.add(path+".from", "is not 1 to %d letters, digits, '-', '_' or '.'", v1alpha1.MaxDataKeyBytes)
		}
		if utf8.RuneCountInString(k.Template) > v1alpha1.MaxTemplateBytes {
			r.add(path+".template", "is longer than %d characters", v1alpha1.MaxTemplateBytes)
		}
		switch k.Encoding {
		case "", v1alpha1.EncodingText, v1alpha1.EncodingURL, v1alpha1.EncodingJSON:
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

func (r *report) checkMetadata(path string, all map[string]string, longest int) {
	if len(all) > v1alpha1.MaxMetadata {
		r.add(path, "has %d entries; it has at most %d", len(all), v1alpha1.MaxMetadata)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch {
		case Reserved(name, longest == maxLabelBytes):
			r.add(path, "has a prefix of kubernetes.io, k8s.io or latticekeep.dev, which are not for objects to give")
		case utf8.RuneCountInString(name) > maxMetadataKeyBytes || utf8.RuneCountInString(all[name]) > longest:
			r.add(path, "a name has at most %d characters and a value at most %d", maxMetadataKeyBytes, longest)
		default:
			continue
		}
		return
	}
}

// checkComposition finds mistakes that the schema cannot: keys of the target that cannot be made
// from the object's values. The data keys of imported values are unknown, so it does not check for
// missing ones there.
func checkComposition(obj *v1alpha1.SealedCredential) report {
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
func dataKeys(spec *v1alpha1.SealedCredentialSpec) (names map[string]bool, known bool) {
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
