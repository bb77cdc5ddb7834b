// Package crd has the custom resource definition that the program brings to a cluster.
package crd

import _ "embed"

// YAML is the definition of SealedCredential as `make generate` writes it.
//
//go:embed bases/latticekeep.dev_sealedcredentials.yaml
var YAML []byte
