package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// verify has the log verified up to its head, as the server does in the background.
func (s *service) verify() {
	s.t.Helper()
	if _, err := s.chain.Verify(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// assess has the deployment assess itself, as it does each minute.
func (s *service) assess() {
	s.t.Helper()
	if err := s.server.config.Compliance.AssessAll(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *service) score(key, query string) v2.ComplianceScore {
	s.t.Helper()
	return decoded[v2.ComplianceScore](s.t, s.call(request{method: "GET", path: "/api/v2/compliance/score?" + query, key: key}))
}

func (s *service) report(key, query string) v2.ComplianceReport {
	s.t.Helper()
	return decoded[v2.ComplianceReport](s.t, s.call(request{method: "GET", path: "/api/v2/compliance/report?" + query, key: key}))
}

// download follows a signed URL of the service's own as anybody would.
func (s *service) download(signed string) reply {
	s.t.Helper()
	path, ok := strings.CutPrefix(signed, s.url)
	if !ok {
		s.t.Fatalf("%s is not at %s", signed, s.url)
	}
	return s.call(request{method: "GET", path: path})
}

func TestEveryFrameworkIsScoredAndReportedForAnEmptyTenant(t *testing.T) {
	s := newService(t)
	s.verify()
	for _, f := range frameworks {
		score := s.score(s.key, "framework="+f)
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
		made := s.report(s.key, "framework="+f)
		if r := s.download(made.Url); r.status != http.StatusOK || !bytes.HasPrefix(r.body, []byte("%PDF-")) {
			t.Errorf("%s: %d, %.20q", f, r.status, r.body)
		}
	}
	for _, query := range []string{"", "?framework=", "?framework=soc3", "?framework=SOC2", "?framework=soc2&framework=hipaa", "?frameworks=soc2", "?framework=soc2%00"} {
		for _, of := range []string{"score", "history", "report"} {
			message := s.get("/api/v2/compliance/"+of+query).message(t, http.StatusBadRequest)
			if !strings.Contains(message, "framework") || !strings.Contains(message, "nist_800_53") || strings.Contains(message, "SOC2") {
				t.Errorf("%s%s: %s", of, query, message)
			}
		}
	}
	for _, query := range []string{"&head=0", "&head=x", "&head=-1", "&head=9007199254740992"} {
		s.get("/api/v2/compliance/score?framework=soc2"+query).message(t, http.StatusBadRequest)
	}
	s.get("/api/v2/compliance/report?framework=soc2&format=docx").message(t, http.StatusBadRequest)
	s.get("/api/v2/compliance/report?framework=soc2&format=ksi").message(t, http.StatusBadRequest)
	history := decoded[v2.ComplianceHistory](t, s.get("/api/v2/compliance/history?framework=soc2"))
	if len(history.Scores) != 1 || history.Scores[0].Date.String() != "2026-11-21" {
		t.Errorf("%+v", history)
	}
	bom := s.get("/api/v2/compliance/cbom")
	var document struct{ BomFormat, SpecVersion string }
	if err := json.Unmarshal(bom.body, &document); err != nil || document.BomFormat != "CycloneDX" || bom.header.Get("Content-Type") != "application/vnd.cyclonedx+json" {
		t.Errorf("%v, %+v, %v", err, document, bom.header)
	}
}

// Heads of another tenant, of nobody and of the future are one case.
func TestAHeadIsAnEntryOfTheTenant(t *testing.T) {
	s := newService(t)
	s.seal("v")
	s.verify()
	own := s.historyOf(s.tenant)
	foreign := s.ownEntry(s.stranger().Tenant).Sequence
	for _, of := range []string{"score", "report"} {
		at := func(sequence uint64) request {
			return request{method: "GET", key: s.key, path: "/api/v2/compliance/" + of + "?" + url.Values{"framework": {"soc2"}, "head": {jsonNumber(sequence)}}.Encode()}
		}
		s.indistinct(t, of, http.StatusNotFound, map[string]request{
			"a neighbour's": at(foreign), "the deployment's": at(1), "never": at(1<<53 - 1),
		})
		s.call(at(own[len(own)-1].Sequence)).want(t, http.StatusOK)
	}
}

func jsonNumber(n uint64) string { b, _ := json.Marshal(n); return string(b) }

// The same head is the same report, to the byte, whenever and however often it is
// asked for; its signature is the deployment's.
func TestTheSameHeadIsTheSameReport(t *testing.T) {
	s := newService(t)
	s.seal("v")
	s.verify()
	for _, format := range []string{"pdf", "oscal"} {
		first := s.report(s.key, "framework=soc2&format="+format)
		one := s.download(first.Url)
		if one.status != http.StatusOK {
			t.Fatalf("%d %s", one.status, one.body)
		}
		s.clock.advance(40 * 24 * time.Hour)
		s.seal("another")
		s.verify()
		pinned := s.report(s.key, "framework=soc2&format="+format+"&head="+jsonNumber(uint64(first.Head.Sequence)))
		if two := s.download(pinned.Url); !bytes.Equal(one.body, two.body) || pinned.Head.Hash != first.Head.Hash {
			t.Errorf("%s: %d and %d bytes for one head", format, len(one.body), len(two.body))
		}
		// As if it had never been made: the file is gone.
		for _, file := range s.files() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
		again := s.report(s.key, "framework=soc2&format="+format+"&head="+jsonNumber(uint64(first.Head.Sequence)))
		three, signature := s.download(again.Url), s.download(again.SignatureUrl)
		if !bytes.Equal(one.body, three.body) {
			t.Errorf("%s: rendered anew it has %d bytes, not %d", format, len(three.body), len(one.body))
		}
		if !s.keys.Identity().Verify("latticekeep/report/v1", three.body, signature.body) || s.keys.Identity().Verify("latticekeep/report/v1", three.body[1:], signature.body) {
			t.Errorf("%s: the signature of %d bytes does not verify, or verifies anything", format, len(signature.body))
		}
		newest := s.report(s.key, "framework=soc2&format="+format)
		if other := s.download(newest.Url); newest.Head.Sequence <= first.Head.Sequence || bytes.Equal(one.body, other.body) {
			t.Errorf("%s: another head is the same report", format)
		}
	}
}

// files are the reports that lie in the folder.
func (s *service) files() (all []string) {
	s.t.Helper()
	err := filepath.WalkDir(s.folder, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// A URL is good as it was given, for an hour, to whoever has it; anything else is
// one refusal.
func TestASignedURLEndsAfterAnHourAndCannotBeAltered(t *testing.T) {
	s := newService(t)
	s.seal("v")
	s.verify()
	made := s.report(s.key, "framework=fedramp&format=ksi")
	if !made.ExpiresAt.Equal(s.clock.Now().Add(time.Hour)) || made.Format != v2.ComplianceReportFormatKsi {
		t.Errorf("%+v at %v", made, s.clock.Now())
	}
	u, err := url.Parse(made.Url)
	if err != nil {
		t.Fatal(err)
	}
	before := s.next()
	r := s.download(made.Url)
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff",
		"Content-Disposition": "attachment; filename=" + filepath.Base(u.Query().Get("obj")),
	} {
		if got := strings.ReplaceAll(r.header.Get(name), `"`, ""); r.status != http.StatusOK || got != want {
			t.Errorf("%d, %s: %q, want %q", r.status, name, got, want)
		}
	}
	if r := s.download(made.SignatureUrl); r.status != http.StatusOK || r.header.Get("Content-Type") != "application/octet-stream" || len(r.body) != 3309 {
		t.Errorf("%d %v, %d bytes", r.status, r.header, len(r.body))
	}
	if s.next() != before {
		t.Error("a download, whose report has its entry, left another")
	}
	with := func(change func(url.Values)) request {
		q := u.Query()
		change(q)
		return request{method: "GET", path: u.Path + "?" + q.Encode()}
	}
	cases := map[string]request{
		"nothing": {method: "GET", path: u.Path}, "malformed": {method: "GET", path: u.Path + "?%zz"},
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
	s.indistinct(t, "altered", http.StatusForbidden, cases)
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		if r := s.call(request{method: method, path: u.RequestURI()}); r.status != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, r.status)
		}
	}
	s.clock.advance(time.Hour - time.Second)
	if r := s.download(made.Url); r.status != http.StatusOK {
		t.Errorf("in its last second: %d", r.status)
	}
	s.clock.advance(time.Second)
	s.indistinct(t, "ended", http.StatusForbidden, map[string]request{
		"after the hour": {method: "GET", path: u.RequestURI()}, "altered": cases["dots"],
	})
	// The report is gone: no hint that there was one.
	again := s.report(s.key, "framework=fedramp&format=ksi")
	for _, file := range s.files() {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	s.indistinct(t, "gone", http.StatusForbidden, map[string]request{
		"gone": {method: "GET", path: strings.TrimPrefix(again.Url, s.url)}, "altered": cases["dots"],
	})
}

// A download is a stranger's request, whose address has a rate.
func TestDownloadsCountForTheAddress(t *testing.T) {
	s := newService(t, func(c *Config) { c.Rates.Address = 2 })
	s.verify()
	made := s.report(s.key, "framework=soc2")
	for i, want := range []int{200, 200, 429} {
		if r := s.download(made.Url); r.status != want || r.header.Get("X-RateLimit-Limit") != "2" {
			t.Errorf("download %d: %d, %v", i, r.status, r.header)
		}
	}
}

// A chain that does not verify has no score, whatever it would be.
func TestABrokenChainHasNoScore(t *testing.T) {
	s := newService(t)
	s.seal("v")
	s.verify()
	if score := s.score(s.key, "framework=soc2"); score.Score == nil {
		t.Fatal(*score.Reason)
	}
	at := s.next() - 1
	key := binary.BigEndian.AppendUint64([]byte("audit/entry/"), s.ownEntry(s.tenant).Sequence)
	err := s.store.Update(t.Context(), func(tx store.Tx) error {
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
	go func() { defer close(done); s.chain.KeepVerified(ctx, time.Nanosecond, slog.New(slog.DiscardHandler)) }()
	patience := time.After(time.Minute)
	for s.chain.Proof().Status != compliance.Broken {
		select {
		case <-patience:
			t.Fatal("the change was not found")
		default:
			runtime.Gosched()
		}
	}
	stop()
	<-done
	score := s.score(s.key, "framework=soc2")
	if score.Score != nil || score.Reason == nil || *score.Reason == "" || score.Proof.Status != v2.ComplianceScoreProofStatusBroken || score.Proof.VerifiedTo >= int64(at) {
		t.Errorf("score %v, reason %v, %+v", score.Score, score.Reason, score.Proof)
	}
	next := s.next()
	s.get("/api/v2/compliance/report?framework=soc2").message(t, http.StatusConflict)
	if left := s.records(next); len(left) != 1 || left[0].EventType != audit.ComplianceReported || left[0].Outcome == audit.Success {
		t.Errorf("a report that was refused left %v", summary(left))
	}
	raw := s.get("/api/v2/compliance/score?framework=soc2").want(t, http.StatusOK)
	if v, there := raw["score"]; !there || v != nil {
		t.Errorf("score is %v, %v", v, there)
	}
	for _, e := range decoded[v2.ComplianceHistory](t, s.get("/api/v2/compliance/history?framework=soc2")).Scores {
		if e.Sequence > int64(at) {
			t.Errorf("a score that was withheld is in the history: %+v", e)
		}
	}
}

// Reports in an S3 bucket: its own signed URL leads to them, ours leads nowhere; a
// bucket that is gone is an outage, and nothing is half-written.
func TestReportsLieInABucket(t *testing.T) {
	server := s3test.ForTest(t)
	address, err := server.Bucket("reports")
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := objects.Open(t.Context(), address, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bucket.Close() })
	s := newService(t, func(c *Config) {
		c.Reports = nil
		c.Compliance = complianceOf(t, c, healthy(), bucket)
	})
	s.seal("v")
	s.verify()
	made := s.report(s.key, "framework=iso27001")
	u, err := url.Parse(made.Url)
	if err != nil || !strings.HasPrefix(made.Url, server.Endpoint+"/reports/") || u.Query().Get("X-Amz-Expires") != "3600" {
		t.Fatalf("%s: %v", made.Url, err)
	}
	code, report := status(t, made.Url)
	signed, signature := status(t, made.SignatureUrl)
	if code != http.StatusOK || signed != http.StatusOK || !strings.HasPrefix(report, "%PDF-") ||
		!s.keys.Identity().Verify("latticekeep/report/v1", []byte(report), []byte(signature)) {
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
		if code, body := status(t, altered.String()); code != http.StatusForbidden && code != http.StatusBadRequest {
			t.Errorf("%s: %d %.100s", name, code, body)
		}
	}
	s.call(request{method: "GET", path: "/api/v2/compliance/download?" + u.RawQuery}).message(t, http.StatusForbidden)

	if err := server.RemoveBucket("reports"); err != nil {
		t.Fatal(err)
	}
	message := s.get("/api/v2/compliance/report?framework=soc2").message(t, http.StatusServiceUnavailable)
	if strings.Contains(message, "reports") || strings.Contains(message, "S3") {
		t.Error(message)
	}
	if _, err := server.Bucket("reports"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "reports"} {
		if left, err := os.ReadDir(server.Object("reports", name)); err == nil && name != "" && len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	code, report = status(t, s.report(s.key, "framework=soc2").Url)
	if code != http.StatusOK || !strings.HasPrefix(report, "%PDF-") {
		t.Errorf("after the outage: %d", code)
	}
}

// A folder that is gone is an outage too.
func TestAFolderOfReportsThatIsGoneIsAnOutage(t *testing.T) {
	s := newService(t)
	s.verify()
	made := s.report(s.key, "framework=soc2")
	if err := os.RemoveAll(s.folder); err != nil {
		t.Fatal(err)
	}
	s.download(made.Url).message(t, http.StatusServiceUnavailable)
	s.get("/api/v2/compliance/report?framework=hipaa").message(t, http.StatusServiceUnavailable)
	s.score(s.key, "framework=hipaa")
}
