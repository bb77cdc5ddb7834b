package compliance

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// keptDays is how many days the evidence keeps single days and ended objects: the longest window of
// a probe plus a day at either end. Windows only move forward, so forgotten data can never count
// again, and the moment of forgetting does not matter.
const keptDays = 92

// keptScores bounds the history of a framework, in days.
const keptScores = 400

// mark is an entry with its time, its type and its actor. The evidence has several for each credential,
// so it keeps type and actor as numbers of [words], which take less room.
type mark struct {
	Sequence uint64 `json:"s"`
	Hash     string `json:"h"`
	Micros   int64  `json:"t"`
	Event    uint32 `json:"e"`
	Actor    uint32 `json:"a"`
}

func (m mark) Time() time.Time { return time.UnixMicro(m.Micros).UTC() }

// words are the event types and actors that marks name by number.
type words struct {
	Words   []string          `json:"words"`
	numbers map[string]uint32 // index of Words, made when it is first needed; it is not stored
}

// number returns the number of a word, which it adds if it is new.
func (w *words) number(word string) uint32 {
	if w.numbers == nil || len(w.numbers) != len(w.Words) { // Words was decoded
		w.numbers = make(map[string]uint32, len(w.Words))
		for i, known := range w.Words {
			w.numbers[known] = uint32(i)
		}
	}
	n, ok := w.numbers[word]
	if !ok {
		n = uint32(len(w.Words))
		word = strings.Clone(word) // so that the rest of the entry is not kept in memory
		w.Words, w.numbers[word] = append(w.Words, word), n
	}
	return n
}

// word returns the word of a number, or "" for a number without one.
func (w *words) word(n uint32) string {
	if int(n) >= len(w.Words) {
		return ""
	}
	return w.Words[n]
}

func (w *words) reference(m mark) Reference {
	return Reference{m.Sequence, m.Hash, w.word(m.Event), w.word(m.Actor), m.Time()}
}

// tally counts entries and keeps the first and the last of them.
type tally struct {
	Count int  `json:"n"`
	First mark `json:"f"`
	Last  mark `json:"l"`
}

func (t *tally) add(m mark) {
	if t.Count++; t.Count == 1 {
		t.First = m
	}
	t.Last = m
}

// aspect is a category in which entries are counted per day.
type aspect string

const (
	anEntry      aspect = "entry"
	anIncomplete aspect = "incomplete" // actor, action, time or outcome is missing
	aDenial      aspect = "denial"
	aFailure     aspect = "failure"
	anIntegrity  aspect = "integrity" // failure because stored data is damaged
	anOpening    aspect = "opening"   // opening of protected data, which checks its integrity

	anAcknowledgement aspect = "acknowledgement" // a user acknowledged denials and failures

	aLateDenial  aspect = "late_denial"  // acknowledged too late
	aLateFailure aspect = "late_failure" // acknowledged too late
	aChange      aspect = "change"       // change of a credential
	aVersionGap  aspect = "version_gap"  // change that skips a version
	aRenewal     aspect = "renewal"
	aLateRenewal aspect = "late_renewal" // renewal after the expiry
	aDeletion    aspect = "deletion"
	aDeletedUse  aspect = "deleted_use" // use of a deleted credential
	aDeparture   aspect = "departure"   // departure of a member or an API key
	aDepartedUse aspect = "departed_use"
	anIssue      aspect = "issue" // issue of an API key or a membership
	anUnapproved aspect = "unapproved"
)

// Evidence is a summary of a tenant's entries: the state at the newest entry, and what happened in
// the days before it. It is a pure fold: the same entries give the same evidence, wherever the fold
// was interrupted, stored and continued.
type Evidence struct {
	Tenant    string `json:"tenant"`
	ChainID   string `json:"chain_id"`
	PublicKey string `json:"public_key"` // public key of the log, base64
	KeyID     string `json:"key_id"`     // key that signed the newest entry

	First          mark   `json:"first"`
	Last           mark   `json:"last"`
	TenantSequence uint64 `json:"tenant_sequence"` // tenant sequence of the newest entry
	Count          int    `json:"count"`

	counts
	holdings
	signIns
	reviews

	judgements

	State *assessed `json:"state"`

	words
}

// counts holds the numbers of entries.
type counts struct {
	Types     map[string]*tally        `json:"types"`     // all entries, per event type
	Succeeded map[audit.EventType]mark `json:"succeeded"` // newest success of each type, for all time

	Days map[int64]map[aspect]*tally `json:"days"` // keys are days since 1970 in UTC
}

