package assessor

import (
	"context"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Review is the entry of a review.
type Review struct {
	Sequence uint64
	Count    int    // API keys and members, or parts of the inventory; zero for an acknowledgement
	NoteID   string // empty: none
	compliance.Acknowledged
}

var errRange = fault.New(fault.Invalid, "from and to are tenant sequences of entries that exist, and from is not above to")

// Waiting returns what p can acknowledge, and when members last reviewed what. An API key asks for
// the user who is responsible for it. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) Waiting(ctx context.Context, p authz.Principal) (w compliance.Waiting, err error) {
	if err := s.guard.Admit(ctx, p, authz.ReadAudit); err != nil {
		return w, err
	}
	err = s.withNewest(ctx, p.Tenant, func(e *compliance.Evidence) { w = e.Waiting(e.Responsible(p.Kind, p.ID)) })
	if err != nil {
		return w, err
	}
	read := logEvent(audit.AuditRead, p)
	read.Attributes = map[string]string{audit.AttributeReviews: "true"}
	return w, s.guard.Record(ctx, read)
}

// Acknowledge records that the user p looked at the denials and failures of a range of tenant
// sequences, with a note or "". It leaves out those that p caused. Errors: fault.Forbidden,
// fault.Invalid for a range that reaches beyond the newest entry, fault.Unavailable.
func (s *Service) Acknowledge(ctx context.Context, p authz.Principal, from, to uint64, note string) (r Review, err error) {
	if err := s.guard.Admit(ctx, p, authz.ReviewLog); err != nil {
		return r, err
	}
	exists := false
	err = s.withNewest(ctx, p.Tenant, func(e *compliance.Evidence) {
		exists = 0 < from && from <= to && to <= e.TenantSequence
		r.Acknowledged = e.Acknowledge(p.ID, from, to)
	})
	if err == nil && !exists {
		err = errRange
	}
	if err != nil {
		return r, err
	}
	err = s.record(ctx, p, &r, audit.DenialsAcknowledged, note, map[string]string{
		compliance.AttributeFrom: formatUint(from), compliance.AttributeTo: formatUint(to), compliance.AttributeDigest: r.Digest,
		compliance.AttributeDenials: strconv.Itoa(r.Denials), compliance.AttributeFailures: strconv.Itoa(r.Failures),
	})
	return r, err
}

// ReviewAccess records that the user p looked at API keys and members, with a note or "". Errors:
// fault.Forbidden, fault.Unavailable.
func (s *Service) ReviewAccess(ctx context.Context, p authz.Principal, note string) (r Review, err error) {
	if err := s.guard.Admit(ctx, p, authz.ReviewAccess); err != nil {
		return r, err
	}
	err = s.withNewest(ctx, p.Tenant, func(e *compliance.Evidence) { r.Count, r.Digest = e.AccessList() })
	if err != nil {
		return r, err
	}
	err = s.record(ctx, p, &r, audit.AccessReviewed, note, map[string]string{
		compliance.AttributeCount: strconv.Itoa(r.Count), compliance.AttributeDigest: r.Digest,
	})
	return r, err
}

// ReviewInventory records that the user p looked at the inventory of cryptography, with a note or "".
// The digest is over its components, because the document around them has a time. Errors:
// fault.Forbidden, fault.Unavailable.
func (s *Service) ReviewInventory(ctx context.Context, p authz.Principal, note string) (r Review, err error) {
	if err := s.guard.Admit(ctx, p, authz.ReviewInventory); err != nil {
		return r, err
	}
	b, err := s.inventory(ctx, p)
	if err != nil {
		return r, fmt.Errorf("making an inventory: %w", err)
	}
	var bom struct {
		Components []json.RawMessage `json:"components"`
	}
	if err := json.Unmarshal(b, &bom); err != nil {
		return r, fmt.Errorf("reading the inventory: %w", err)
	}
	components, err := json.Marshal(bom.Components)
	if err != nil {
		return r, fmt.Errorf("encoding the inventory: %w", err)
	}
	sum := sha3.Sum256(components)
	r.Count, r.Digest = len(bom.Components), hex.EncodeToString(sum[:])
	err = s.record(ctx, p, &r, audit.InventoryReviewed, note, map[string]string{
		compliance.AttributeCount: strconv.Itoa(r.Count), compliance.AttributeDigest: r.Digest,
	})
	return r, err
}

// record writes the entry of a review, and its note in the same transaction.
func (s *Service) record(ctx context.Context, p authz.Principal, r *Review, t audit.EventType, text string, attributes map[string]string) error {
	e := logEvent(t, p)
	if t != audit.DenialsAcknowledged {
		e.Resource.Type = audit.ComplianceResource
	}
	var row []byte
	if text != "" {
		n := newNote(text)
		r.NoteID = n.id()
		attributes[audit.AttributeNote] = r.NoteID
		var err error
		if row, err = s.evidence.encodeNote(p.Tenant, n); err != nil {
			return err
		}
	}
	e.Attributes = attributes
	var receipt *audit.Receipt
	err := s.evidence.store.Update(ctx, func(tx store.Tx) (err error) {
		if row != nil {
			err = tx.Put(noteKey(p.Tenant, r.NoteID), row)
		}
		if err == nil {
			receipt, err = s.guard.Append(tx, e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("recording %s: %w", t, err)
	}
	r.Sequence = receipt.Sequence
	return nil
}
