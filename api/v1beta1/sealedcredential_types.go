package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// GroupVersion is the group and version of the types in this package.
var GroupVersion = schema.GroupVersion{Group: "latticekeep.dev", Version: "v1beta1"}

// KindSealedCredential is the kind of SealedCredential.
const KindSealedCredential = "SealedCredential"

// OperatorName is what the operator is called as the manager of fields, in events and in labels.
const OperatorName = "latticekeep"

// AddToScheme registers the types of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &SealedCredential{}, &SealedCredentialList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// Limits that the schema below states as literals; code that makes or checks manifests uses these.
const (
	SealedVersion          = 1      // the only version of the sealed values' format
	DefaultTTLDays         = 90     // spec.ttlDays
	MaxTTLDays             = 3650   // spec.ttlDays
	MaxCredentialTypeBytes = 63     // spec.credentialType
	MaxValues              = 64     // spec.sealed.values
	MaxSealedText          = 349528 // characters of base64 in all values together: 256 KiB of sealed bytes
	MaxDataKeyBytes        = 253    // length of a key in spec.sealed.values
	MaxTriggerBytes        = 253    // spec.rotation.trigger
	MaxGenerators          = 64     // spec.generate
	MaxTargetKeys          = 64     // spec.target.keys
	MaxTemplateBytes       = 4096   // spec.target.keys[].template
	MaxMetadata            = 32     // spec.target.labels, spec.target.annotations
	MaxMetadataKeyBytes    = 317    // length of a key in spec.target.labels and spec.target.annotations: prefix, slash and name
	MaxLabelBytes          = 63     // length of a value in spec.target.labels
	MaxAnnotationBytes     = 4096   // length of a value in spec.target.annotations
)

// Types of status conditions. Reconciling and Stalled are present only while they are true, TargetSynced while the spec
// has a target, and ValuesStale while it has a maxValueAge.
const (
	ConditionReady        = "Ready"
	ConditionReconciling  = "Reconciling"
	ConditionStalled      = "Stalled"
	ConditionTargetSynced = "TargetSynced"
	ConditionValuesStale  = "ValuesStale"
	ConditionExpiring     = "Expiring"
)

// Reasons of status conditions.
const (
	ReasonSealed            = "Sealed"            // Ready: the vault entry holds what the spec says
	ReasonSuspended         = "Suspended"         // spec.suspend is set: nothing is changed
	ReasonInvalidSealed     = "InvalidSealed"     // Stalled: the sealed values are malformed or do not open here
	ReasonInvalidSpec       = "InvalidSpec"       // Stalled: something else in the object cannot be applied
	ReasonPolicy            = "Policy"            // Stalled: the deployment's policy does not allow it
	ReasonOlderValue        = "OlderValue"        // Stalled: a value is older than the last one accepted for its key
	ReasonSourceUnavailable = "SourceUnavailable" // Stalled: the Secret to import is missing, or does not name the object
	ReasonFormerValues      = "FormerValues"      // Stalled: values of a previous object of this name are kept, and nobody has said whether to go on with them
	ReasonSourceLost        = "SourceLost"        // Stalled: the vault entry is gone, and nothing holds its values
	ReasonTargetConflict    = "TargetConflict"    // Stalled, TargetSynced: the target Secret is there and is not the object's
	ReasonInvalidTarget     = "InvalidTarget"     // Stalled, TargetSynced: the target cannot be made as the spec says
	ReasonVaultUnavailable  = "VaultUnavailable"  // Reconciling, Ready: the vault cannot be read or written now; retrying
	ReasonDeleting          = "Deleting"          // Reconciling: the vault entry is being released
	ReasonSynced            = "Synced"            // TargetSynced: the target Secret holds the current version
	ReasonPending           = "Pending"           // Ready: the operator has not seen the object yet; TargetSynced, Ready: the target Secret does not hold the current version yet; Reconciling: the API server does not answer
	ReasonWithinMaxAge      = "WithinMaxAge"      // ValuesStale is false
	ReasonTooOld            = "TooOld"            // ValuesStale: the values are older than spec.rotation.maxValueAge
	ReasonOnSchedule        = "OnSchedule"        // Expiring is false
	ReasonRotationOverdue   = "RotationOverdue"   // Expiring: the time of the rotation has passed
	ReasonExpired           = "Expired"           // Expiring: the TTL has ended, and nothing is served
)

