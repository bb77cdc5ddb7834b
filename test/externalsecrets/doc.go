// Package externalsecrets tests docs/guides/external-secrets.md: the External Secrets Operator, the
// real one, reads and pushes credentials of a real server, with the manifests and the commands of
// the guide.
//
// `make external-secrets` compiles the operator and runs everything. Otherwise only that runs which
// needs no operator.
package externalsecrets
