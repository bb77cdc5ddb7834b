package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// From the commit that enters a [Segment] its entries are no part of the database
// any more. What is still there of them is garbage, which readers ignore, and
// which is removed in as many small transactions as it takes, from wherever an
// earlier process left off.

// cutTo returns the sequence up to which entries are in the archive, 0 when none
// is: what the database still has of them is to be ignored. The base says so, which
// is signed, and no row beside it: else whoever adds one would hide entries. Error:
// errDamagedLog for a base that is none of this log.
func (ch *Chain) cutTo(r store.Reader) (uint64, error) {
	base, err := ch.baseIn(r)
	if err != nil || base == nil {
		return 0, err
	}
	return base.Sequence(), nil
}

// baseIn returns the base of this log, nil when nothing is archived. Error:
// errDamagedLog.
func (ch *Chain) baseIn(r store.Reader) (*Base, error) {
	row, err := r.Get(baseKey)
	if err != nil || row == nil {
		return nil, err
	}
	if base := ch.bases.get(row); base != nil {
		return base, nil
	}
	return ch.ownBase(bytes.Clone(row))
}

// cleanRows bounds the entries that one transaction removes.
const cleanRows = 256

// leftOver reports whether there is something to remove, and the newest segment.
// The error is errDamagedLog when it does not end with the base, which is signed:
// nothing is removed on the word of a row.
func (c *Cutter) leftOver(ctx context.Context) (newest Segment, found bool, err error) {
	var row []byte
	err = c.Log.chain.store.View(ctx, func(r store.Reader) error {
		if newest, err = newestSegment(r); err != nil || newest.To == 0 {
			return err
		}
		err := r.Scan(store.Range{From: entryRange.From, To: entryKey(newest.To + 1)}, func(_, _ []byte) bool {
			found = true
			return false
		})
		if err == nil && found {
			row, err = r.Get(baseKey)
			row = bytes.Clone(row)
		}
		return err
	})
	if err != nil || !found {
		return Segment{}, false, err
	}
	base, err := c.Log.chain.ownBase(row)
	if err != nil {
		return Segment{}, false, err
	}
	if base.Sequence() != newest.To || base.head.hash != newest.Hash {
		return Segment{}, false, errDamagedLog
	}
	return newest, true, nil
}

// removeArchived removes the entries up to one that are in the archive, and all that only they
// need: the indexes and summaries of their tenants, and the signatures of their
// groups. Of each tenant the newest row of the index stays, since what comes next
// goes on from it. The caller has made sure of the segment that ends there: what
// another process archives meanwhile is for that one to remove.
func (c *Cutter) removeArchived(ctx context.Context, made uint64) error {
	for more := true; more; {
		err := c.Log.chain.store.Update(ctx, func(tx store.Tx) error {
			to, err := c.Log.chain.cutTo(tx)
			if err != nil {
				return err
			}
			to = min(to, made)
			n := 0
			var bad error
			err = tx.Scan(store.Range{From: entryRange.From, To: entryKey(to + 1)}, func(key, row []byte) bool {
				bad = removeEntry(tx, bytes.Clone(key), bytes.Clone(row))
				n++
				return bad == nil && n < cleanRows
			})
			more = n == cleanRows
			return errors.Join(err, bad)
		})
		if err != nil {
			return fmt.Errorf("removing entries that are in the archive: %w", err)
		}
	}
	return nil
}

// noSignature is in the place of one that is not looked at.
var noSignature = make([]byte, dualsig.SignatureSize)

// removeEntry removes an entry. All older ones are gone.
func removeEntry(tx store.Tx, key, row []byte) error {
	if err := tx.Delete(key); err != nil {
		return err
	}
	if first, ok := rowBatch(row); ok && binary.BigEndian.Uint32(row[13:])+1 == binary.BigEndian.Uint32(row[9:]) {
		if err := tx.Delete(batchKey(first)); err != nil { // it was the last of its group
			return err
		}
	}
	at, err := decodeStored(row, noSignature)
	if err != nil {
		return nil // damaged since it was archived: rows that nobody reads stay
	}
	if err := removeCurrent(tx, at.entry); err != nil {
		return err
	}
	tenant, n := at.entry.TenantID, at.entry.TenantSequence
	if n > 1 { // the one that stayed while it was the newest
		if err := tx.Delete(tenantKey(tenant, n-1)); err != nil {
			return err
		}
	}
	if n%blockSize == 0 {
		if err := tx.Delete(summaryKey(tenant, blockOf(n))); err != nil {
			return err
		}
	}
	newer, err := tx.Get(tenantKey(tenant, n+1))
	if err != nil || newer == nil {
		return err
	}
	return tx.Delete(tenantKey(tenant, n))
}