// Annotations with a meaning to the operator. Others of the prefix latticekeep.dev/ are a warning on a SealedCredential.
const (
	// AnnotationPrefix is of all of them.
	AnnotationPrefix = "latticekeep.dev/"
	// AnnotationAbandon, set to "true" on a SealedCredential, lets a deleted object go even when its vault entry cannot
	// be released.
	AnnotationAbandon = "latticekeep.dev/abandon"
	// AnnotationSync, with a new value on a SealedCredential, makes the operator look at the target Secret now.
	AnnotationSync = "latticekeep.dev/sync"
	// AnnotationImport, on a Secret, names the SealedCredential of its namespace that may import it.
	AnnotationImport = "latticekeep.dev/import"
	// AnnotationAdopt, on a Secret, names the SealedCredential of its namespace that may make it its target.
	AnnotationAdopt = "latticekeep.dev/adopt"
	// AnnotationOwner and AnnotationVersion are on every target Secret: the UID of its SealedCredential, and the version
	// of the vault entry that it holds.
	AnnotationOwner   = "latticekeep.dev/owner"
	AnnotationVersion = "latticekeep.dev/version"
	// AnnotationDeletionPolicy is on every target Secret: whether it is deleted with its target, Delete or Retain.
	AnnotationDeletionPolicy = "latticekeep.dev/deletion-policy"
	// AnnotationRestartOn, on a Deployment, StatefulSet or DaemonSet, names the SealedCredentials of its namespace, with
	// commas, whose new values restart it.
	AnnotationRestartOn = "latticekeep.dev/restart-on"
	// AnnotationValues is put on the pod template of such a workload: since when the values are that it runs with. It is
	// put on the workload itself when that was started with them.
	AnnotationValues = "latticekeep.dev/values"
)

// Finalizer holds an object back until its vault entry is deleted or released.
const Finalizer = "latticekeep.dev/vault-entry"

// Scope says where sealed values open.
//
// +kubebuilder:validation:Enum=Strict;Namespace;Cluster
type Scope string

// Scopes. Each is bound into every value, so that changing it in the manifest makes the values unreadable.
const (
	ScopeStrict    Scope = "Strict"    // only in the object of this namespace and name
	ScopeNamespace Scope = "Namespace" // in any object of this namespace
	ScopeCluster   Scope = "Cluster"   // in any object
)

// DeletionPolicy says what happens to the vault entry when its object is deleted.
//
// +kubebuilder:validation:Enum=Delete;Retain
type DeletionPolicy string

// Deletion policies.
const (
	DeletionDelete DeletionPolicy = "Delete"
	DeletionRetain DeletionPolicy = "Retain"
)

// Suite names the HPKE suite of sealed values.
//
// +kubebuilder:validation:Enum=MLKEM768-X25519;MLKEM768
type Suite string

// SealedValue is one value, sealed by itself, so that it can be replaced without knowing the others.
type SealedValue struct {
	// sealedAt is when the value was sealed, in UTC with whole seconds. It is bound into the value.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z$`
	// +kubebuilder:validation:MaxLength=20
	SealedAt metav1.Time `json:"sealedAt"`

	// data is the sealed value in standard base64.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=349528
	Data string `json:"data"`
}

