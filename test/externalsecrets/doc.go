// Package externalsecrets tests docs/guides/external-secrets.md: the External Secrets Operator, the
// real one, reads and pushes credentials of a real server, with the manifests and the commands of
// the guide.
//
// It has no code of its own. `make external-secrets` compiles the operator and runs everything;
// without the operator only what needs no cluster runs.
package externalsecrets