// holdings are the credentials, keys and members of the tenant.
type holdings struct {
	Credentials map[string]*credential `json:"credentials"`
	Keys        map[string]*namedKey   `json:"keys"`
	APIKeys     map[string]*apiKey     `json:"api_keys"` // API keys that are not revoked
	Users       map[string]*user       `json:"users"`    // users that are not removed
	Invitations map[string]mark        `json:"invitations"`
	Departed    map[string]mark        `json:"departed"` // departed members and API keys, with the entry that ended each
}

// signIns holds the failed sign-ins and the reactions to them.
type signIns struct {
	FailedSignIns []mark  `json:"failed_sign_ins"` // the last few
	Bursts        []burst `json:"bursts"`
}

// judgements are earlier judgements.
type judgements struct {
	Failing map[string]mark          `json:"failing"` // probes that failed at the end of the last day, with the newest entry of the first such day
	Scores  map[Framework][]DayScore `json:"scores"`
	Daily   mark                     `json:"daily,omitzero"` // newest entry with the scores of a day
}

type credential struct {
	Renewed mark   `json:"renewed"` // entry that created the version
	Changed mark   `json:"changed"` // entry that changed the values
	Version uint64 `json:"version"`
	Expires int64  `json:"expires,omitempty"` // Unix microseconds; 0: unknown
	Trashed bool   `json:"trashed,omitempty"` // expired on purpose
	Overlap int64  `json:"overlap,omitempty"` // end of readability of the previous version, Unix microseconds
	Deleted *mark  `json:"deleted,omitempty"`
}

type namedKey struct {
	Rotated mark  `json:"rotated"`
	Period  int   `json:"period"` // days
	Next    int64 `json:"next"`   // Unix microseconds
}

type assessed struct {
	At    mark  `json:"at"`
	State State `json:"state"`
}

func NewEvidence() *Evidence {
	return &Evidence{
		counts: counts{
			Types: make(map[string]*tally), Succeeded: make(map[audit.EventType]mark), Days: make(map[int64]map[aspect]*tally),
		},
		holdings: holdings{
			Credentials: make(map[string]*credential), Keys: make(map[string]*namedKey), APIKeys: make(map[string]*apiKey),
			Users: make(map[string]*user), Invitations: make(map[string]mark), Departed: make(map[string]mark),
		},
		reviews: reviews{Makers: make(map[string]string)}, judgements: judgements{Failing: make(map[string]mark), Scores: make(map[Framework][]DayScore)},
	}
}

var ErrNotNext = fault.New(fault.Invalid, "the entries are not one tenant's, from its first one on without a gap")

// Add adds the tenant's next entry to the evidence. It returns fault.Invalid for any other entry.
func (e *Evidence) Add(a *audit.Entry) error {
	if a.TenantSequence != e.TenantSequence+1 || e.Count > 0 && (a.TenantID != e.Tenant || a.Sequence <= e.Last.Sequence) {
		return ErrNotNext
	}
	m := mark{
		Sequence: a.Sequence, Hash: a.Hash, Micros: a.Time().UnixMicro(),
		Event: e.number(string(a.EventType)), Actor: e.number(strings.TrimSpace(a.Actor.Type + " " + a.Actor.ID)),
	}
	if e.Count == 0 {
		e.Tenant, e.First = a.TenantID, m
		e.ChainID, e.PublicKey = a.Attributes["chain_id"], a.Attributes["public_key"]
	}
	today := dayOf(m.Micros)
	if e.Count > 0 && today != dayOf(e.Last.Micros) {
		e.endDay()
		e.forget(m)
	}
	e.Count++
	e.Last, e.TenantSequence, e.KeyID = m, a.TenantSequence, a.KeyID
	if e.Days[today] == nil {
		e.Days[today] = make(map[aspect]*tally)
	}
	e.typed(string(a.EventType)).add(m)
	if a.Outcome == audit.Success {
		e.Succeeded[a.EventType] = m
	}
	e.judgeEntry(a, m)
	e.actor(a, m)
	switch a.Resource.Type {
	case audit.CredentialResource:
		e.credential(a, m)
	case audit.KeyResource:
		e.namedKey(a, m)
	}
	e.account(a, m)
	e.watch(a, m)
	e.review(a, m)
	e.own(a, m)
	return nil
}

