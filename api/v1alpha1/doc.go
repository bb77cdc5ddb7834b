// Package v1alpha1 holds version v1alpha1 of group latticekeep.dev, for objects and manifests written before v1beta1.
//
// Its SealedCredential has the spec and status of package v1beta1, so both versions have one schema and differ only in
// the apiVersion: the API server converts between them without a webhook, and Go by a conversion of the type. The
// version is served, but nothing is stored in it and nothing new is written in it. Only what reads objects and
// manifests that somebody else wrote needs this package.
//
// +kubebuilder:object:generate=true
// +groupName=latticekeep.dev
package v1alpha1
