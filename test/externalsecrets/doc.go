// Package externalsecrets tests that the controller of External Secrets reads and writes credentials, as
// docs/guides/external-secrets.md says. `make external-secrets` compiles the controller and runs the test.
package externalsecrets