// endDay notes which probes fail at the end of a day, and since when.
func (e *Evidence) endDay() {
	for i := range Probes {
		p := &Probes[i]
		if p.answer(e).result != Fail {
			delete(e.Failing, p.Name)
		} else if _, ok := e.Failing[p.Name]; !ok {
			e.Failing[p.Name] = e.Last
		}
	}
}

func dayOf(micros int64) int64 { return micros / int64(24*time.Hour/time.Microsecond) }

func (e *Evidence) typed(event string) *tally {
	t := e.Types[event]
	if t == nil {
		t = new(tally)
		e.Types[event] = t
	}
	return t
}

// count counts m in an aspect of its day.
func (e *Evidence) count(what aspect, m mark) {
	day := e.Days[dayOf(m.Micros)]
	if day[what] == nil {
		day[what] = new(tally)
	}
	day[what].add(m)
}

// within sums an aspect over the last days up to the newest entry. It returns the entries to cite:
// the first and last of each day.
func (e *Evidence) within(what aspect, days int) (n int, cite []mark) {
	from := dayOf(e.Last.Micros) - int64(days)
	for _, day := range slices.Sorted(maps.Keys(e.Days)) {
		t := e.Days[day][what]
		if day < from || t == nil {
			continue
		}
		n += t.Count
		cite = append(cite, t.First, t.Last)
	}
	return n, cite
}

// forget drops data that no probe uses any more.
func (e *Evidence) forget(now mark) {
	oldest := dayOf(now.Micros) - keptDays
	old := func(m mark) bool { return dayOf(m.Micros) < oldest }
	maps.DeleteFunc(e.Days, func(day int64, _ map[aspect]*tally) bool { return day < oldest })
	maps.DeleteFunc(e.Credentials, func(_ string, c *credential) bool { return c.Deleted != nil && old(*c.Deleted) })
	maps.DeleteFunc(e.Departed, func(_ string, m mark) bool { return old(m) })
	maps.DeleteFunc(e.Makers, func(id string, _ string) bool {
		_, left := e.Departed[id]
		return e.APIKeys[id] == nil && !left
	})
	maps.DeleteFunc(e.Invitations, func(_ string, m mark) bool { return old(m) })
	e.Bursts = slices.DeleteFunc(e.Bursts, func(b burst) bool { return old(b.At) })
}

// judgeEntry checks whether an entry is complete: actor, action, time and outcome.
func (e *Evidence) judgeEntry(a *audit.Entry, m mark) {
	e.count(anEntry, m)
	stranger := a.Actor.Type == string(authz.Stranger)
	outcomes := []audit.Outcome{audit.Success, audit.Denied, audit.Failure}
	if a.Actor.Type == "" || (a.Actor.ID == "") != stranger || a.EventType == "" || a.Resource.Type == "" ||
		m.Micros <= 0 || !slices.Contains(outcomes, a.Outcome) {
		e.count(anIncomplete, m)
	}
	switch a.Outcome {
	case audit.Denied:
		e.count(aDenial, m)
		e.open(aDenial, a, m)
	case audit.Failure:
		e.count(aFailure, m)
		e.open(aFailure, a, m)
		if a.Attributes[audit.AttributeReason] == "integrity" {
			e.count(anIntegrity, m)
		}
	}
}

func (e *Evidence) credential(a *audit.Entry, m mark) {
	if a.EventType == audit.CredentialUnsealed {
		e.count(anOpening, m)
	}
	id := a.Resource.ID
	if a.Outcome != audit.Success || id == "" {
		return
	}
	c := e.Credentials[id]
	switch a.EventType {
	case audit.CredentialUnsealed:
		if c != nil && c.Deleted != nil {
			e.count(aDeletedUse, m)
		}
	case audit.CredentialSealed, audit.CredentialRotated, audit.CredentialReencrypted:
		e.newVersion(a, m, c)
	case audit.CredentialVersionEnded, audit.CredentialReleased, audit.CredentialAdopted:
		if c != nil {
			c.Overlap = 0
		}
	case audit.CredentialDeleted:
		e.count(aDeletion, m)
		if c != nil {
			c.Deleted, c.Overlap = &m, 0
		}
	}
}

