// Package upgrade holds a data directory that an earlier commit made, and shows that the present
// program opens, serves and verifies it. README.md says what is in it and how it was made.
package upgrade

import "time"

// Known is what the maker of the fixture knows of it: what was stored, and how to read it. It is
// testdata/known.json.
type Known struct {
	Commit string    `json:"commit"` // commit of the program that made the fixture
	MadeAt time.Time `json:"made_at"`

	Identity   string `json:"identity"`   // fingerprint of the deployment
	Chain      string `json:"chain"`      // fingerprint of the audit log
	Checkpoint string `json:"checkpoint"` // an early one, which the log must go on from

	SystemKey string            `json:"system_key"`
	APIKeys   map[string]string `json:"api_keys"` // keyed by tenant

	Credentials []Credential  `json:"credentials"`
	Deleted     []Credential  `json:"deleted"`
	Ciphertexts []Ciphertext  `json:"ciphertexts"`
	Signatures  []Signature   `json:"signatures"`
	Users       []User        `json:"users"`
	Sealing     Sealing       `json:"sealing"`
	RevokedKey  string        `json:"revoked_key"` // an API key that signs nobody in
	Backup      BackupSummary `json:"backup"`
}

// Credential is one that a tenant's API key unseals to the values.
type Credential struct {
	Tenant    string            `json:"tenant"`
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Version   int64             `json:"version"`
	ExpiresAt time.Time         `json:"expires_at"`
	Values    map[string]string `json:"values"`
}

// Ciphertext is data that a tenant encrypted. One of version 1 of the interface has Data alone.
type Ciphertext struct {
	Tenant    string `json:"tenant"`
	Interface int    `json:"interface"` // 1 or 2
	KEM       string `json:"kem,omitempty"`
	Nonce     string `json:"nonce,omitempty"`
	Key       string `json:"key,omitempty"`
	Data      string `json:"data"`
	Plaintext string `json:"plaintext"` // base64
}

// Signature is one over data of a tenant.
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

// Sealing has the sealing keys, and a SealedCredential that the first one opens.
type Sealing struct {
	Keys     []SealingKey `json:"keys"`
	Manifest string       `json:"manifest"`
}

// SealingKey is a key and the state that the deployment keeps it in.
type SealingKey struct {
	ID    string `json:"id"`
	State string `json:"state"`
}

// BackupSummary says what the backup holds, which was taken before most of the rest was made.
type BackupSummary struct {
	Credential Credential `json:"credential"`
	APIKey     string     `json:"api_key"` // API key of the credential's tenant
}
