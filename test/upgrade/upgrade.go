// Package upgrade contains a data directory from an earlier commit. Its tests show that the present
// program opens, serves and verifies it. README.md describes the content and how it was made.
package upgrade

import "time"

// Known lists what the fixture contains and how to read it. It is the content of
// testdata/known.json.
type Known struct {
	Commit string    `json:"commit"` // commit of the program that made the fixture
	MadeAt time.Time `json:"made_at"`

	Identity   string `json:"identity"`   // fingerprint of the deployment
	Chain      string `json:"chain"`      // fingerprint of the audit log
	Checkpoint string `json:"checkpoint"` // early checkpoint that the log must extend

	SystemKey string            `json:"system_key"`
	APIKeys   map[string]string `json:"api_keys"` // keyed by tenant

	Credentials []Credential  `json:"credentials"`
	Deleted     []Credential  `json:"deleted"`
	Ciphertexts []Ciphertext  `json:"ciphertexts"`
	Signatures  []Signature   `json:"signatures"`
	Users       []User        `json:"users"`
	Sealing     Sealing       `json:"sealing"`
	RevokedKey  string        `json:"revoked_key"` // API key that no longer authenticates
	Backup      BackupSummary `json:"backup"`
}

// Credential is a credential and the values to which a tenant's API key unseals it.
type Credential struct {
	Tenant    string            `json:"tenant"`
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Version   int64             `json:"version"`
	ExpiresAt time.Time         `json:"expires_at"`
	Values    map[string]string `json:"values"`
}

// Ciphertext is data that a tenant encrypted. A ciphertext of API version 1 has only Data.
type Ciphertext struct {
	Tenant    string `json:"tenant"`
	Interface int    `json:"interface"` // 1 or 2
	KEM       string `json:"kem,omitempty"`
	Nonce     string `json:"nonce,omitempty"`
	Key       string `json:"key,omitempty"`
	Data      string `json:"data"`
	Plaintext string `json:"plaintext"` // base64
}

// Signature is a signature over a tenant's data.
type Signature struct {
	Tenant string `json:"tenant"`
	Data   string `json:"data"`
	PQC    string `json:"pqc"`
	HMAC   string `json:"hmac"`
}

// User is an account that signs in with a password.
type User struct {
	Tenant   string `json:"tenant"`
	Email    string `json:"email"`
	Password string `json:"password"`
	Role     string `json:"role"`
}

// Sealing contains the sealing keys and a SealedCredential that the first one opens.
type Sealing struct {
	Keys     []SealingKey `json:"keys"`
	Manifest string       `json:"manifest"`
}

// SealingKey is a sealing key and its state in the deployment.
type SealingKey struct {
	ID    string `json:"id"`
	State string `json:"state"`
}

// BackupSummary describes the backup, which was taken before most other rows were made.
type BackupSummary struct {
	Credential Credential `json:"credential"`
	APIKey     string     `json:"api_key"` // API key of the credential's tenant
}
