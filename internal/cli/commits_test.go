package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// metric returns the value of a metric of the custodian's server, 0 when it is absent.
func (c *custodian) metric(name string) float64 {
	c.t.Helper()
	var at []string
	c.await("a line with the address of the metrics", func() bool {
		at = regexp.MustCompile(`"operations":"([^"]+)"`).FindStringSubmatch(c.log.String())
		return at != nil
	})
	resp, err := http.Get(at[1] + "/metrics")
	must(c.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must(c.t, err)
	_, value, _ := strings.Cut(string(text), "\n"+name+" ")
	value, _, _ = strings.Cut(value, "\n")
	number, _ := strconv.ParseFloat(value, 64)
	return number
}

// await waits until the server has done something by itself.
func (c *custodian) await(what string, happens func() bool) {
	c.t.Helper()
	patience, tick := time.After(5*time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for !happens() {
		select {
		case <-tick.C:
		case <-patience:
			c.t.Fatalf("%s: not within five minutes\n%s", what, c.log.Tail())
		}
	}
}

const shippedUntil = "latticekeep_commits_shipped_until_timestamp_seconds"

// acknowledgedSeal is a credential whose seal was answered.
type acknowledgedSeal struct {
	id, value string
	at        time.Time
}

// A server that is killed, and whose volume is lost, is restored from its bucket alone. Everything is
// there that was acknowledged before the time that the metric tells.
func TestALostVolumeIsRestoredUpToTheShippedCommits(t *testing.T) {
	s3 := s3test.ForTest(t)
	bucket, err := s3.Bucket("backups")
	must(t, err)
	t.Setenv("LATTICEKEEP_BACKUP_BUCKET", bucket)
	t.Setenv("LATTICEKEEP_OPERATIONS_LISTEN", "127.0.0.1:0")
	c := newCustodian(t, 1)
	c.await("a verified backup", func() bool { return c.metric("latticekeep_backup_last_verified_timestamp_seconds") > 0 })
	b, err := objects.Open(t.Context(), bucket, objects.SigningOptions{})
	must(t, err)
	names, err := b.List(t.Context(), "backup/", 9)
	must(t, err)
	var input string
	for _, name := range names {
		if strings.HasSuffix(name, ".backup") {
			u, err := url.Parse(bucket)
			must(t, err)
			u.Path = "/" + name
			input = u.String()
		}
	}

	var mu sync.Mutex
	var sealed []acknowledgedSeal
	last := time.Now()
	working, stop := context.WithCancel(t.Context())
	defer stop()
	var load sync.WaitGroup
	for worker := range 2 {
		tenant, err := client.New(c.url, client.WithAPIKey(c.keys[0]))
		must(t, err)
		load.Go(func() {
			for i := 0; working.Err() == nil; i++ {
				value := fmt.Sprintf("s3cret-%d-%d", worker, i)
				got, err := tenant.V2.SealCredential(working, v2.SealRequest{Name: "db", CredentialType: "database", Values: map[string]string{"password": value}}, nil)
				if err != nil {
					return // the server is gone
				}
				mu.Lock()
				sealed, last = append(sealed, acknowledgedSeal{got.CredentialId, value, time.Now()}), time.Now()
				mu.Unlock()
			}
		})
	}
	began := time.Now()
	var until float64
	c.await("a shipped segment", func() bool {
		until = c.metric(shippedUntil)
		return until > float64(began.UnixMilli())/1000+1
	})
	c.kill()
	stop()
	load.Wait()
	shipped := time.UnixMicro(int64(until * 1e6))
	must(t, os.Rename(c.path("data"), c.path("lost")))
	out := mustRun(t, "restore", "--input", input, "--identity-file", c.to.file, "--data-dir", c.path("data"))
	if !strings.Contains(out, "commits: applied up to ") {
		t.Errorf("restore says\n%s", out)
	}
	check := func(before time.Time) {
		t.Helper()
		c.start()
		n := 0
		for _, s := range sealed {
			if !s.at.Before(before) {
				continue
			}
			n++
			got, err := c.tenants[0].UnsealCredential(t.Context(), s.id)
			if err != nil || got.Values["password"] != s.value {
				t.Fatalf("a credential of %s, before %s, is %v: %v", s.at, before, got.Values, err)
			}
		}
		if n == 0 {
			t.Errorf("nothing of %d credentials was sealed before %s", len(sealed), before)
		}
		c.kill()
		mustRun(t, "audit", "verify", "--data-dir", c.path("data"))
	}
	check(shipped)
	without := t.TempDir()
	if out := mustRun(t, "restore", "--input", input, "--identity-file", c.to.file, "--data-dir", without, "--backup-only"); strings.Contains(out, "commits:") {
		t.Errorf("without the log restore says\n%s", out)
	}

	// The volume was not lost after all: the server that was killed ships at its next start what was
	// left, although it has no values of it in memory.
	must(t, os.RemoveAll(c.path("data")))
	must(t, os.Rename(c.path("lost"), c.path("data")))
	c.start()
	c.await("what was left", func() bool { return c.metric(shippedUntil) > float64(last.UnixMilli())/1000 })
	c.kill()
	must(t, os.RemoveAll(c.path("data")))
	mustRun(t, "restore", "--input", input, "--identity-file", c.to.file, "--data-dir", c.path("data"))
	check(time.Now())

	segments, err := b.List(t.Context(), "commits/", 999)
	must(t, err)
	var longest []string // the log of the server that was killed; those that were restored have shorter ones
	for _, folder := range segments {
		folder = folder[:strings.LastIndex(folder, "/")+1]
		of := slices.DeleteFunc(slices.Clone(segments), func(name string) bool { return !strings.HasPrefix(name, folder) })
		if len(of) > len(longest) {
			longest = of
		}
	}
	half := len(longest) / 2
	must(t, b.Delete(t.Context(), longest[half]))
	_, err = run(t, "restore", "--input", input, "--identity-file", c.to.file, "--data-dir", t.TempDir())
	// It names the one that is missing, or if nothing before that is needed, the one that follows.
	names = longest[half:min(half+2, len(longest))]
	if err == nil || !strings.Contains(err.Error(), "--backup-only") || !slices.ContainsFunc(names, func(name string) bool { return strings.Contains(err.Error(), name) }) {
		t.Errorf("without %s: %v", longest[half], err)
	}
}
