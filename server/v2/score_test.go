package v2_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/s3test"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// assess has the deployment assess itself, as it does each minute.
func (s *service) assess() {
	s.T.Helper()
	if err := s.Config.Compliance.AssessAll(s.T.Context()); err != nil {
		s.T.Fatal(err)
	}
}

func (s *service) score(key, query string) v2.ComplianceScore {
	s.T.Helper()
	return servertest.Decode[v2.ComplianceScore](s.T, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/compliance/score?" + query, Key: key}))
}

func (s *service) report(key, query string) v2.ComplianceReport {
	s.T.Helper()
	return servertest.Decode[v2.ComplianceReport](s.T, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/compliance/report?" + query, Key: key}))
}

// download follows a signed URL of the service's own as anybody would.
func (s *service) download(signed string) servertest.Reply {
	s.T.Helper()
	path, ok := strings.CutPrefix(signed, s.URL)
	if !ok {
		s.T.Fatalf("%s is not at %s", signed, s.URL)
	}
	return s.Call(servertest.Request{Method: "GET", Path: path})
}

func TestEveryFrameworkIsScoredAndReportedForAnEmptyTenant(t *testing.T) {
	s := newService(t)
	s.VerifyLog()
	for _, f := range frameworks {
		score := s.score(s.Key, "framework="+f)
		if score.Score == nil || *score.Score < 0 || *score.Score > 100 || score.Reason != nil || string(score.Framework) != f || score.Version == "" {
			t.Errorf("%s: %v, reason %v, version %q", f, score.Score, score.Reason, score.Version)
		}
		if score.Proof.Status != v2.ComplianceScoreProofStatusVerified || score.Proof.VerifiedTo < score.Head.Sequence || score.Proof.VerifiedAt == nil {
			t.Errorf("%s: proof %+v of head %+v", f, score.Proof, score.Head)
		}
		evidenced, manual := 0, 0
		for _, c := range score.Controls {
			if c.Result == v2.ComplianceControlResultManual {
				manual++
			} else {
				evidenced++
			}
		}
		if n := score.Coverage; n.Controls != len(score.Controls) || n.Evidenced != evidenced || n.Evidenced == 0 || manual == 0 || n.Percent <= 0 || n.Percent >= 100 {
			t.Errorf("%s: coverage %+v of %d controls, %d manual", f, n, len(score.Controls), manual)
		}
		made := s.report(s.Key, "framework="+f)
		if r := s.download(made.Url); r.Status != http.StatusOK || !bytes.HasPrefix(r.Body, []byte("%PDF-")) {
			t.Errorf("%s: %d, %.20q", f, r.Status, r.Body)
		}
	}
	for _, query := range []string{"", "?framework=", "?framework=soc3", "?framework=SOC2", "?framework=soc2&framework=hipaa", "?framework=soc2%00"} {
		for _, of := range []string{"score", "history", "report"} {
			message := s.Get("/api/v2/compliance/"+of+query).Message(t, http.StatusBadRequest)
			if !strings.Contains(message, "framework") || !strings.Contains(message, "nist_800_53") || strings.Contains(message, "SOC2") {
				t.Errorf("%s%s: %s", of, query, message)
			}
		}
	}
	for _, query := range []string{"&head=0", "&head=x", "&head=-1", "&head=9007199254740992"} {
		s.Get("/api/v2/compliance/score?framework=soc2"+query).Message(t, http.StatusBadRequest)
	}
	s.Get("/api/v2/compliance/report?framework=soc2&format=docx").Message(t, http.StatusBadRequest)
	s.Get("/api/v2/compliance/report?framework=soc2&format=ksi").Message(t, http.StatusBadRequest)
	history := servertest.Decode[v2.ComplianceHistory](t, s.Get("/api/v2/compliance/history?framework=soc2"))
	if len(history.Scores) != 1 || history.Scores[0].Date.String() != "2026-11-21" {
		t.Errorf("%+v", history)
	}
	bom := s.Get("/api/v2/compliance/cbom")
	var document struct{ BomFormat, SpecVersion string }
	if err := json.Unmarshal(bom.Body, &document); err != nil || document.BomFormat != "CycloneDX" || bom.Header.Get("Content-Type") != "application/vnd.cyclonedx+json" {
		t.Errorf("%v, %+v, %v", err, document, bom.Header)
	}
}

// One request has the scores of all frameworks, with each probe once and by the same results.
func TestAllScoresComeInOneRequest(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	all := servertest.Decode[v2.ComplianceScores](t, s.Get("/api/v2/compliance/scores"))
	probes := make(map[string]v2.ComplianceProbe)
	for _, p := range all.Probes {
		if _, twice := probes[p.Name]; twice {
			t.Errorf("the probe %s is there twice", p.Name)
		}
		probes[p.Name] = p
	}
	if len(all.Scores) != len(frameworks) {
		t.Fatalf("%d scores", len(all.Scores))
	}
	for i, f := range frameworks {
		got, want := all.Scores[i], s.score(s.Key, fmt.Sprintf("framework=%s&head=%d", f, all.Head.Sequence))
		if string(got.Framework) != f || *got.Score != *want.Score || got.Coverage != want.Coverage || got.Version != want.Version || got.Provisional != want.Provisional {
			t.Errorf("%s: %+v, alone %+v", f, got, want)
		}
		for j, c := range want.Controls {
			one := got.Controls[j]
			if one.Id != c.Id || one.Title != c.Title || one.Result != c.Result || len(one.Probes) != len(c.Probes) {
				t.Errorf("%s: %+v, alone %+v", f, one, c)
			}
			for k, p := range c.Probes {
				if name := one.Probes[k]; name != p.Name || !reflect.DeepEqual(probes[name], p) {
					t.Errorf("%s, %s: %+v, alone %+v", f, c.Id, probes[name], p)
				}
			}
		}
	}
}

// Heads of another tenant, of nobody and of the future are one case.
func TestAHeadIsAnEntryOfTheTenant(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	own := s.historyOf(s.Tenant)
	foreign := s.FirstEntryOf(s.Stranger().Tenant).Sequence
	for _, of := range []string{"score", "report"} {
		at := func(sequence uint64) servertest.Request {
			return servertest.Request{Method: "GET", Key: s.Key, Path: "/api/v2/compliance/" + of + "?" + url.Values{"framework": {"soc2"}, "head": {jsonNumber(sequence)}}.Encode()}
		}
		s.WantIndistinct(t, of, http.StatusNotFound, map[string]servertest.Request{
			"a neighbour's": at(foreign), "the deployment's": at(1), "never": at(1<<53 - 1),
		})
		s.Call(at(own[len(own)-1].Sequence)).Want(t, http.StatusOK)
	}
}

func jsonNumber(n uint64) string { b, _ := json.Marshal(n); return string(b) }

// The same head is the same report, to the byte, whenever and however often it is
// asked for; its signature is the deployment's.
func TestTheSameHeadIsTheSameReport(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	for _, format := range []string{"pdf", "oscal"} {
		first := s.report(s.Key, "framework=soc2&format="+format)
		one := s.download(first.Url)
		if one.Status != http.StatusOK {
			t.Fatalf("%d %s", one.Status, one.Body)
		}
		s.Clock.Advance(40 * 24 * time.Hour)
		s.Seal("another")
		s.VerifyLog()
		pinned := s.report(s.Key, "framework=soc2&format="+format+"&head="+jsonNumber(uint64(first.Head.Sequence)))
		if two := s.download(pinned.Url); !bytes.Equal(one.Body, two.Body) || pinned.Head.Hash != first.Head.Hash {
			t.Errorf("%s: %d and %d bytes for one head", format, len(one.Body), len(two.Body))
		}
		// As if it had never been made: the file is gone.
		for _, file := range s.files() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
		again := s.report(s.Key, "framework=soc2&format="+format+"&head="+jsonNumber(uint64(first.Head.Sequence)))
		three, signature := s.download(again.Url), s.download(again.SignatureUrl)
		if !bytes.Equal(one.Body, three.Body) {
			t.Errorf("%s: rendered anew it has %d bytes, not %d", format, len(three.Body), len(one.Body))
		}
		if !s.Keys.Identity().Verify("latticekeep/report/v1", three.Body, signature.Body) || s.Keys.Identity().Verify("latticekeep/report/v1", three.Body[1:], signature.Body) {
			t.Errorf("%s: the signature of %d bytes does not verify, or verifies anything", format, len(signature.Body))
		}
		newest := s.report(s.Key, "framework=soc2&format="+format)
		if other := s.download(newest.Url); newest.Head.Sequence <= first.Head.Sequence || bytes.Equal(one.Body, other.Body) {
			t.Errorf("%s: another head is the same report", format)
		}
	}
}

// A report states whom it is made for and for which period, and says of both that they were asked
// for. What was judged is the same.
func TestAReportStatesOrganisationAndPeriod(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	plain := s.report(s.Key, "framework=soc2&format=oscal")
	head := "&head=" + jsonNumber(uint64(plain.Head.Sequence))
	day := plain.Head.Timestamp.Format(time.DateOnly)
	stated := s.report(s.Key, "framework=soc2&format=oscal&organisation="+url.QueryEscape("Müller & Töchter GmbH")+"&from=2026-11-01"+head)
	if plain.Url == stated.Url || plain.Head != stated.Head {
		t.Errorf("%+v and %+v", plain, stated)
	}
	type document struct {
		Results struct {
			Metadata struct {
				Props   []struct{ Name, Value string }
				Parties []struct {
					Name, Remarks string
					Props         []struct{ Name, Value string }
				}
			}
			Results []struct {
				Start, End string
				Props      []struct{ Name, Value string }
			}
		} `json:"assessment-results"`
	}
	var of [2]document
	for i, made := range []v2.ComplianceReport{plain, stated} {
		if err := json.Unmarshal(s.download(made.Url).Body, &of[i]); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(of[0].Results.Results, of[1].Results.Results) {
		t.Errorf("what is stated changes the results:\n%+v\n%+v", of[0].Results.Results, of[1].Results.Results)
	}
	party := of[1].Results.Metadata.Parties[0]
	if party.Name != "Müller & Töchter GmbH" || !strings.Contains(party.Remarks, "Who asked for the report stated the name") || !strings.Contains(party.Remarks, "the results are those of its end") {
		t.Errorf("%+v", party)
	}
	if own := of[0].Results.Metadata.Parties[0]; own.Name == "" || own.Name == string(s.Tenant) || strings.Contains(own.Remarks, "stated") {
		t.Errorf("the name of the tenant: %+v", own)
	}
	period := map[string]string{}
	for _, p := range of[1].Results.Metadata.Props {
		period[p.Name] = p.Value
	}
	if period["period-start"] != "2026-11-01" || period["period-end"] != day {
		t.Errorf("%v", period)
	}
	again := s.report(s.Key, "framework=soc2&format=oscal&organisation="+url.QueryEscape("Müller & Töchter GmbH")+"&from=2026-11-01"+head)
	name := func(r v2.ComplianceReport) string { u, _ := url.Parse(r.Url); return u.Query().Get("obj") }
	if name(again) != name(stated) {
		t.Error("what states the same is another report")
	}
	for _, format := range []string{"pdf"} {
		made := s.report(s.Key, "framework=soc2&format="+format+"&organisation=Other&from="+day+head)
		if r := s.download(made.Url); r.Status != http.StatusOK || !bytes.HasPrefix(r.Body, []byte("%PDF-")) {
			t.Errorf("%d", r.Status)
		}
	}
	for _, query := range []string{
		"&organisation=", "&organisation=" + strings.Repeat("x", 201), "&organisation=a%0Ab", "&organisation=a%00", "&organisation=%E2%80%AEabc", "&organisation=%20", "&organisation=%FF", "&organisation=%E3%85%A4", "&organisation=a%E2%A0%80", "&organisation=a%EF%B8%8F",
		"&from=2026-11-32", "&from=yesterday", "&from=2099-01-01", "&from=",
	} {
		s.Get("/api/v2/compliance/report?framework=soc2"+query).Message(t, http.StatusBadRequest)
	}
	for _, query := range []string{"&organisation=Other", "&from=2026-11-01"} {
		s.Get("/api/v2/compliance/report?framework=fedramp&format=ksi"+query).Message(t, http.StatusBadRequest)
	}
}

// files are the reports that lie in the folder.
func (s *service) files() (all []string) {
	s.T.Helper()
	err := filepath.WalkDir(s.ReportFolder, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return err
	})
	if err != nil {
		s.T.Fatal(err)
	}
	return all
}

// A URL is good as it was given, for an hour, to whoever has it; anything else is
// one refusal.
func TestASignedURLEndsAfterAnHourAndCannotBeAltered(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	made := s.report(s.Key, "framework=fedramp&format=ksi")
	if !made.ExpiresAt.Equal(s.Clock.Now().Add(time.Hour)) || made.Format != v2.ComplianceReportFormatKsi {
		t.Errorf("%+v at %v", made, s.Clock.Now())
	}
	u, err := url.Parse(made.Url)
	if err != nil {
		t.Fatal(err)
	}
	before := s.NextSequence()
	r := s.download(made.Url)
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff",
		"Content-Disposition": "attachment; filename=" + filepath.Base(u.Query().Get("obj")),
	} {
		if got := strings.ReplaceAll(r.Header.Get(name), `"`, ""); r.Status != http.StatusOK || got != want {
			t.Errorf("%d, %s: %q, want %q", r.Status, name, got, want)
		}
	}
	if r := s.download(made.SignatureUrl); r.Status != http.StatusOK || r.Header.Get("Content-Type") != "application/octet-stream" || len(r.Body) != 3309 {
		t.Errorf("%d %v, %d bytes", r.Status, r.Header, len(r.Body))
	}
	if s.NextSequence() != before {
		t.Error("a download, whose report has its entry, left another")
	}
	with := func(change func(url.Values)) servertest.Request {
		q := u.Query()
		change(q)
		return servertest.Request{Method: "GET", Path: u.Path + "?" + q.Encode()}
	}
	cases := map[string]servertest.Request{
		"nothing": {Method: "GET", Path: u.Path}, "malformed": {Method: "GET", Path: u.Path + "?%zz"},
		"another field":  with(func(q url.Values) { q.Set("x", "1") }),
		"another method": with(func(q url.Values) { q.Set("method", "PUT") }),
		"a later end":    with(func(q url.Values) { q.Set("expiry", "9999999999") }),
		"the signature's signature": with(func(q url.Values) {
			other, _ := url.Parse(made.SignatureUrl)
			q.Set("signature", other.Query().Get("signature"))
		}),
		"another report": with(func(q url.Values) { q.Set("obj", strings.Replace(q.Get("obj"), "fedramp", "soc2", 1)) }),
		"dots":           with(func(q url.Values) { q.Set("obj", "../store.db") }),
		"a file":         with(func(q url.Values) { q.Set("obj", "/etc/passwd") }),
	}
	for name := range u.Query() {
		cases["no "+name] = with(func(q url.Values) { q.Del(name) })
		cases["empty "+name] = with(func(q url.Values) { q.Set(name, "") })
		cases["two of "+name] = with(func(q url.Values) { q.Add(name, q.Get(name)) })
		cases["longer "+name] = with(func(q url.Values) { q.Set(name, q.Get(name)+"a") })
	}
	s.WantIndistinct(t, "altered", http.StatusForbidden, cases)
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		if r := s.Call(servertest.Request{Method: method, Path: u.RequestURI()}); r.Status != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, r.Status)
		}
	}
	s.Clock.Advance(time.Hour - time.Second)
	if r := s.download(made.Url); r.Status != http.StatusOK {
		t.Errorf("in its last second: %d", r.Status)
	}
	s.Clock.Advance(time.Second)
	s.WantIndistinct(t, "ended", http.StatusForbidden, map[string]servertest.Request{
		"after the hour": {Method: "GET", Path: u.RequestURI()}, "altered": cases["dots"],
	})
	// The report is gone: no hint that there was one.
	again := s.report(s.Key, "framework=fedramp&format=ksi")
	for _, file := range s.files() {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	s.WantIndistinct(t, "gone", http.StatusForbidden, map[string]servertest.Request{
		"gone": {Method: "GET", Path: strings.TrimPrefix(again.Url, s.URL)}, "altered": cases["dots"],
	})
}

