// Package v1beta1 holds the Kubernetes types of group latticekeep.dev, version v1beta1: SealedCredential, the object
// that a platform team commits to git and the operator turns into a vault entry.
//
// The spec carries only ciphertext (HPKE values bound to namespace, name and credential type) and the wishes for the
// entry's lifetime; the status carries only identifiers and times. No secret, and no hash of one, has a field here.
//
// Every string, list and map is bounded, so that the API server can price the CEL rules. Fields that a Go type parses
// when an object is decoded (times, durations) have patterns which admit only what that type accepts: one object that
// cannot be decoded would otherwise stop the operator's watch for all of them.
//
// The package has no behaviour: sealing, opening and checking values is internal/sealing, and reconciling is
// controllers.
//
// +kubebuilder:object:generate=true
// +groupName=latticekeep.dev
package v1beta1
