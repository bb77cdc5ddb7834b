package keyring

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Verifier opens all keys of a store and tells which rows keep it from doing so. [Open] fails at
// the first of them. Nothing may write to the store meanwhile.
type Verifier struct {
	store  store.Store
	ring   *Ring // nil without a KMS key: then nothing is opened
	own    bool  // the deployment's own keys are open
	report func(key []byte, reason string)
}

// NewVerifier returns a verifier that passes the rows that do not hold to report, with the reason.
// Without a KMS key (nil) it only checks that no row is missing or has no place.
func NewVerifier(s store.Store, kms KMS, c Config, report func(key []byte, reason string)) *Verifier {
	v := &Verifier{store: s, report: report}
	if kms != nil {
		v.ring = newRing(s, kms, c, deployment{})
	}
	return v
}

// Ring opens the deployment's own keys and returns the ring, or nil when they do not open. chainID
// is the id of the log's chain. Error: fault.Unavailable when the store or the KMS does not answer.
func (v *Verifier) Ring(ctx context.Context, chainID string) (*Ring, error) {
	var row []byte
	var f format.Format
	err := v.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(deploymentRow)
		if err != nil {
			return err
		}
		row = bytes.Clone(b)
		f, err = format.Read(r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the deployment: %w", err)
	}
	var d deployment
	switch {
	case row == nil:
		v.report(deploymentRow, "the row is missing: without it the store looks empty")
	case json.Unmarshal(row, &d) != nil:
		v.report(deploymentRow, "the row is damaged: it is no JSON")
	case f.CheckDeployment(d.Format) != nil:
		v.report(deploymentRow, "the row is damaged, or a later release wrote the store: "+f.CheckDeployment(d.Format).Error())
	case chainID != "" && d.ChainID != chainID:
		v.report(deploymentRow, fmt.Sprintf("the row names the chain %q, and the log is that of %s", d.ChainID, chainID))
	}
	if v.ring == nil {
		return nil, nil
	}
	v.ring.deployment = d
	rows, err := v.rows(ctx, authz.SystemTenant)
	if err != nil {
		return nil, err
	}
	current, ok := readCurrent(rows)
	if !ok {
		return nil, nil // Sets reports it
	}
	plain, _, err := v.open(ctx, authz.SystemTenant, current, rows, func([]byte, string) {})
	if err != nil || plain == nil {
		return nil, err
	}
	v.own = true
	return v.ring, v.ring.take(plain)
}

// readCurrent returns the current version that an owner's rows name.
func readCurrent(rows map[string][]byte) (version uint32, ok bool) {
	for key, b := range rows {
		if strings.HasSuffix(key, "/current") && len(b) == 4 {
			version = binary.BigEndian.Uint32(b)
		}
	}
	return version, version > 0
}

// rows returns the stored keys of an owner.
func (v *Verifier) rows(ctx context.Context, owner authz.TenantID) (map[string][]byte, error) {
	var rows map[string][]byte
	err := v.store.View(ctx, func(r store.Reader) error {
		rows = make(map[string][]byte)
		return r.Scan(store.Prefix([]byte("key/"+owner+"/")), func(key, value []byte) bool {
			rows[string(key)] = append([]byte{}, value...)
			return true
		})
	})
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	return rows, nil
}

// Sets checks the keys of every owner that has a row, and of the owners that must have some. Call
// it after [Verifier.Ring]. Error: fault.Unavailable when the store or the KMS does not answer.
func (v *Verifier) Sets(ctx context.Context, owners ...authz.TenantID) error {
	verified := make(map[authz.TenantID]bool)
	for from := keyRows.From; ; {
		var owner authz.TenantID
		err := v.store.View(ctx, func(r store.Reader) error {
			owner = ""
			return r.Scan(store.Range{From: from, To: keyRows.To}, func(key, _ []byte) bool {
				name, _, _ := strings.Cut(string(key[len(keyRows.From):]), "/")
				owner = authz.TenantID(name)
				return false
			})
		})
		if err != nil {
			return fmt.Errorf("reading keys: %w", err)
		}
		if owner == "" {
			break
		}
		if err := v.set(ctx, owner); err != nil {
			return err
		}
		verified[owner] = true
		from = store.Prefix([]byte("key/" + owner + "/")).To
	}
	for _, owner := range append(owners, authz.SystemTenant) {
		if !verified[owner] {
			v.report(currentRow(owner), fmt.Sprintf("all keys of %s are missing", owner))
		}
		verified[owner] = true
	}
	return nil
}