// A download is a stranger's request, whose address has a rate.
func TestDownloadsCountForTheAddress(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.Limits.Address = 2 })
	s.VerifyLog()
	made := s.report(s.Key, "framework=soc2")
	for i, want := range []int{200, 200, 429} {
		if r := s.download(made.Url); r.Status != want || r.Header.Get("X-RateLimit-Limit") != "2" {
			t.Errorf("download %d: %d, %v", i, r.Status, r.Header)
		}
	}
}

// A chain that does not verify has no score, whatever it would be.
func TestABrokenChainHasNoScore(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.VerifyLog()
	if score := s.score(s.Key, "framework=soc2"); score.Score == nil {
		t.Fatal(*score.Reason)
	}
	at := s.NextSequence() - 1
	key := binary.BigEndian.AppendUint64([]byte("audit/entry/"), s.FirstEntryOf(s.Tenant).Sequence)
	err := s.Store.Update(t.Context(), func(tx store.Tx) error {
		row, err := tx.Get(key)
		if err != nil {
			return err
		}
		changed := bytes.Replace(row, []byte(`"outcome":"success"`), []byte(`"outcome":"failure"`), 1)
		if bytes.Equal(changed, row) {
			t.Error("nothing was changed")
		}
		return tx.Put(key, changed)
	})
	if err != nil {
		t.Fatal(err)
	}
	// A pass over all of it, as there is one a day, finds it.
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Verifier.KeepVerified(ctx, time.Nanosecond, slog.New(slog.DiscardHandler))
	}()
	patience := time.After(time.Minute)
	for s.Verifier.Proof().Status != compliance.Broken {
		select {
		case <-patience:
			t.Fatal("the change was not found")
		default:
			runtime.Gosched()
		}
	}
	stop()
	<-done
	score := s.score(s.Key, "framework=soc2")
	if score.Score != nil || score.Reason == nil || *score.Reason == "" || score.Proof.Status != v2.ComplianceScoreProofStatusBroken || score.Proof.VerifiedTo >= int64(at) {
		t.Errorf("score %v, reason %v, %+v", score.Score, score.Reason, score.Proof)
	}
	all := servertest.Decode[v2.ComplianceScores](t, s.Get("/api/v2/compliance/scores"))
	for _, one := range all.Scores {
		if one.Score != nil || one.Reason == nil || *one.Reason != *score.Reason || len(one.Controls) != 0 {
			t.Errorf("%s: %+v", one.Framework, one)
		}
	}
	if len(all.Scores) != 9 || len(all.Probes) != 0 || all.Proof.Status != v2.ComplianceScoreProofStatusBroken {
		t.Errorf("%d scores, %d probes, %+v", len(all.Scores), len(all.Probes), all.Proof)
	}
	next := s.NextSequence()
	s.Get("/api/v2/compliance/report?framework=soc2").Message(t, http.StatusConflict)
	if left := s.AllEntries(next); len(left) != 1 || left[0].EventType != audit.ComplianceReported || left[0].Outcome == audit.Success {
		t.Errorf("a report that was refused left %v", servertest.Summaries(left))
	}
	raw := s.Get("/api/v2/compliance/score?framework=soc2").Want(t, http.StatusOK)
	if v, there := raw["score"]; !there || v != nil {
		t.Errorf("score is %v, %v", v, there)
	}
	for _, e := range servertest.Decode[v2.ComplianceHistory](t, s.Get("/api/v2/compliance/history?framework=soc2")).Scores {
		if e.Sequence > int64(at) {
			t.Errorf("a score that was withheld is in the history: %+v", e)
		}
	}
}

