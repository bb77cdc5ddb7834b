package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// GroupVersion is the group and version of the types in this package.
var GroupVersion = schema.GroupVersion{Group: v1beta1.GroupVersion.Group, Version: "v1alpha1"}

// AddToScheme registers the types of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &SealedCredential{}, &SealedCredentialList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// SealedCredential is a credential that is safe to keep in git: the operator opens its values, seals them into the
// vault of the namespace's tenant, and rotates the entry before its TTL ends.
//
// +kubebuilder:object:root=true
// +kubebuilder:deprecatedversion:warning="latticekeep.dev/v1alpha1 SealedCredential is deprecated: write apiVersion latticekeep.dev/v1beta1, which has the same fields"
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

	Spec v1beta1.SealedCredentialSpec `json:"spec"`

	// +kubebuilder:default={observedGeneration:-1}
	// +optional
	Status v1beta1.SealedCredentialStatus `json:"status,omitzero"`
}

// SealedCredentialList is a list of SealedCredential.
//
// +kubebuilder:object:root=true
type SealedCredentialList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []SealedCredential `json:"items"`
}

// Current returns the object in the version that the rest of the program works with. The two share what they point to.
func (o *SealedCredential) Current() *v1beta1.SealedCredential {
	current := v1beta1.SealedCredential(*o)
	current.APIVersion = v1beta1.GroupVersion.String()
	return &current
}