// Sealed carries values that only the vault can open.
type Sealed struct {
	// version of the format of the sealed values.
	//
	// +kubebuilder:validation:Enum=1
	Version int32 `json:"version"`

	// suite is the HPKE suite of the sealing key.
	Suite Suite `json:"suite"`

	// keyID identifies the sealing key: the SHA3-256 digest of its suite and public key, in lower-case hex.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	KeyID string `json:"keyID"`

	// scope says where the values open: only in this object (Strict), in any object of this namespace (Namespace), or
	// anywhere (Cluster). It is bound into every value.
	//
	// +kubebuilder:default=Strict
	// +optional
	Scope Scope `json:"scope,omitempty"`

	// values by data key; a key has 1 to 253 letters, digits, '-', '_' or '.'. Together their data is at most 256 KiB
	// before base64.
	//
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^[-._a-zA-Z0-9]{1,253}$'))",message="a data key has 1 to 253 letters, digits, '-', '_' or '.'"
	// +kubebuilder:validation:XValidation:rule="self.map(k, size(self[k].data)).sum() <= 349528",message="the values together are larger than 256 KiB"
	Values map[string]SealedValue `json:"values"`

	// allowOlder accepts values that were sealed before the last ones accepted for their keys.
	//
	// +optional
	AllowOlder bool `json:"allowOlder,omitempty"`
}

// ValuesFrom names where plaintext values are imported from.
type ValuesFrom struct {
	// secretRef names a Secret of the object's namespace. It must carry the annotation latticekeep.dev/import with the
	// object's name, so that nobody imports what its owner did not mean to be imported.
	SecretRef SecretReference `json:"secretRef"`

	// deleteAfterImport deletes the Secret once its values are in the vault.
	//
	// +optional
	DeleteAfterImport bool `json:"deleteAfterImport,omitempty"`
}

