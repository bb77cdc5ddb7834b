package v2_test

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// conditional is a read by somebody who has the version with a tag.
func conditional(key, path, tag string) servertest.Request {
	return servertest.Request{Method: "GET", Path: path, Key: key, Header: http.Header{"If-None-Match": {tag}}}
}

// sealed stores a credential called n and returns its id and the tag of a read.
func (s *service) sealed() (id, tag string) {
	id = s.Seal("first")
	return id, s.Get("/api/v2/vault/" + id).Header.Get("ETag")
}

// unchanged sends a request whose answer is 304.
func (s *service) unchanged(r servertest.Request) {
	s.T.Helper()
	if got := s.Call(r); got.Status != http.StatusNotModified {
		s.T.Errorf("%d %s", got.Status, got.Body)
	}
}

// begin sends a request that is answered later.
func (s *service) begin(r servertest.Request) <-chan servertest.Reply {
	answered := make(chan servertest.Reply, 1)
	go func() { answered <- s.Call(r) }()
	return answered
}

// untilWaiting returns once n waits have their entry.
func (s *service) untilWaiting(t *testing.T, n int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		waits := 0
		for _, e := range s.Entries("event_type=CREDENTIAL_LISTED") {
			if attributes := e["attributes"].(object); attributes["wait"] == "true" {
				waits++
			}
		}
		if waits >= n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d waits began, not %d", waits, n)
		}
	}
}

func (s *service) replace(id, value string) {
	s.T.Helper()
	r := s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: s.Key, Body: `{"values":{"key":"` + value + `"}}`})
	r.Want(s.T, http.StatusOK)
}

func TestWhoHasTheVersionIsAnswered304(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	byID, byName := "/api/v2/vault/"+id, "/api/v2/vault/by-name/n"
	for _, path := range []string{byID, byName, byID + "?version=1"} {
		for _, tags := range []string{tag, "W/" + tag, `"other", ` + tag, "*"} {
			r := s.Call(conditional(s.Key, path, tags))
			if r.Status != http.StatusNotModified || len(r.Body) > 0 || r.Header.Get("ETag") != tag {
				t.Errorf("%s with %s: %d %s %s", path, tags, r.Status, r.Header.Get("ETag"), r.Body)
			}
		}
		if got := s.Call(conditional(s.Key, path, `"other"`)).Want(t, http.StatusOK); got["values"].(object)["key"] != "first" {
			t.Error(got)
		}
	}
	s.replace(id, "second")
	for _, path := range []string{byID, byName} {
		if got := s.Call(conditional(s.Key, path, tag)).Want(t, http.StatusOK); got["values"].(object)["key"] != "second" {
			t.Error(got)
		}
	}
	s.Call(conditional(s.Key, byID, "tag")).Message(t, http.StatusBadRequest) // without quotes it is none
}

// Nobody learns by a condition whether a credential exists.
func TestAConditionShowsNothingOfACredentialThatCannotBeRead(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	other := s.GrantKeyIn(s.TenantOf(s.Register("other@example.org")), authz.VaultRead)
	wait := conditional(other, "/api/v2/vault/"+id+"?wait=55", tag)
	s.WantIndistinct(t, "of another tenant, or missing?", http.StatusForbidden, map[string]servertest.Request{
		"missing":            conditional(other, "/api/v2/vault/"+authz.NewID("cred"), tag),
		"missing, no tag":    {Method: "GET", Path: "/api/v2/vault/" + authz.NewID("cred"), Key: other},
		"of another":         conditional(other, "/api/v2/vault/"+id, tag),
		"of another, any":    conditional(other, "/api/v2/vault/"+id, "*"),
		"of another, waits":  wait,
		"of another by name": conditional(other, "/api/v2/vault/by-name/n?wait=55", "*"),
	})
	lists := s.GrantKey(authz.VaultWrite)
	s.Call(conditional(lists, "/api/v2/vault/"+id, tag)).Message(t, http.StatusForbidden)
	expired, tagOfExpired := s.sealed()
	s.Clock.Advance(11 * 24 * time.Hour)
	s.Call(conditional(s.Key, "/api/v2/vault/"+expired+"?wait=55", tagOfExpired)).Message(t, http.StatusForbidden) // the same version
	s.Call(conditional(s.Key, "/api/v2/vault/"+id+"?wait=55", tag)).Message(t, http.StatusForbidden)
	id, tag = s.sealed()
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/" + id + "/trash", Key: s.Key}).Want(t, http.StatusOK)
	s.Call(conditional(s.Key, "/api/v2/vault/"+id+"?wait=55", tag)).Message(t, http.StatusForbidden) // expired
}

