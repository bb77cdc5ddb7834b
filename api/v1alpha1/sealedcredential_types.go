package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of the types in this package.
var GroupVersion = schema.GroupVersion{Group: "latticekeep.dev", Version: "v1alpha1"}

// KindSealedCredential is the kind of SealedCredential.
const KindSealedCredential = "SealedCredential"

// AddToScheme registers the types of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &SealedCredential{}, &SealedCredentialList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// Limits that the schema below states as literals; code that makes or checks manifests uses these.
const (
	SealedVersion          = 1      // the only version of the sealed values' format
	DefaultTTLDays         = 90     // of spec.ttlDays
	MaxTTLDays             = 3650   // of spec.ttlDays
	MaxCredentialTypeBytes = 63     // of spec.credentialType
	MaxValues              = 64     // of spec.sealed.values
	MaxSealedText          = 349528 // characters of base64 in all values together: 256 KiB of sealed bytes
	MaxDataKeyBytes        = 253    // of a key of spec.sealed.values
	MaxTriggerBytes        = 253    // of spec.rotation.trigger
)

// Types of status conditions. Reconciling and Stalled are present only while they are true.
const (
	ConditionReady       = "Ready"
	ConditionReconciling = "Reconciling"
	ConditionStalled     = "Stalled"
)

// Reasons of status conditions.
const (
	ReasonSealed           = "Sealed"           // Ready: the vault entry holds what the spec says
	ReasonSuspended        = "Suspended"        // spec.suspend is set: nothing is changed
	ReasonInvalidSealed    = "InvalidSealed"    // Stalled: the sealed values are malformed or do not open here
	ReasonOlderValue       = "OlderValue"       // Stalled: a value is older than the last one accepted for its key
	ReasonVaultUnavailable = "VaultUnavailable" // Reconciling: the vault cannot be written now, it is tried again
	ReasonDeleting         = "Deleting"         // Reconciling: the vault entry is being released
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

// Rotation says when the vault entry gets new keys and a new expiry without a change of its values.
type Rotation struct {
	// before is how long before the end of the TTL the entry is rotated, in hours, minutes and seconds such as 36h or
	// 1h30m; a third of the TTL by default.
	//
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?$`
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=24
	// +optional
	Before *metav1.Duration `json:"before,omitempty"`

	// trigger rotates the entry once, now, whenever it changes. Any text will do, such as a date.
	//
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Trigger string `json:"trigger,omitempty"`
}

// SealedCredentialSpec is what the vault entry should be.
//
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

	// sealed carries the values.
	Sealed Sealed `json:"sealed"`

	// rotation says when the entry is rotated.
	//
	// +optional
	Rotation *Rotation `json:"rotation,omitempty"`
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

	// sealingKeyID is the id of the sealing key of the current values.
	//
	// +kubebuilder:validation:MaxLength=64
	// +optional
	SealingKeyID string `json:"sealingKeyID,omitempty"`

	// audit is the last audit entry of this credential; it changes only with the version.
	//
	// +optional
	Audit *AuditReference `json:"audit,omitempty"`

	// conditions: Ready always; Reconciling and Stalled only while they are true.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SealedCredential is a credential that is safe to keep in git: the operator opens its values, seals them into the
// vault of the namespace's tenant, and rotates the entry before its TTL ends.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=slcred,categories=latticekeep
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.credentialType`
// +kubebuilder:printcolumn:name="Version",type=integer,JSONPath=`.status.version`
// +kubebuilder:printcolumn:name="Expires",type=string,format=date-time,JSONPath=`.status.expiresAt`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
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