// SecretReference names a Secret of the object's namespace.
type SecretReference struct {
	// name of the Secret.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// Generator makes the values of one entry inside the vault, where nobody sees them.
//
// +kubebuilder:validation:XValidation:rule="has(self.random) != has(self.keyPair)",message="exactly one of random and keyPair is needed"
type Generator struct {
	// key is the data key of the value; of a key pair, that of the private key.
	//
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key"`

	// random makes random characters.
	//
	// +optional
	Random *Random `json:"random,omitempty"`

	// keyPair makes a private key and its public key, as PEM.
	//
	// +optional
	KeyPair *KeyPair `json:"keyPair,omitempty"`
}

// Charset says which characters a random value has.
//
// +kubebuilder:validation:Enum=Alphanumeric;Hex;Base64URL;ASCII
type Charset string

// Random says how a random value is made.
type Random struct {
	// length in characters.
	//
	// +kubebuilder:validation:Minimum=16
	// +kubebuilder:validation:Maximum=4096
	// +kubebuilder:default=32
	// +optional
	Length int32 `json:"length,omitempty"`

	// charset: letters and digits (Alphanumeric), lower-case hexadecimal digits (Hex), the characters of Base64URL, or all
	// printable ASCII characters but the space (ASCII).
	//
	// +kubebuilder:default=Alphanumeric
	// +optional
	Charset Charset `json:"charset,omitempty"`
}

// KeyPairAlgorithm names an algorithm of key pairs.
//
// +kubebuilder:validation:Enum=Ed25519;ML-DSA-65;ML-KEM-768;ECDSA-P256;ECDSA-P384;RSA-3072;RSA-4096
type KeyPairAlgorithm string

// KeyPair says how a key pair is made.
type KeyPair struct {
	// algorithm of the pair.
	Algorithm KeyPairAlgorithm `json:"algorithm"`

	// publicKeyName is the data key of the public key; by default key with .pub behind it.
	//
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	PublicKeyName string `json:"publicKeyName,omitempty"`
}

// RotationPolicy says what a rotation renews.
//
// +kubebuilder:validation:Enum=Reencrypt;Regenerate
type RotationPolicy string

// Rotation policies.
const (
	RotationReencrypt  RotationPolicy = "Reencrypt"  // keys and expiry
	RotationRegenerate RotationPolicy = "Regenerate" // the values too
)

// Rotation says when the vault entry is rotated, and what that renews.
type Rotation struct {
	// policy: Reencrypt renews keys and expiry around the same values, Regenerate makes new values as spec.generate says.
	//
	// +kubebuilder:default=Reencrypt
	// +optional
	Policy RotationPolicy `json:"policy,omitempty"`

	// before is how long before the end of the TTL the entry is rotated, in hours, minutes and seconds such as 36h or
	// 1h30m; a third of the TTL by default.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?$`
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=24
	// +optional
	Before *metav1.Duration `json:"before,omitempty"`

	// overlap is how long the previous values stay readable over REST after a Regenerate, as the version before the current
	// one, so that consumers can roll without an outage; not at all by default.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?$`
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=24
	// +optional
	Overlap *metav1.Duration `json:"overlap,omitempty"`

	// trigger rotates the entry once, now, whenever it changes. Any text will do, such as a date.
	//
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Trigger string `json:"trigger,omitempty"`

	// maxValueAge is how old values may become; older ones raise the condition ValuesStale.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?$`
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=24
	// +optional
	MaxValueAge *metav1.Duration `json:"maxValueAge,omitempty"`
}

// Encoding says how values are escaped where a template puts them in.
//
// +kubebuilder:validation:Enum=Text;URL;JSON
type Encoding string

// Encodings of a template.
const (
	EncodingText Encoding = "Text" // as they are
	EncodingURL  Encoding = "URL"  // everything but unreserved characters percent-encoded, RFC 3986 §2.1
	EncodingJSON Encoding = "JSON" // as the inside of a JSON string, RFC 8259 §7
)

// TargetKey is one key of the target Secret: a value as it is, or a text that values are put into.
//
// +kubebuilder:validation:XValidation:rule="has(self.from) != has(self.template)",message="exactly one of from and template is needed"
// +kubebuilder:validation:XValidation:rule="!has(self.encoding) || has(self.template)",message="encoding is for a template"
type TargetKey struct {
	// to is the key of the Secret.
	//
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	To string `json:"to"`

	// from is the data key of the value.
	//
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	From string `json:"from,omitempty"`

	// template is a text in which $(key) stands for the value of that data key, such as
	// postgres://$(user):$(password)@db:5432/app. $$(key) is the text $(key).
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	// +optional
	Template string `json:"template,omitempty"`

	// encoding says how values are escaped in the template: as they are (Text, the default), for a part of a URL, or for
	// the inside of a JSON string.
	//
	// +optional
	Encoding Encoding `json:"encoding,omitempty"`
}

// SecretType is a type of Secret that the operator makes: none that Kubernetes gives a power of its own.
//
// +kubebuilder:validation:Enum=Opaque;kubernetes.io/tls;kubernetes.io/dockerconfigjson;kubernetes.io/basic-auth;kubernetes.io/ssh-auth
type SecretType string

// Target is a Secret of the object's namespace that holds the current values.
//
// +kubebuilder:validation:XValidation:rule="has(self.name) == has(oldSelf.name) && (!has(self.name) || self.name == oldSelf.name)",message="target.name is immutable: remove the target first, or create another object"
type Target struct {
	// name of the Secret; by default that of the object.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	// +optional
	Name string `json:"name,omitempty"`

	// type of the Secret.
	//
	// +kubebuilder:default=Opaque
	// +optional
	Type SecretType `json:"type,omitempty"`

	// labels of the Secret. Prefixes of Kubernetes and latticekeep.dev are refused, except that labels of
	// app.kubernetes.io other than app.kubernetes.io/managed-by are taken.
	//
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 317 && size(self[k]) <= 63 && (k.startsWith('app.kubernetes.io/') && k != 'app.kubernetes.io/managed-by' || !k.matches('^([^/]*[.])?(kubernetes[.]io|k8s[.]io|latticekeep[.]dev)/')))",message="a label has at most 63 characters, and no prefix of kubernetes.io, k8s.io or latticekeep.dev; of app.kubernetes.io only managed-by is refused"
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// annotations of the Secret. Prefixes of Kubernetes and latticekeep.dev are refused.
	//
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 317 && size(self[k]) <= 4096 && !k.matches('^([^/]*[.])?(kubernetes[.]io|k8s[.]io|latticekeep[.]dev)/'))",message="an annotation has at most 4096 characters, and no prefix of kubernetes.io, k8s.io or latticekeep.dev"
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`

	// keys of the Secret; by default one for each value.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=to
	// +optional
	Keys []TargetKey `json:"keys,omitempty"`

	// immutable keeps everybody from changing the data of the Secret, and lets kubelet stop watching it. For new values
	// the operator deletes it and creates it again.
	//
	// +optional
	Immutable bool `json:"immutable,omitempty"`

	// deletionPolicy says whether the Secret is deleted with the object, or kept.
	//
	// +kubebuilder:default=Delete
	// +optional
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`
}