func TestReadsOfTheSameVersionAreOneEntryAnHour(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	repeats := func() (all []string) {
		for _, e := range s.Entries("event_type=CREDENTIAL_LISTED") {
			attributes := e["attributes"].(object)
			all = append(all, strings.Join([]string{attributes["version"].(string), attributes["repeats"].(string)}, "/"))
		}
		return all
	}
	poll := func() {
		s.unchanged(conditional(s.Key, "/api/v2/vault/"+id, tag))
	}
	for range 5 {
		poll()
	}
	if got := strings.Join(repeats(), " "); got != "1/1" {
		t.Error(got)
	}
	s.Clock.Advance(time.Hour)
	poll()
	if got := strings.Join(repeats(), " "); got != "1/5 1/1" { // newest first
		t.Error(got)
	}
	poll()
	poll()
	if err := s.Guard.RecordRepetitions(t.Context(), false); err != nil || len(repeats()) != 2 { // the hour is not over
		t.Error(err, repeats())
	}
	if err := s.Guard.RecordRepetitions(t.Context(), true); err != nil {
		t.Error(err)
	}
	if got := strings.Join(repeats(), " "); got != "1/2 1/5 1/1" {
		t.Error(got)
	}
	other := s.GrantKey(authz.VaultRead)
	s.unchanged(conditional(other, "/api/v2/vault/"+id, tag))
	if got := repeats(); len(got) != 4 {
		t.Error("another holder is counted with the first:", got)
	}
}

func TestAWaitIsAnsweredWithTheNextVersion(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	for i, path := range []string{"/api/v2/vault/" + id, "/api/v2/vault/by-name/n"} {
		value := []string{"second", "third"}[i]
		answered := s.begin(conditional(s.Key, path+"?wait=55", tag))
		s.untilWaiting(t, i+1)
		s.replace(id, value)
		r := <-answered
		if got := r.Want(t, http.StatusOK); got["values"].(object)["key"] != value || r.Header.Get("ETag") == tag {
			t.Error(got)
		}
		tag = r.Header.Get("ETag")
	}
	if got := s.Entries("event_type=CREDENTIAL_UNSEALED"); len(got) != 3 {
		t.Error(len(got), "entries of reads")
	}
	begun := time.Now()
	r := s.Call(conditional(s.Key, "/api/v2/vault/"+id+"?wait=1", tag))
	if r.Status != http.StatusNotModified || r.Header.Get("ETag") != tag || time.Since(begun) < time.Second {
		t.Error("after", time.Since(begun), r.Header)
	}
}

func TestWhatACallerWaitsIsNotTheServersTime(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.Now = time.Now })
	id, tag := s.sealed()
	before, begun := s.answered(t), time.Now()
	s.unchanged(conditional(s.Key, "/api/v2/vault/"+id+"?wait=1", tag))
	took := time.Since(begun)
	if server := s.answered(t) - before; server > took-time.Second {
		t.Errorf("of %v, %v are counted as the server's time", took, server)
	}
}