// Reports in an S3 bucket: its own signed URL leads to them, ours leads nowhere; a
// bucket that is gone is an outage, and nothing is half-written.
func TestReportsLieInABucket(t *testing.T) {
	storage := s3test.ForTest(t)
	address, err := storage.Bucket("reports")
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := objects.Open(t.Context(), address, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bucket.Close() })
	s := newService(t, func(c *server.Config) {
		c.Reports = nil
		c.Compliance = servertest.NewCompliance(t, c, verify.NewLiveVerifier(c.Audit), servertest.HealthyState(), bucket)
	})
	s.Seal("v")
	s.VerifyLog()
	made := s.report(s.Key, "framework=iso27001")
	u, err := url.Parse(made.Url)
	if err != nil || !strings.HasPrefix(made.Url, storage.Endpoint+"/reports/") || u.Query().Get("X-Amz-Expires") != "3600" {
		t.Fatalf("%s: %v", made.Url, err)
	}
	code, report := servertest.GetStatus(t, made.Url)
	signed, signature := servertest.GetStatus(t, made.SignatureUrl)
	if code != http.StatusOK || signed != http.StatusOK || !strings.HasPrefix(report, "%PDF-") ||
		!s.Keys.Identity().Verify("latticekeep/report/v1", []byte(report), []byte(signature)) {
		t.Errorf("%d %.100s, %d %d bytes", code, report, signed, len(signature))
	}
	for name, change := range map[string]func(url.Values){
		"a longer life": func(q url.Values) { q.Set("X-Amz-Expires", "604800") },
		"a later date":  func(q url.Values) { q.Set("X-Amz-Date", "20991231T235959Z") },
		"an hour ago": func(q url.Values) {
			q.Set("X-Amz-Date", time.Now().UTC().Add(-time.Hour-time.Minute).Format("20060102T150405Z"))
		},
		"no signature":     func(q url.Values) { q.Del("X-Amz-Signature") },
		"another":          func(q url.Values) { q.Set("X-Amz-Signature", strings.Repeat("0", 64)) },
		"nothing is asked": func(q url.Values) { clear(q) },
	} {
		altered, q := *u, u.Query()
		change(q)
		altered.RawQuery = q.Encode()
		if code, body := servertest.GetStatus(t, altered.String()); code != http.StatusForbidden && code != http.StatusBadRequest {
			t.Errorf("%s: %d %.100s", name, code, body)
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/compliance/download?" + u.RawQuery}).Message(t, http.StatusForbidden)

	if err := storage.RemoveBucket("reports"); err != nil {
		t.Fatal(err)
	}
	message := s.Get("/api/v2/compliance/report?framework=soc2").Message(t, http.StatusServiceUnavailable)
	if strings.Contains(message, "reports") || strings.Contains(message, "S3") {
		t.Error(message)
	}
	if _, err := storage.Bucket("reports"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "reports"} {
		if left, err := os.ReadDir(storage.Object("reports", name)); err == nil && name != "" && len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	code, report = servertest.GetStatus(t, s.report(s.Key, "framework=soc2").Url)
	if code != http.StatusOK || !strings.HasPrefix(report, "%PDF-") {
		t.Errorf("after the outage: %d", code)
	}
}

// A folder that is gone is an outage too.
func TestAFolderOfReportsThatIsGoneIsAnOutage(t *testing.T) {
	s := newService(t)
	s.VerifyLog()
	made := s.report(s.Key, "framework=soc2")
	if err := os.RemoveAll(s.ReportFolder); err != nil {
		t.Fatal(err)
	}
	s.download(made.Url).Message(t, http.StatusServiceUnavailable)
	s.Get("/api/v2/compliance/report?framework=hipaa").Message(t, http.StatusServiceUnavailable)
	s.score(s.Key, "framework=hipaa")
}
