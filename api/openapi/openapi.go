// Package openapi holds the contract of the REST interface, one document per
// version. The documents are written by hand and are the source: routes, types
// and clients are generated from them, and the servers' tests hold every
// request and response against them.
package openapi

import _ "embed"

var (
	//go:embed v1.yaml
	v1 string
	//go:embed v2.yaml
	v2 string
)

// V1 returns the OpenAPI 3.0 document of /v1 in YAML.
func V1() string { return v1 }

// V2 returns the OpenAPI 3.0 document of /api/v2 in YAML.
func V2() string { return v2 }