// AdoptFrom says with what a new object begins when the vault or a Secret still has the values of a previous one.
//
// +kubebuilder:validation:XValidation:rule="has(self.credentialID) != has(self.newValues)",message="exactly one of credentialID and newValues is needed"
type AdoptFrom struct {
	// credentialID is the id of the vault entry to go on with: one of the namespace's tenant that belongs to no object.
	//
	// +kubebuilder:validation:Pattern=`^cred_[a-z2-7]{26}$`
	// +kubebuilder:validation:MaxLength=31
	// +optional
	CredentialID string `json:"credentialID,omitempty"`

	// newValues begins with new values, and leaves the entry of the previous object as it is.
	//
	// +kubebuilder:validation:Enum=true
	// +optional
	NewValues bool `json:"newValues,omitempty"`
}

// SealedCredentialSpec is what the vault entry should be.
//
// +kubebuilder:validation:XValidation:rule="[has(self.sealed), has(self.valuesFrom), has(self.generate)].filter(x, x).size() == 1",message="exactly one of sealed, valuesFrom and generate is needed"
// +kubebuilder:validation:XValidation:rule="(!has(oldSelf.sealed) || has(self.sealed)) && (!has(oldSelf.generate) || has(self.generate)) && (!has(oldSelf.valuesFrom) || !has(self.generate))",message="the kind of source is fixed, except that valuesFrom may become sealed: create another object"
// +kubebuilder:validation:XValidation:rule="!has(self.rotation) || !has(self.rotation.policy) || self.rotation.policy == 'Reencrypt' || has(self.generate)",message="rotation.policy Regenerate needs generate"
// +kubebuilder:validation:XValidation:rule="!has(self.rotation) || !has(self.rotation.overlap) || (has(self.rotation.policy) && self.rotation.policy == 'Regenerate' && duration(self.rotation.overlap).getSeconds() <= self.ttlDays * 86400)",message="rotation.overlap needs rotation.policy Regenerate, and is no longer than the TTL"
// +kubebuilder:validation:XValidation:rule="!has(self.rotation) || !has(self.rotation.before) || (duration(self.rotation.before).getSeconds() > 0 && duration(self.rotation.before).getSeconds() <= self.ttlDays * 86400 - 3600)",message="rotation.before must be more than 0 and at least an hour shorter than the TTL"
type SealedCredentialSpec struct {
	// credentialType is the kind of credential, such as database or api-key. It is bound into every value and cannot
	// be changed.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-zA-Z0-9][-._a-zA-Z0-9]*$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="credentialType is immutable: delete the object and create it with values sealed for the new type"
	CredentialType string `json:"credentialType"`

	// ttlDays is how many days the vault entry lives from the last time it was sealed or rotated.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	// +kubebuilder:default=90
	// +optional
	TTLDays int32 `json:"ttlDays,omitempty"`

	// suspend stops the operator from changing the vault entry. Deleting the object is still honoured.
	//
	// +optional
	Suspend bool `json:"suspend,omitempty"`

	// deletionPolicy says whether the vault entry is deleted with the object, or kept.
	//
	// +kubebuilder:default=Delete
	// +optional
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`

	// adoptFrom says with what a new object begins when the vault still has the values of a previous one. To set it, one
	// needs the verb adopt on sealedcredentials. Remove it once the object has its vault entry: an object that has
	// another entry than credentialID names is stalled.
	//
	// +optional
	AdoptFrom *AdoptFrom `json:"adoptFrom,omitempty"`

	// sealed carries the values.
	//
	// +optional
	Sealed *Sealed `json:"sealed,omitempty"`

	// valuesFrom imports the values from a Secret.
	//
	// +optional
	ValuesFrom *ValuesFrom `json:"valuesFrom,omitempty"`

	// generate has the values made inside the vault, by data key. At most two of them are RSA key pairs, which take
	// seconds to make.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:XValidation:rule="self.filter(g, has(g.keyPair) && g.keyPair.algorithm.startsWith('RSA-')).size() <= 2",message="at most 2 RSA key pairs are made for one object: use another algorithm"
	// +listType=map
	// +listMapKey=key
	// +optional
	Generate []Generator `json:"generate,omitempty"`

	// rotation says when the entry is rotated.
	//
	// +optional
	Rotation *Rotation `json:"rotation,omitempty"`

	// target is a Secret that holds the values, for workloads that read one.
	//
	// +optional
	Target *Target `json:"target,omitempty"`
}

// AuditReference points at an entry of the audit log.
type AuditReference struct {
	// sequence of the entry.
	//
	// +kubebuilder:validation:Minimum=0
	Sequence int64 `json:"sequence"`

	// hash of the entry, in lower-case hex.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	Hash string `json:"hash"`
}

// Previous is the version before the current one, while it is readable.
type Previous struct {
	// version to ask for.
	//
	// +kubebuilder:validation:Minimum=1
	Version int64 `json:"version"`

	// readableUntil is when it ends.
	ReadableUntil metav1.Time `json:"readableUntil"`
}

// TargetStatus is what was last seen of the target Secret.
type TargetStatus struct {
	// name of the Secret.
	//
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// uid of the Secret.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=63
	UID types.UID `json:"uid"`

	// resourceVersion of the Secret when it was last seen to hold what it should.
	//
	// +kubebuilder:validation:MaxLength=63
	ResourceVersion string `json:"resourceVersion"`

	// version of the vault entry that it holds.
	//
	// +kubebuilder:validation:Minimum=1
	Version int64 `json:"version"`

	// audit is the hash of the audit entry of that version, in lower-case hex: which version 3 it is, if the store was ever
	// set back.
	//
	// +kubebuilder:validation:MaxLength=64
	Audit string `json:"audit"`

	// spec is the SHA3-256 digest of the spec.target that it was made by, in lower-case hex.
	//
	// +kubebuilder:validation:MaxLength=64
	Spec string `json:"spec"`

	// seenAt is when the operator last wrote the Secret, found it changed and compared it with the vault, or looked at it
	// because of latticekeep.dev/sync. It looks more often than that, and writes nothing when nothing has changed.
	//
	// +optional
	SeenAt *metav1.Time `json:"seenAt,omitempty"`

	// sync is the annotation latticekeep.dev/sync, of at most 63 bytes, that was there at seenAt.
	//
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Sync string `json:"sync,omitempty"`
}

// SealedCredentialStatus is what was observed of the vault entry.
type SealedCredentialStatus struct {
	// observedGeneration is the generation that the status speaks of; -1 until the object has been seen, so that a new
	// object never reads as current.
	//
	// +kubebuilder:validation:Minimum=-1
	// +kubebuilder:default=-1
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// credentialID is the id of the vault entry in the REST interface.
	//
	// +kubebuilder:validation:MaxLength=63
	// +optional
	CredentialID string `json:"credentialID,omitempty"`

	// version of the vault entry; every sealing and rotation counts it up.
	//
	// +kubebuilder:validation:Minimum=0
	// +optional
	Version int64 `json:"version,omitempty"`

	// sealedAt is when the current version was sealed.
	//
	// +optional
	SealedAt *metav1.Time `json:"sealedAt,omitempty"`

	// valuesChangedAt is when the values last changed, as opposed to the keys around them.
	//
	// +optional
	ValuesChangedAt *metav1.Time `json:"valuesChangedAt,omitempty"`

	// previous is the version before, while it is readable.
	//
	// +optional
	Previous *Previous `json:"previous,omitempty"`

	// target is what was last seen of the target Secret.
	//
	// +optional
	Target *TargetStatus `json:"target,omitempty"`

	// expiresAt is when the vault entry ends unless it is rotated.
	//
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`

	// nextRotationTime is when the operator rotates the entry.
	//
	// +optional
	NextRotationTime *metav1.Time `json:"nextRotationTime,omitempty"`

	// lastTrigger is the rotation.trigger that was honoured last.
	//
	// +kubebuilder:validation:MaxLength=253
	// +optional
	LastTrigger string `json:"lastTrigger,omitempty"`

	// sealingKeyID is the id of the sealing key of the current values, if they were sealed.
	//
	// +kubebuilder:validation:MaxLength=64
	// +optional
	SealingKeyID string `json:"sealingKeyID,omitempty"`

	// audit is the last audit entry of this credential; it changes only with the version.
	//
	// +optional
	Audit *AuditReference `json:"audit,omitempty"`

	// conditions: Ready and Expiring always; Reconciling and Stalled only while they are true; TargetSynced with a target,
	// ValuesStale with a maxValueAge. Until the operator has seen the object, Ready is Unknown and nothing else is there.
	//
	// +kubebuilder:default={{type:"Ready",status:"Unknown",reason:"Pending",message:"waiting for the operator",lastTransitionTime:"1970-01-01T00:00:00Z"}}
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// The schema of the CRD has a number, which rises with every release that changes it: `latticekeep crd apply` replaces
// no newer one. The CRD belongs to no release of Helm, but once it did: without helm.sh/resource-policy, the upgrade
// from such a release would delete it, and every object.

// SealedCredential is a credential that is safe to keep in git: the operator opens its values, seals them into the
// vault of the namespace's tenant, and rotates the entry before its TTL ends.
//
// +kubebuilder:metadata:annotations="latticekeep.dev/schema=1"
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=slcred,categories=latticekeep
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.credentialType`
// +kubebuilder:printcolumn:name="Version",type=integer,JSONPath=`.status.version`
// +kubebuilder:printcolumn:name="Expires",type=string,format=date-time,JSONPath=`.status.expiresAt`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.status.target.name`,priority=1
// +kubebuilder:printcolumn:name="Next rotation",type=string,format=date-time,JSONPath=`.status.nextRotationTime`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
//
// +kubebuilder:validation:XValidation:rule="!has(self.spec.target) || !has(self.spec.valuesFrom) || !has(self.spec.valuesFrom.deleteAfterImport) || !self.spec.valuesFrom.deleteAfterImport || self.spec.valuesFrom.secretRef.name != (has(self.spec.target.name) ? self.spec.target.name : self.metadata.name)",message="valuesFrom.deleteAfterImport would delete the target: name another Secret"
type SealedCredential struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SealedCredentialSpec `json:"spec"`

	// +kubebuilder:default={observedGeneration:-1}
	// +optional
	Status SealedCredentialStatus `json:"status,omitzero"`
}

// SealedCredentialList is a list of SealedCredential.
//
// +kubebuilder:object:root=true
type SealedCredentialList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SealedCredential `json:"items"`
}