// newVersion gives a credential the version that an entry records. c is the credential as known so
// far, or nil.
func (e *Evidence) newVersion(a *audit.Entry, m mark, c *credential) {
	e.count(aChange, m)
	version, _ := strconv.ParseUint(a.Attributes[audit.AttributeVersion], 10, 64)
	known := c != nil && c.Deleted == nil
	follows := known && version == c.Version+1 || !known && a.EventType == audit.CredentialSealed && version > 0
	if !follows || a.Attributes[audit.AttributeDigest] == "" {
		e.count(aVersionGap, m)
	}
	if known {
		e.count(aRenewal, m)
		if c.Expires != 0 && m.Micros > c.Expires && !c.Trashed {
			e.count(aLateRenewal, m)
		}
	}
	next := &credential{Renewed: m, Changed: m, Version: version, Expires: microsOf(a, audit.AttributeExpiresAt), Trashed: a.Attributes[audit.AttributeTrashed] == "true"}
	if next.Overlap = microsOf(a, audit.AttributeOverlapUntil); a.EventType == audit.CredentialReencrypted && known {
		next.Changed, next.Overlap = c.Changed, c.Overlap
	}
	e.Credentials[a.Resource.ID] = next
}

// microsOf parses a time attribute as Unix microseconds. It returns 0 when there is none.
func microsOf(a *audit.Entry, attribute string) int64 {
	t, err := time.Parse(time.RFC3339Nano, a.Attributes[attribute])
	if err != nil {
		return 0
	}
	return t.UnixMicro()
}

// unknownPeriod is the period, in days, of keys whose entries do not name one, as in old entries.
const unknownPeriod = 90

func (e *Evidence) namedKey(a *audit.Entry, m mark) {
	made := a.EventType == audit.KeyCreated || a.EventType == audit.KeyRotated
	if !made || a.Outcome != audit.Success || a.Resource.ID == "" {
		return
	}
	days, err := strconv.Atoi(a.Attributes[audit.AttributeRotationDays])
	if err != nil || days < 1 {
		days = unknownPeriod
	}
	next := cmp.Or(microsOf(a, audit.AttributeNextRotation), m.Time().AddDate(0, 0, days).UnixMicro())
	e.Keys[a.Resource.ID] = &namedKey{m, days, next}
}

// own processes the entries that this package writes. Only the deployment may write the state, and only
// its own scores are the assessment of a day.
func (e *Evidence) own(a *audit.Entry, m mark) {
	if a.Outcome != audit.Success {
		return
	}
	byDeployment := a.Actor.Type == string(authz.System)
	switch a.EventType {
	case audit.ComplianceAssessed:
		if byDeployment {
			e.State = &assessed{m, ParseState(a.Attributes)}
		}
	case audit.ComplianceScored:
		head, err := strconv.ParseUint(a.Attributes[AttributeHead], 10, 64)
		if err != nil {
			return
		}
		if f, one := a.Attributes[AttributeFramework]; one {
			if a.Attributes[AttributePinned] == "" {
				e.scored(Framework(f), a.Attributes[AttributeScore], head, m)
			}
			return
		}
		if byDeployment {
			e.Daily = m
		}
		for _, f := range Frameworks() {
			e.scored(f, a.Attributes[string(f)], head, m)
		}
	}
}

// scored stores a score as the last one of its day, unless it was withheld.
func (e *Evidence) scored(f Framework, score string, head uint64, m mark) {
	x, err := strconv.ParseFloat(score, 64)
	if err != nil || !slices.Contains(Frameworks(), f) {
		return
	}
	one := DayScore{m.Time().Format(time.DateOnly), x, head}
	days := e.Scores[f]
	if n := len(days); n > 0 && days[n-1].Date == one.Date {
		days = days[:n-1]
	}
	days = append(days, one)
	e.Scores[f] = days[max(0, len(days)-keptScores):]
}

func (e *Evidence) Head() Head { return Head{e.Last.Sequence, e.Last.Hash, e.Last.Time()} }

// Activity returns the activity for the [Document].
func (e *Evidence) Activity() []Activity {
	all := make([]Activity, 0, len(e.Types))
	for event, t := range e.Types {
		all = append(all, Activity{event, t.Count, e.reference(t.First), e.reference(t.Last)})
	}
	slices.SortFunc(all, func(a, b Activity) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Event, b.Event))
	})
	return append([]Activity{{"", e.Count, e.reference(e.First), e.reference(e.Last)}}, all...)
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if stem, ok := strings.CutSuffix(noun, "y"); ok && !strings.HasSuffix(noun, "key") && !strings.HasSuffix(noun, "day") {
		return fmt.Sprintf("%d %sies", n, stem)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
