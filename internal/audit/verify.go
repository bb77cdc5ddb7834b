package audit

import (
	"cmp"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// Broken says where a chain stops holding.
type Broken struct {
	Sequence uint64 // the first bad one
	Reason   string
}

func (b *Broken) Error() string {
	return fmt.Sprintf("the chain is broken at sequence %d: %s", b.Sequence, b.Reason)
}

// Options of a verification.
type Options struct {
	// Tenant verifies one tenant's part of the chain by its own links; other
	// tenants' entries are not expected.
	Tenant bool
	// PublicKey of the log. Nil takes the one that the first entry names.
	PublicKey *dualsig.PublicKey
	// Fingerprint of the chain, as [Fingerprint] makes it; empty leaves open
	// whose log it is.
	Fingerprint string
}

// State is the newest state of a credential that the log knows.
type State struct {
	Sequence uint64 // of the entry that says so
	Deleted  bool
	Version  string // decimal
	Digest   string // of the record, lower-case hex
	Former   Former // zero when no former version may be there
	anchor   link
}

// Former is the version that a rotation of a credential left readable.
type Former struct {
	Version string // decimal
	Digest  string // of its record
}

// CredentialKey names a credential of a tenant.
type CredentialKey struct {
	Tenant     authz.TenantID
	Credential string
}

// Report is what a verification that found nothing wrong has seen.
type Report struct {
	Entries     uint64
	Tenant      string // whose part it is; empty for a whole chain
	Sequence    uint64 // of the last entry
	Hash        string // of the last entry
	ChainID     string
	Fingerprint string
	Pinned      bool // a fingerprint or public key was given, and is this chain's
	PublicKey   *dualsig.PublicKey
	Credentials map[CredentialKey]State // all that were ever sealed
}

// Verifier checks entries one after the other, oldest first. Signatures are
// checked in batches on all cores; the earliest fault found is the one
// reported.
type Verifier struct {
	options Options
	report  Report
	keyID   string
	head    link
	tenants map[string]tenantHead
	batch   []*Entry
}

type tenantHead struct {
	sequence uint64
	hash     string
}

// NewVerifier returns a verifier that has seen nothing.
func NewVerifier(o Options) *Verifier {
	return &Verifier{
		options: o,
		tenants: make(map[string]tenantHead),
		report:  Report{Credentials: make(map[CredentialKey]State)},
	}
}

// batchSize keeps every core busy between two looks for a fault.
var batchSize = 64 * runtime.GOMAXPROCS(0)

// Add checks the next entry. Once it has failed the verifier is done.
func (v *Verifier) Add(e *Entry) error {
	if err := v.link(e); err != nil {
		// An earlier signature may be wrong as well, and comes first.
		return cmp.Or(v.flush(), err)
	}
	v.batch = append(v.batch, e)
	if len(v.batch) >= batchSize {
		return v.flush()
	}
	return nil
}

// Next returns the sequence that the next entry must have in a whole chain.
func (v *Verifier) Next() uint64 { return v.head.sequence + 1 }

// Finish checks what is left and returns what was seen. A chain without an
// entry is broken at 1: every log begins with its first entry.
func (v *Verifier) Finish() (Report, error) {
	if err := v.flush(); err != nil {
		return Report{}, err
	}
	if v.report.Entries == 0 {
		return Report{}, &Broken{1, "there is no entry"}
	}
	return v.report, nil
}

func (v *Verifier) flush() error {
	good := make([]bool, len(v.batch))
	onAllCores(len(v.batch), func(i int) {
		good[i] = v.batch[i].verify(v.report.PublicKey)
	})
	for i, ok := range good {
		if !ok {
			return &Broken{v.batch[i].Sequence, "the signature does not verify"}
		}
	}
	v.batch = v.batch[:0]
	return nil
}

// link checks all but the signature, and replays what the entry says of
// credentials.
func (v *Verifier) link(e *Entry) error {
	sum, err := e.digest()
	if err != nil {
		return &Broken{e.Sequence, "the entry cannot be encoded"}
	}
	if hash := hex.EncodeToString(sum[:]); e.Hash != hash {
		return &Broken{e.Sequence, "the hash is not that of the entry"}
	}
	if v.report.Entries == 0 {
		if err := v.start(e); err != nil {
			return err
		}
	}
	at := e.Time()
	if at.IsZero() || at.Format(timeFormat) != e.Timestamp {
		return &Broken{e.Sequence, "the timestamp is malformed"}
	}
	switch {
	case !v.options.Tenant && e.Sequence != v.head.sequence+1:
		return &Broken{v.head.sequence + 1, fmt.Sprintf("expected here, found %d: an entry is missing, repeated or moved", e.Sequence)}
	case e.Sequence <= v.head.sequence:
		return &Broken{v.head.sequence + 1, fmt.Sprintf("expected a later entry, found %d: an entry is repeated or moved", e.Sequence)}
	case !v.options.Tenant && e.PreviousHash != v.head.previous():
		return &Broken{e.Sequence, "the previous hash is not that of the entry before"}
	case at.UnixMicro() < v.head.micros:
		return &Broken{e.Sequence, "the timestamp is earlier than that of the entry before"}
	case e.KeyID != v.keyID:
		return &Broken{e.Sequence, "the entry names another signing key than the chain"}
	}
	last, known := v.tenants[e.TenantID]
	if !known {
		last.hash = zeroHash
		if v.options.Tenant && len(v.tenants) > 0 {
			return &Broken{e.Sequence, "the entry belongs to another tenant"}
		}
	}
	if e.TenantSequence != last.sequence+1 {
		return &Broken{e.Sequence, fmt.Sprintf("the tenant's sequence is %d, expected %d: an entry of this tenant is missing, repeated or moved", e.TenantSequence, last.sequence+1)}
	}
	if e.TenantPreviousHash != last.hash {
		return &Broken{e.Sequence, "the previous hash is not that of the tenant's entry before"}
	}
	v.tenants[e.TenantID] = tenantHead{e.TenantSequence, e.Hash}
	v.head = link{e.Sequence, at.UnixMicro(), sum}
	v.report.Entries++
	v.report.Sequence, v.report.Hash = e.Sequence, e.Hash
	v.replay(e)
	return nil
}

// start takes chain id and key from the first entry, and holds them against
// what was pinned.
func (v *Verifier) start(e *Entry) error {
	raw, ok := decodeBase64(e.Attributes[attributePublicKey])
	key, err := dualsig.ParsePublicKey(raw)
	// A whole log begins with the start of its chain; a log that was wiped and
	// written on begins with something else.
	begins := v.options.Tenant || (e.EventType == ChainStarted && e.TenantID == string(authz.SystemTenant))
	if !ok || err != nil || !begins || e.Attributes[attributeChainID] == "" {
		first := e.Sequence
		if !v.options.Tenant {
			first = 1
		}
		return &Broken{first, "the first entry does not name a chain id and a public key: the beginning of the log is missing"}
	}
	if v.options.Tenant {
		v.report.Tenant = e.TenantID
	}
	v.report.ChainID = e.Attributes[attributeChainID]
	v.report.Fingerprint = Fingerprint(v.report.ChainID, raw)
	v.report.PublicKey, v.keyID = key, key.ID()
	if pin := v.options.Fingerprint; pin != "" {
		if subtle.ConstantTimeCompare([]byte(pin), []byte(v.report.Fingerprint)) != 1 {
			return &Broken{e.Sequence, "the chain's fingerprint is not the pinned one: this is another log"}
		}
		v.report.Pinned = true
	}
	if pin := v.options.PublicKey; pin != nil {
		if pin.ID() != v.keyID {
			return &Broken{e.Sequence, "the chain's public key is not the given one: this is another log"}
		}
		v.report.Pinned = true
	}
	return nil
}

func (v *Verifier) replay(e *Entry) {
	if e.Outcome != Success || e.Resource.Type != CredentialResource {
		return
	}
	key := CredentialKey{authz.TenantID(e.TenantID), e.Resource.ID}
	before, known := v.report.Credentials[key]
	switch {
	case e.EventType.changesVersion():
		next := State{
			Sequence: e.Sequence, Version: e.Attributes[AttributeVersion], Digest: e.Attributes[AttributeDigest], anchor: v.head,
		}
		switch {
		case e.EventType == CredentialReencrypted:
			next.Former = before.Former
		case e.Attributes[AttributeOverlapUntil] != "":
			next.Former = Former{before.Version, before.Digest}
		}
		v.report.Credentials[key] = next
	case e.EventType == CredentialDeleted:
		v.report.Credentials[key] = State{Sequence: e.Sequence, Deleted: true}
	case known && (e.EventType == CredentialReleased || e.EventType == CredentialVersionEnded):
		before.Former = Former{}
		v.report.Credentials[key] = before
	}
}

// IsBroken returns the fault that err reports, if it is one of the chain and
// not of reading it.
func IsBroken(err error) (*Broken, bool) {
	var b *Broken
	ok := errors.As(err, &b)
	return b, ok
}
