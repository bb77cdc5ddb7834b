package listing

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Credential is the metadata of a credential: everything except its values.
type Credential struct {
	ID        string
	Name      string
	Type      string
	Version   uint64
	CreatedAt time.Time // time of the first version
	SealedAt  time.Time // time of this version
	ExpiresAt time.Time // [record.Never] if it never expires
	Expired   bool
	Trashed   bool // it expired because somebody put it in the trash
	Owned     bool // a SealedCredential owns it: read-only over REST

	// Details are what people say of it; nil for none. Only lists, the metadata of one, and the answer to
	// their change have them.
	Details *details.Details

	// LastRead is when the hour began in which it was read last; zero for never, or by a release that did
	// not note it. Only the metadata of one and a list in its order have it.
	LastRead time.Time
}

// CredentialOf returns the record's metadata. owned says that a SealedCredential owns it.
func CredentialOf(r *record.Record, now time.Time, owned bool) Credential {
	return Credential{
		ID: r.ID, Name: r.Name, Type: r.Type, Version: r.Version,
		CreatedAt: r.CreatedAt, SealedAt: r.SealedAt, ExpiresAt: r.ExpiresAt,
		Expired: !now.Before(r.Until()), Trashed: r.IsTrashed(), Owned: owned,
	}
}

// NeverExpires reports whether the credential never expires.
func (c Credential) NeverExpires() bool { return c.ExpiresAt.Equal(record.Never()) }

// EntityTag returns the entity tag of the version that c describes.
func (c Credential) EntityTag() string { return record.EntityTag(c.ID, c.Version) }
