package doctor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// scanLog passes the stored entries to visit, oldest first. The caller has verified them.
func scanLog(ctx context.Context, s store.Store, visit func(*audit.Entry)) error {
	err := entries.ScanAll(ctx, s, audit.EntryRange, func(r entries.Row) error {
		e, err := audit.DecodeStoredEntry(r.Row, r.Batch)
		if err != nil {
			return audit.ErrDamagedLog
		}
		visit(e.Entry)
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	return nil
}

// reads are the types of entries that say nothing about a row: what they record changes none.
var reads = map[audit.EventType]bool{
	audit.SealingKeyListed: true, audit.ManifestResealed: true, audit.ManifestChecked: true, audit.BackupTaken: true, audit.KMSKeyListed: true,
	audit.TenantListed: true, audit.APIKeyListed: true, audit.CredentialListed: true, audit.CredentialUnsealed: true, audit.KeyListed: true,
	audit.DataEncrypted: true, audit.DataDecrypted: true, audit.DataRewrapped: true, audit.DataSigned: true, audit.DataVerified: true,
	audit.PublicKeyRead: true, audit.AccountRead: true, audit.SessionListed: true, audit.MemberListed: true, audit.AuditRead: true,
	audit.ProofRead: true, audit.MetricsRead: true, audit.AuditExported: true, audit.ComplianceAssessed: true, audit.ComplianceScored: true,
	audit.ComplianceHistoryRead: true, audit.ComplianceReported: true, audit.InventoryRead: true, audit.DenialsAcknowledged: true,
	audit.AccessReviewed: true, audit.InventoryReviewed: true, audit.ReviewNoteErased: true, audit.NamesErased: true, audit.NodeLogRecorded: true, audit.RateLimited: true, audit.AccessRefused: true,
}

// changes reports whether an entry records a change.
func changes(e *audit.Entry) bool { return e.Outcome == audit.Success && !reads[e.EventType] }

// Activity is what a principal has done since an entry.
type Activity struct {
	Since       *Entry // the newest change of the principal
	First, Last uint64 // sequences
	Types       map[audit.EventType]int
}

// Count returns the number of entries.
func (a *Activity) Count() (n int) {
	for _, k := range a.Types {
		n += k
	}
	return n
}

// about collects the entries about one resource.
type about struct {
	newest []*Entry // the last maxShown changes, oldest first
	Activity
}

// maxShown is the number of entries that are shown about a row.
const maxShown = 10

// history collects the entries about resources, which their ids name.
type history map[string]*about

func (h history) want(id string) {
	if id != "" && h[id] == nil {
		h[id] = &about{Activity: newActivity()}
	}
}

func newActivity() Activity { return Activity{Types: make(map[audit.EventType]int)} }

// count counts an entry of a principal.
func (h history) count(e *audit.Entry) {
	a := h[e.Actor.ID]
	if a == nil {
		return
	}
	if a.First == 0 {
		a.First = e.Sequence
	}
	a.Last = e.Sequence
	a.Types[e.EventType]++
}

func (h history) visit(e *audit.Entry) {
	h.count(e)
	if !changes(e) {
		return
	}
	ids := append(slices.Collect(maps.Values(e.Attributes)), e.Resource.ID)
	if e.Actor.Type == "operator" {
		ids = append(ids, e.Actor.ID) // the UID of an object
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		a := h[id]
		if a == nil {
			continue
		}
		shown := &Entry{e.Sequence, e.EventType, e.Outcome, e.Time(), e.Actor.Type + " " + e.Actor.ID}
		if a.newest = append(a.newest, shown); len(a.newest) > maxShown {
			a.newest = a.newest[1:]
		}
		a.Activity = newActivity()
		a.Since = shown
	}
}

var anyID = regexp.MustCompile(`[a-z]+_[a-z2-7]{26}`)

// subject returns the id of the resource that a row is about, as entries name it. value is nil for a
// missing row.
func subject(family string, key, value []byte) string {
	last := key[bytes.LastIndexByte(key, '/')+1:]
	switch family {
	case "namespace/", "owned/", "sealing/key/", "kms/given-up/", "kms/moved-from/", "tenant/system":
		return string(last)
	case "key/system/":
		return "system"
	case "sealing/current":
		return string(bytes.TrimPrefix(value, value[:min(32, len(value))]))
	case "apikey/hash/":
		return string(anyID.Find(value[min(32, len(value)):]))
	}
	from := key
	if !anyID.Match(from) {
		from = value
	}
	all := anyID.FindAll(from, -1)
	if family == "user/password/" { // the user, and not the row's own id
		all = all[:min(1, len(all))]
	}
	if len(all) == 0 {
		return ""
	}
	return string(all[len(all)-1])
}

// nameFindings finds the newest entry about each finding, and tries the keys that the log's entries
// name for the missing rows whose keys are unknown.
func (x *Examination) nameFindings(ctx context.Context) error {
	if len(x.byKey) == 0 {
		return nil
	}
	subjects := make(map[*Finding]string)
	h := make(history)
	sequences := make(map[uint64]*Entry) // entries that other checks name
	for _, f := range x.byKey {
		if f.sequence > 0 {
			sequences[f.sequence] = nil
		}
		if f.Key == nil {
			continue
		}
		value, err := x.get(ctx, f.Key)
		if err != nil {
			return err
		}
		f.Digest = x.digest(f.Key, value)
		subjects[f] = subject(f.Family, f.Key, value)
		h.want(subjects[f])
	}
	var named []*state.RowError
	groups := make(map[*state.RowError][]byte)
	late := make(history) // history of resources whose rows get their keys now
	err := scanLog(ctx, x.store, func(e *audit.Entry) {
		h.visit(e)
		if _, wanted := sequences[e.Sequence]; wanted {
			sequences[e.Sequence] = &Entry{e.Sequence, e.EventType, e.Outcome, e.Time(), e.Actor.Type + " " + e.Actor.ID}
		}
		if x.unnamed != nil && x.unnamed.Len() > 0 {
			for _, key := range candidates(x.unnamed.Families(), e) {
				if r := x.unnamed.Try(key); r != nil {
					named = append(named, r)
					late.want(subject(r.Family, key, nil))
				}
				if f, ok := state.FamilyOf(key); ok {
					if prefix := f.GroupOf(key); prefix != nil {
						for _, r := range x.unnamed.InGroup(prefix) {
							groups[r] = bytes.Clone(prefix)
						}
					}
				}
			}
		}
		late.visit(e)
	})
	if err != nil {
		return err
	}
	for _, r := range named {
		delete(x.byKey, r.Family+"#"+r.ID())
		x.refuse(r)
		f := x.byKey[string(r.Key)]
		f.Digest = state.Absent
		subjects[f] = subject(f.Family, f.Key, nil)
	}
	maps.Copy(h, late)
	for _, f := range x.byKey {
		if f.Key == nil {
			f.Group, f.Digest = groups[f.refused], state.Absent
		}
		if a := h[subjects[f]]; a != nil && len(a.newest) > 0 {
			f.Entry = a.newest[len(a.newest)-1]
		} else {
			f.Entry = sequences[f.sequence]
		}
	}
	return nil
}

// tryStored tries the keys that other stored rows name for missing rows.
func (x *Examination) tryStored(ctx context.Context) error {
	wanted := x.unnamed.Families()
	for _, from := range []struct {
		prefix, missing string
		key             func(key []byte, content string) string
	}{
		{"apikey/tenant/", "apikey/hash/", func(_ []byte, hash string) string { return "apikey/hash/1/" + hash }},
		{"user/row/", "user/password/", func(key []byte, password string) string {
			return "user/password/" + string(key[bytes.LastIndexByte(key, '/')+1:]) + "/" + password
		}},
		{"session/row/", "session/selector/", func(_ []byte, selector string) string { return "session/selector/" + selector }},
		{"ticket/of/", "ticket/hash/", func(key []byte, hash string) string {
			return "ticket/hash/" + strings.Split(string(key), "/")[2] + "/" + hash
		}},
		{"credential-version/", "credential-name/", indexKey}, // those without an object
	} {
		if !wanted[from.missing] {
			continue
		}
		err := audit.ScanAll(ctx, x.store, store.Prefix([]byte(from.prefix)), func(key, value []byte) error {
			var name string
			var row struct{ Password, Selector string }
			content := value[min(32, len(value)):]
			if json.Unmarshal(content, &name) != nil && json.Unmarshal(content, &row) == nil {
				name = cmp.Or(row.Password, row.Selector, string(content)) // a row has one of them
			}
			if e := x.unnamed.Try([]byte(from.key(key, name))); e != nil {
				x.refuse(e)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("looking for the names of missing rows: %w", err)
		}
	}
	return nil
}

// indexKey returns the key in the index of names of a version of a credential, by its line in the
// history.
func indexKey(key []byte, line string) string {
	var row struct {
		Name      string    `json:"name"`
		CreatedAt time.Time `json:"created_at"`
		ExpiresAt time.Time `json:"expires_at"`
	}
	parts := strings.SplitN(string(key), "/", 4)
	if json.Unmarshal([]byte(line), &row) != nil || len(parts) != 4 {
		return ""
	}
	b := binary.BigEndian.AppendUint64([]byte("credential-name/"+parts[1]+"/"+row.Name+"/"), uint64(row.ExpiresAt.UnixMicro()))
	return string(append(binary.BigEndian.AppendUint64(b, uint64(row.CreatedAt.UnixMicro())), parts[2]...))
}

// maxTried bounds the versions of keys that are tried.
const maxTried = 16

// candidates returns keys that rows of the families may have had, by what an entry names.
func candidates(wanted map[string]bool, e *audit.Entry) (keys [][]byte) {
	try := func(family, format string, args ...any) {
		if wanted[family] {
			keys = append(keys, fmt.Appendf(nil, family+format, args...))
		}
	}
	t, id, actor := e.TenantID, e.Resource.ID, e.Actor.ID
	for _, only := range []string{"deployment", "dev", "sealing/current", "tenant/system"} {
		try(only, "")
	}
	for _, family := range []string{"user/row/", "apikey/tenant/", "invitation/", "access/policy/", "access/binding/", "owner/", "transit/key/"} {
		try(family, "%s/%s", t, id)
	}
	try("user/row/", "%s/%s", t, actor)
	try("owned/", "%s/%s", t, actor)
	try("tenant/", "%s", t)
	try("transit/default/", "%s", t)
	for _, family := range []string{"sealing/key/", "kms/given-up/", "kms/moved-from/"} {
		try(family, "%s", id)
		for _, v := range e.Attributes {
			try(family, "%s", v)
		}
	}
	try("session/row/", "%s/%s", actor, id)
	try("namespace/", "%s/%s", e.Attributes["cluster_uid"], e.Attributes["namespace_uid"])
	version, _ := strconv.ParseUint(e.Attributes[audit.AttributeVersion], 10, 64)
	for _, family := range []string{"credential/", "credential-version/", "former/", "kept/"} {
		if !wanted[family] {
			continue
		}
		for v := max(version, 1); v+1 >= max(version, 1) && v > 0; v-- {
			keys = append(keys, binary.BigEndian.AppendUint64(fmt.Appendf(nil, "%s%s/%s/", family, t, id), v))
		}
	}
	if e.EventType == audit.KeyCreated || e.EventType == audit.KeyRotated {
		for v := range uint64(maxTried) {
			try("transit/version/", "%s/%s/%08x", t, id, v+1)
			for w := range maxTried {
				try("transit/seed/", "%s/%s/%08x/%08x", t, id, v+1, w+1)
			}
		}
	}
	if e.TenantSequence == 1 || e.EventType == audit.TenantCreated {
		owners := map[string]string{t: "key/", id: "key/"}
		if t == "system" {
			owners[t] = "key/system/"
		}
		for owner, family := range owners {
			if !wanted[family] {
				continue
			}
			prefix := "key/" + owner + "/"
			keys = append(keys, []byte(prefix+"current"))
			for v := range maxTried {
				for _, purpose := range []string{"wrapping", "signing", "mac", "public", "audit", "identity", "api-key-hash"} {
					keys = append(keys, fmt.Appendf(nil, "%s%08x/%s", prefix, v+1, purpose))
				}
			}
		}
	}
	return keys
}