// removeCurrent removes what names the current version of a credential, with the
// entry that says that it was deleted: the base does not know it any more.
func removeCurrent(tx store.Tx, e *Entry) error {
	if e.EventType != CredentialDeleted || e.Outcome != Success || e.Resource.Type != CredentialResource {
		return nil
	}
	key := currentKey(e.TenantID, e.Resource.ID)
	row, err := tx.Get(key)
	if err != nil || row == nil || sequenceOf(row) > e.Sequence { // it is there again
		return err
	}
	return tx.Delete(key)
}

// leftOver reports whether entries that are archived are still to be removed, and
// with them what only they need.
func (w *storeWalk) leftOver() (found bool, err error) {
	if w.base == nil {
		return false, nil
	}
	err = w.view(func(r store.Reader) error {
		return r.Scan(store.Range{From: entryRange.From, To: entryKey(w.base.head.sequence + 1)}, func(_, _ []byte) bool {
			found = true
			return false
		})
	})
	if err != nil {
		return false, fmt.Errorf("reading the log: %w", err)
	}
	return found, nil
}

// archived holds what the log says to be in the archive against the base, and
// against the entries that say so too, of which the base keeps the archived ones.
func (w *storeWalk) archived() error {
	var segments []Segment
	err := w.view(func(r store.Reader) (err error) {
		segments, err = Segments(r)
		return err
	})
	if err != nil && !errors.Is(err, errDamagedLog) {
		return err
	}
	var newest Segment
	if len(segments) > 0 {
		newest = segments[len(segments)-1]
	}
	switch {
	case err != nil:
		w.suspect(1, "what the log says to be in the archive is damaged")
		return nil
	case w.base == nil && len(segments) > 0:
		w.suspect(1, "the log says that entries are in the archive, and has no base to go on from")
	case w.base != nil && (newest.To != w.base.head.sequence || newest.Hash != w.base.head.hash):
		w.suspect(w.base.head.sequence, "what the log says to be in the archive does not end with the base")
	}
	said := slices.DeleteFunc(slices.Clone(w.history.kept), func(e *Entry) bool { return !e.archives() })
	size := int64(0) // of the tree before the next segment
	for i, s := range segments {
		if i >= len(said) || !s.isOf(said[i]) {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive is not what the entry says that archived it")
		}
		first, ok1 := indexOf(w.epochs, s.From)
		last, ok2 := indexOf(w.epochs, s.To)
		if !ok1 || !ok2 || first != size {
			w.suspect(w.clamp(s.From), "what the log says to be in the archive does not go on where the former segment ends")
			return nil
		}
		if err := w.endsWith(last, s); err != nil {
			return err
		}
		size = last + 1
	}
	if len(said) > len(segments) {
		w.suspect(w.clamp(said[len(segments)].number(attributeFrom)), "an entry says that others are in the archive, and the log does not say where")
	}
	return nil
}

// endsWith holds the hash of a segment's last entry, which no entry says, against
// the tree.
func (w *storeWalk) endsWith(index int64, s Segment) error {
	if !w.following() || index >= w.followed.Size {
		return nil
	}
	err := w.view(func(r store.Reader) error {
		at := int(index & (tileWidth - 1))
		b, err := tiles{r}.read(0, index>>tileHeight, at+1)
		if err == nil && tlog.Hash(b[at*tlog.HashSize:]) != tlog.Hash(leafHash(s.Hash)) {
			w.suspect(w.clamp(s.To), "what the log says to be in the archive ends with another entry than the tree has there")
		}
		return unlessDamaged(err) // a tile that is was reported
	})
	if err != nil {
		return fmt.Errorf("reading the tree of the log: %w", err)
	}
	return nil
}

// archives reports whether the entry says that a segment was archived.
func (e *Entry) archives() bool {
	return e.EventType == LogArchived && e.Outcome == Success && e.TenantID == string(authz.SystemTenant)
}

// isOf reports whether an entry says that the segment was archived.
func (s Segment) isOf(e *Entry) bool {
	return e.number(attributeFrom) == s.From && e.number(attributeTo) == s.To &&
		e.Attributes[attributeObject] == s.Name && e.Attributes[attributeSHA256] == hex.EncodeToString(s.Digest[:])
}