// set checks all versions of an owner's keys.
func (v *Verifier) set(ctx context.Context, owner authz.TenantID) error {
	rows, err := v.rows(ctx, owner)
	if err != nil {
		return err
	}
	current, ok := readCurrent(rows)
	if !ok {
		v.report(currentRow(owner), "the row is missing or damaged: it says which version of the keys is the current one")
		for key := range rows {
			if parts := strings.Split(key, "/"); len(parts) >= 4 {
				if n, err := strconv.ParseUint(parts[2], 16, 32); err == nil {
					current = max(current, uint32(n))
				}
			}
		}
	}
	delete(rows, string(currentRow(owner)))
	prefix := string(setPrefix(owner, current))
	some := slices.ContainsFunc(slices.Collect(maps.Keys(rows)), func(key string) bool { return strings.HasPrefix(key, prefix) })
	if limit := uint32(len(rows)); ok && !some || current > limit { // each version has a row at least
		v.report(currentRow(owner), fmt.Sprintf("the row names version %d, and there are not as many versions of the keys", current))
		current = min(current, limit)
	}
	for version := uint32(1); version <= current; version++ {
		plain, signing, err := v.open(ctx, owner, version, rows, v.report)
		if err != nil {
			return err
		}
		for _, b := range plain {
			b.Zero()
		}
		if owner == authz.SystemTenant {
			continue
		}
		key := publicRow(owner, version)
		if b, exists := rows[string(key)]; exists && v.own && signing != nil { // early sets have none
			if content, err := v.ring.OpenRow(key, b); err == nil && !bytes.Equal(content, signing.Public().Bytes()) {
				v.report(key, "the row has another public key than that of the signing key")
			}
		}
		delete(rows, string(key))
	}
	for _, key := range slices.Sorted(maps.Keys(rows)) {
		v.report([]byte(key), "the row is of no version up to the current one, or of no key of a set")
	}
	return nil
}

// open opens one version of an owner's keys, and removes its rows from rows. It returns the keys
// when all of them open, and then the signing key of a tenant.
func (v *Verifier) open(ctx context.Context, owner authz.TenantID, version uint32, rows map[string][]byte, report func([]byte, string)) (map[purpose]secret.Bytes, *dualsig.Key, error) {
	whole := true
	bad := func(key []byte, reason string) {
		whole = false
		report(key, reason)
	}
	var wrapped []wrappedKey
	prefix := string(keyRow(owner, version, wrapping))
	for _, key := range slices.Sorted(maps.Keys(rows)) {
		if !strings.HasPrefix(key, prefix) {
			continue
		}
		if w, ok := parseWrappedKey([]byte(key), rows[key]); ok {
			wrapped = append(wrapped, w)
			delete(rows, key)
		}
	}
	blobs := make(map[purpose][]byte)
	for p := range setOf(owner) {
		key := keyRow(owner, version, p)
		if b, exists := rows[string(key)]; exists {
			blobs[p] = b
		} else {
			bad(key, "the row is missing: it has the "+string(p)+" key")
		}
		delete(rows, string(key))
	}
	switch len(wrapped) {
	case 0:
		bad([]byte(prefix), "the row is missing: it has the wrapping key")
		return nil, nil, nil
	case 1:
	default:
		for _, w := range wrapped {
			bad(w.row(), "the set has several wrapping keys, and must have one")
		}
		return nil, nil, nil
	}
	if v.ring == nil {
		return nil, nil, nil
	}
	key, err := v.unwrap(ctx, wrapped[0], bad)
	if err != nil || key == nil {
		return nil, nil, err
	}
	plain := map[purpose]secret.Bytes{wrapping: key}
	for p, size := range setOf(owner) {
		if blobs[p] == nil {
			continue
		}
		b, err := envelope.OpenKey(key, keyContext(owner, version, p), blobs[p])
		if err != nil || len(b) != size {
			bad(keyRow(owner, version, p), "the "+string(p)+" key does not open with its wrapping key: the row is damaged")
		}
		plain[p] = b
	}
	if !whole || owner == authz.SystemTenant {
		if !whole {
			plain = nil
		}
		return plain, nil, nil
	}
	signer, err := dualsig.NewKey(version, plain[signing], plain[mac])
	if err != nil {
		bad(keyRow(owner, version, signing), "the key is no signing key")
		return nil, nil, nil
	}
	return plain, signer, nil
}