// answered returns how long the server took for all reads by id.
func (s *service) answered(t *testing.T) time.Duration {
	t.Helper()
	_, rest, _ := strings.Cut(s.Metrics(), `latticekeep_http_request_duration_seconds_sum{method="GET",route="/api/v2/vault/:credential_id"} `)
	number, _, _ := strings.Cut(rest, "\n")
	seconds, err := strconv.ParseFloat(number, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(seconds * float64(time.Second))
}

// reader is an API key that waits for another version of a credential.
type reader struct {
	owner    string // access token of the user who made the key
	path     string // of the credential
	keyID    string
	answered <-chan servertest.Reply
}

// beginReader returns a reader once its wait has an entry. The wait lasts 55 seconds.
func (s *service) beginReader(t *testing.T) reader {
	t.Helper()
	owner := s.RegisterVerified("owner@example.org").Access
	made := s.Send("POST", "/api/v2/vault/seal", owner, object{"name": "n", "credential_type": "t", "values": object{"key": "first"}}).Want(t, http.StatusCreated)
	path := "/api/v2/vault/" + made["credential_id"].(string)
	made = s.Send("POST", "/api/v2/api-keys", owner, object{"name": "reader", "scopes": []string{"vault:read"}}).Want(t, http.StatusCreated)
	key := made["api_key"].(string)
	tag := s.Call(servertest.Request{Method: "GET", Path: path, Key: key}).Header.Get("ETag")
	answered := s.begin(conditional(key, path+"?wait=55", tag))
	s.untilLogged(t, "wait", "true")
	return reader{owner, path, made["key_id"].(string), answered}
}

// revoke revokes the key of a reader.
func (s *service) revoke(t *testing.T, r reader) {
	t.Helper()
	s.Call(servertest.Request{Method: "DELETE", Path: "/api/v2/api-keys/" + r.keyID, Bearer: r.owner}).Want(t, http.StatusOK)
}

// A wait is answered by what its caller may do when it is answered.
func TestAWaitEndsWithTheRightsOfItsCaller(t *testing.T) {
	s := newService(t)
	r := s.beginReader(t)
	s.revoke(t, r)
	s.Send("PUT", r.path, r.owner, object{"values": object{"key": "new"}}).Want(t, http.StatusOK)
	if got := <-r.answered; got.Status != http.StatusUnauthorized || strings.Contains(string(got.Body), "new") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	s.untilLogged(t, "reason", "caller_ended")
}

// A wait ends soon after the key of its caller, though the credential stays as it is. A wait that went on would last
// 55 seconds.
func TestAWaitIsLookedAtWhileNothingChanges(t *testing.T) {
	s := newService(t)
	begun := time.Now()
	r := s.beginReader(t)
	s.revoke(t, r)
	if got := <-r.answered; got.Status != http.StatusUnauthorized || time.Since(begun) >= 55*time.Second {
		t.Errorf("%d after %s", got.Status, time.Since(begun))
	}
}

// Whoever has any version is told which one the credential has, also after another one came.
func TestA304HasTheTagOfNow(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	for i, seconds := range []int{3, 10, 30} { // on a slow machine a wait can be over before the other version comes
		answered := s.begin(conditional(s.Key, fmt.Sprintf("/api/v2/vault/%s?wait=%d", id, seconds), "*"))
		s.untilWaiting(t, i+1)
		s.replace(id, fmt.Sprint("after ", seconds))
		now := s.Get("/api/v2/vault/" + id).Header.Get("ETag")
		r := <-answered
		if r.Status == http.StatusNotModified && r.Header.Get("ETag") == now && now != tag {
			return
		}
		t.Logf("%d %s, not %s", r.Status, r.Header.Get("ETag"), now)
	}
	t.Error("no wait is answered with the tag of another version")
}

// The path that a policy allowed may be taken away while the caller waits.
func TestAWaitEndsWithThePolicyOfItsCaller(t *testing.T) {
	s := newService(t)
	r := s.beginReader(t)
	s.Send("PUT", "/api/v2/access/bindings/"+r.keyID, r.owner, object{"policies": []any{}}).Want(t, http.StatusOK)
	s.Send("PUT", r.path, r.owner, object{"values": object{"key": "second"}}).Want(t, http.StatusOK)
	if got := <-r.answered; got.Status != http.StatusForbidden || strings.Contains(string(got.Body), "second") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// untilLogged returns once an entry of any tenant has an attribute.
func (s *service) untilLogged(t *testing.T, attribute, value string) {
	t.Helper()
	has := func(e audit.Entry) bool { return e.Attributes[attribute] == value }
	for deadline := time.Now().Add(time.Minute); !slices.ContainsFunc(s.AllEntries(1), has); {
		if time.Now().After(deadline) {
			t.Fatal("no entry has", attribute, value)
		}
	}
}

func TestAWaitOfAPodEndsWithItsRole(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	pods := s.UsePods(s.Tenant)
	pods.Allow(servertest.AllowOnly("unseal"))
	answered := s.begin(servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/n?wait=55", Bearer: servertest.ShopToken, Header: http.Header{"If-None-Match": {tag}}})
	s.untilWaiting(t, 1)
	pods.Allow(servertest.AllowNothing)
	s.replace(id, "second")
	if r := <-answered; r.Status != http.StatusForbidden || strings.Contains(string(r.Body), "second") {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if e := s.Entries("event_type=CREDENTIAL_UNSEALED&outcome=denied"); len(e) != 1 {
		t.Error(e)
	}
}

// The cluster does not answer for a while: whoever waits goes on.
func TestAWaitOutlastsAnOutage(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	pods := s.UsePods(s.Tenant)
	pods.Allow(servertest.AllowOnly("unseal"))
	answered := s.begin(servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/n?wait=55", Bearer: servertest.ShopToken, Header: http.Header{"If-None-Match": {tag}}})
	s.untilWaiting(t, 1)
	pods.TakeReviewed()
	down := func(is bool) {
		pods.Mu.Lock()
		defer pods.Mu.Unlock()
		pods.Down = is
	}
	down(true)
	for deadline := time.Now().Add(time.Minute); pods.TakeReviewed() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the caller is not looked at again")
		}
	}
	down(false)
	s.replace(id, "second")
	if r := <-answered; r.Status != http.StatusOK {
		t.Errorf("%d %s", r.Status, r.Body)
	}
}

func TestACallerHasFewWaits(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	wait := "/api/v2/vault/" + id + "?wait=55"
	other := s.GrantKey(authz.VaultRead)
	answered := make(chan servertest.Reply)
	for range 5 {
		go func() { answered <- s.Call(conditional(s.Key, wait, tag)) }()
	}
	if r := <-answered; r.Status != http.StatusTooManyRequests || r.Header.Get("Retry-After") == "" {
		t.Error(r.Status, r.Header)
	}
	if e := s.Entries("outcome=failure"); len(e) != 1 || e[0]["attributes"].(object)["reason"] != "too_many_waits" {
		t.Error(e)
	}
	s.unchanged(conditional(other, "/api/v2/vault/"+id+"?wait=1", tag))
	s.replace(id, "second")
	for range 4 {
		if r := <-answered; r.Status != http.StatusOK {
			t.Error(r.Status)
		}
	}
	s.Call(conditional(s.Key, wait, tag)).Want(t, http.StatusOK) // the places are free again
}

func TestAWaitNeedsWhatItWaitsFor(t *testing.T) {
	s := newService(t)
	id, tag := s.sealed()
	for query, named := range map[string]string{"?wait=5": "If-None-Match", "?wait=5&version=1": "version", "?wait=56": "wait", "?wait=0": "wait"} {
		r := conditional(s.Key, "/api/v2/vault/"+id+query, tag)
		if query == "?wait=5" {
			r.Header = nil
		}
		if said := s.Call(r).Message(t, http.StatusBadRequest); !strings.Contains(said, named) {
			t.Errorf("%s: %s", query, said)
		}
	}
}
