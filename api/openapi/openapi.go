// Package openapi holds the contract of the REST interface, one document per
// version. The documents are written by hand and are the source: the servers'
// tests hold every route and every response against them, and clients are
// generated from them.
package openapi

import _ "embed"

//go:embed v2.yaml
var v2 string

// V2 returns the OpenAPI 3.0 document of /api/v2 in YAML.
func V2() string { return v2 }