// unwrap opens a wrapping key with its KMS key. It returns nil for a key that does not open.
func (v *Verifier) unwrap(ctx context.Context, w wrappedKey, bad func([]byte, string)) (secret.Bytes, error) {
	by, err := v.ring.kmsOf(w)
	var key secret.Bytes
	if err == nil && v.ring.kmsKeyOf(w) != "" {
		key, err = by.Unwrap(ctx, keyContext(w.owner, w.version, wrapping), w.blob)
	}
	switch {
	case errors.Is(err, errUnnamedKMSKey):
		bad(w.row(), fmt.Sprintf("the wrapping key is under KMS key %q, which was not named: name all previous KMS keys, or the row is damaged", v.ring.kmsKeyOf(w)))
	case err != nil && !errors.Is(err, kms.ErrForeign):
		return nil, unavailable("unwrapping keys", err)
	case err != nil || len(key) != wrappingKeySize:
		bad(w.row(), "the KMS key does not open the wrapping key: the row is damaged, or of another KMS key")
	default:
		return key, nil
	}
	return nil, nil
}

// Unreachable reports whether keys did not open because the KMS or the store gave no answer, and not
// because of the stored keys.
func Unreachable(err error) bool {
	return errors.Is(err, fault.Unavailable) && !errors.Is(err, kms.ErrForeign) && !errors.Is(err, kms.ErrForm) && !errors.Is(err, errUnnamedKMSKey)
}

// SealingKeys opens every sealing key, and checks that one of them is published. Call it after
// [Verifier.Ring] has returned a ring.
func (v *Verifier) SealingKeys(ctx context.Context) error {
	if !v.own {
		return nil
	}
	r := v.ring.sealingKeys
	type stored struct {
		id  string
		row []byte
	}
	var keys []stored
	var current []byte
	err := v.store.View(ctx, func(rd store.Reader) error {
		keys = nil
		b, err := rd.Get(currentSealingRow)
		if err != nil {
			return err
		}
		current, _ = v.ring.OpenRow(currentSealingRow, b) // its MAC is checked with those of all rows
		current = bytes.Clone(current)
		return rd.Scan(store.Prefix(sealingKeyPrefix), func(key, value []byte) bool {
			keys = append(keys, stored{string(key[len(sealingKeyPrefix):]), bytes.Clone(value)})
			return true
		})
	})
	if err != nil {
		return fmt.Errorf("reading the sealing keys: %w", err)
	}
	published := false
	for _, k := range keys {
		row, err := r.decodeSealingRow(k.id, k.row)
		if err != nil {
			continue // as above
		}
		published = published || k.id == string(current) && row.RetiredAt.IsZero()
		if _, err := r.document(k.id, row); err != nil {
			v.report(sealingKeyRow(k.id), "the public document of the sealing key is not the deployment's")
		}
		switch _, err := r.privateSealingKey(ctx, k.id, row); {
		case Unreachable(err):
			return err
		case err != nil:
			v.report(sealingKeyRow(k.id), "the private key of the sealing key does not open: the row, or the set of keys that it is under, is damaged")
		}
	}
	if current != nil && !published {
		v.report(currentSealingRow, fmt.Sprintf("the row names sealing key %q, which is missing or retired", current))
	}
	return nil
}
