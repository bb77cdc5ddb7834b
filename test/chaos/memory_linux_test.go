package chaos

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/machine"
)

// smallServer serves 10,000 credentials and any number of entries, in bytes.
const smallServer = 128 << 20

// memoryGroup returns a group with a limit of memory, and skips the test where there is none.
func memoryGroup(t *testing.T, limit int64) *machine.MemoryGroup {
	t.Helper()
	g, err := machine.NewMemoryGroup(t, limit)
	if err != nil {
		t.Skip("this machine has no control group to give: ", err)
	}
	return g
}

// fill opens the database of a stopped server, and writes to it as a server would.
func (d *deployment) fill(write func(s store.Store, log *writer.Log, v *vault.Vault, p authz.Principal)) {
	d.t.Helper()
	local, err := kms.OpenLocal(d.path("keys/kms.key"))
	must(d.t, err)
	bound := state.New(nil)
	log := writer.New(time.Now, bound)
	db, err := bolt.Open(d.path("data/latticekeep.db"), bolt.Options{Hook: format.Hook(log.Commit)})
	must(d.t, err)
	s, g := bound.Guard(db), guard.New(log)
	_, keys, err := identity.Open(d.t.Context(), s, log, g, local, keyring.Config{CacheTTL: time.Hour})
	must(d.t, err)
	write(s, log, vault.New(s, g, keys, time.Now), authz.Principal{Tenant: d.tenant, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes()})
	must(d.t, db.Close())
	d.forget(d.path("data/latticekeep.db"))
}

// seal adds the credentials credential-FROM to credential-TO, each with its name as its value.
func (d *deployment) seal(from, to int) {
	d.t.Helper()
	d.fill(func(_ store.Store, log *writer.Log, v *vault.Vault, p authz.Principal) {
		log.SetSigning(writer.SignBatches)
		next := atomic.Int64{}
		next.Store(int64(from))
		var clients sync.WaitGroup
		for range 128 { // share commits
			clients.Go(func() {
				for i := next.Add(1) - 1; i <= int64(to); i = next.Add(1) - 1 {
					name := fmt.Sprint("credential-", i)
					_, err := v.Seal(d.t.Context(), p, vault.SealRequest{Name: name, Type: "t", TTLDays: 30, Values: map[string]secret.Bytes{"v": secret.Bytes(name)}})
					if err != nil {
						d.t.Error(err)
						return
					}
				}
			})
		}
		clients.Wait()
	})
}

// record adds entries to the log.
func (d *deployment) record(entries int, signing writer.Signing) {
	d.t.Helper()
	const group = 500
	d.fill(func(s store.Store, log *writer.Log, _ *vault.Vault, p authz.Principal) {
		log.SetSigning(signing)
		for range entries / group {
			must(d.t, s.Update(d.t.Context(), func(tx store.Tx) error {
				for range group {
					_, err := log.Append(tx, audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: p, Resource: audit.Resource{ID: "cred_x", Type: audit.CredentialResource}})
					if err != nil {
						return err
					}
				}
				return nil
			}))
		}
	})
}

// forget drops the pages of a file from the kernel's memory, so that they count for the next reader.
func (d *deployment) forget(path string) {
	d.t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(d.t, err)
	must(d.t, errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close()))
}

// startLimited starts a server of eight cores in a group.
func (d *deployment) startLimited(g *machine.MemoryGroup) *process {
	d.t.Helper()
	return d.start(append(g.Below(), "/usr/bin/env", "GOMAXPROCS=8")...)
}

// need returns how many bytes the server said at its start that it needs. Its log may come a little
// later.
func (p *process) need() int64 {
	p.d.t.Helper()
	var found []string
	waitFor(p.d.t, func() bool {
		found = regexp.MustCompile(`"need_bytes":(\d+)`).FindStringSubmatch(p.log.String())
		return found != nil
	})
	n, err := strconv.ParseInt(found[1], 10, 64)
	must(p.d.t, err)
	return n
}

const tooLittle = "there is too little memory"

// errAnswer is an answer that a client must not get.
var errAnswer = errors.New("a wrong answer")

// ask is what some clients ask for, again and again, all at the same time.
type ask struct {
	what          string
	clients       int
	key           string
	method, path  string
	body          string // with %d for the number of the call
	status        int
	holds         func(answer []byte) bool // nil: any answer does
	least, served atomic.Int64
}

// crowd has sixteen clients ask for everything until each kind of call was answered often enough.
func (p *process) crowd() {
	t, d := p.d.t, p.d
	t.Helper()
	data := base64.StdEncoding.EncodeToString(make([]byte, 700<<10/4*3))
	recipient := d.recipient()
	asks := []*ask{
		{what: "encrypt 700 KiB", clients: 6, key: d.key, method: "POST", path: "/api/v2/encryption/encrypt", body: `{"data":"` + data + `"}`, status: 200,
			holds: func(b []byte) bool { return len(b) > len(data) }},
		{what: "sign in", clients: 2, method: "POST", path: "/api/v2/auth/login", body: `{"email":"nobody-%d@example.org","password":"correct horse battery"}`, status: 401},
		{what: "list", clients: 2, key: d.key, method: "GET", path: "/api/v2/vault/list?limit=100", status: 200,
			holds: func(b []byte) bool { return bytes.Count(b, []byte(`"credential_id"`)) == 100 }},
		{what: "unseal", clients: 2, key: d.key, method: "GET", path: "/api/v2/vault/by-name/credential-1", status: 200,
			holds: func(b []byte) bool { return bytes.Contains(b, []byte(`{"v":"credential-1"}`)) }},
		{what: "seal", clients: 1, key: d.key, method: "POST", path: "/api/v2/vault/seal", body: `{"name":"new-%d","credential_type":"t","values":{"v":"v"}}`, status: 201},
		{what: "search the log", clients: 1, key: d.key, method: "GET", path: "/api/v2/audit/logs?limit=100", status: 200,
			holds: func(b []byte) bool {
				return bytes.Count(b, []byte(`"entry_id"`))+bytes.Count(b, []byte(`"tenant_sequence"`)) >= 100
			}},
		{what: "score", clients: 1, key: d.key, method: "GET", path: "/api/v2/compliance/score?framework=soc2", status: 200},
		{what: "back up", clients: 1, key: d.system, method: "POST", path: "/api/v2/system/backup", body: `{"recipient":"` + recipient + `"}`, status: 200,
			holds: func(b []byte) bool { return bytes.HasPrefix(b, []byte("age-encryption.org/v1\n")) }},
	}
	var clients sync.WaitGroup
	var calls, open atomic.Int64
	open.Store(int64(len(asks)))
	for _, a := range asks {
		a.least.Store(1)
		if a.what == "encrypt 700 KiB" {
			a.least.Store(20)
		}
		for range a.clients {
			clients.Go(func() {
				for open.Load() > 0 && !t.Failed() {
					served, err := p.askOnce(a, calls.Add(1))
					if err != nil {
						t.Errorf("%s: %v\n%s", a.what, err, p.log.Tail())
						return
					}
					if served && a.served.Add(1) == a.least.Load() {
						open.Add(-1)
					}
				}
			})
		}
	}
	// The server exports the log for the verification, which is a process of its own.
	clients.Go(func() { d.runLimited("audit", "verify", "--url", p.url, "--whole", "--api-key", d.system) })
	clients.Wait()
	for _, a := range asks {
		t.Logf("%s: %d", a.what, a.served.Load())
	}
}

// askOnce reports whether the call was served. It may be refused, with a reason.
func (p *process) askOnce(a *ask, call int64) (served bool, err error) {
	r, err := http.NewRequestWithContext(p.d.t.Context(), a.method, p.url+a.path, strings.NewReader(strings.Replace(a.body, "%d", fmt.Sprint(call), 1)))
	if err != nil {
		return false, err
	}
	if a.key != "" {
		r.Header.Set("X-API-Key", a.key)
	}
	if a.body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	answer, err := client.Transport.RoundTrip(r) // an export may take longer than the client has
	if err != nil {
		return false, err
	}
	body, err := io.ReadAll(answer.Body)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return false, err
	}
	var problem struct {
		Error struct{ Message string } `json:"error"`
	}
	switch answer.StatusCode {
	case a.status:
		if a.holds != nil && !a.holds(body) {
			return false, fmt.Errorf("%w: %.200s", errAnswer, body)
		}
		return true, nil
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		if json.Unmarshal(body, &problem) == nil && problem.Error.Message != "" {
			time.Sleep(20 * time.Millisecond) // as a client that waits before it repeats
			return false, nil
		}
	}
	return false, fmt.Errorf("%w: %s: %.200s", errAnswer, answer.Status, body)
}

// recipient makes an identity that opens backups once, and returns its recipient.
func (d *deployment) recipient() string {
	d.t.Helper()
	if _, err := os.Stat(d.path("identity.txt")); err != nil {
		out, err := exec.Command(d.program, "backup", "keygen", "--output", d.path("identity.txt")).Output()
		must(d.t, err)
		must(d.t, os.WriteFile(d.path("recipient.txt"), out, 0o600))
	}
	text, err := os.ReadFile(d.path("recipient.txt"))
	must(d.t, err)
	return strings.TrimSpace(string(text))
}

// runLimited runs a command of the program in a group of 128 MiB, and returns the greatest memory
// that it took, in bytes. The test fails if the command does.
func (d *deployment) runLimited(args ...string) int64 {
	g, err := machine.NewMemoryGroup(d.t, smallServer)
	if err != nil {
		d.t.Error(err)
		return 0
	}
	argv := slices.Concat(g.Below(), []string{"/usr/bin/env", "GOMAXPROCS=8", d.program}, args)
	cmd := exec.CommandContext(d.t.Context(), argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		d.t.Errorf("latticekeep %s: %v, after %d of its processes were killed\n%s", strings.Join(args, " "), err, g.Kills(d.t), out)
	}
	return g.Peak()
}

// A server in 128 MiB serves 10,000 credentials, and keeps within what it says that it needs. That is
// not more than twice what it takes.
func TestASmallServerServesTenThousandCredentials(t *testing.T) {
	beside(t)
	memoryGroup(t, smallServer)
	out := transcript(t)
	sizes := []int{1000, 10_000}
	if long() {
		sizes = append(sizes, 100_000)
	}
	d := newEmbedded(t)
	p := d.start()
	d.admit(p)
	p.kill()
	sealed := 0
	for _, credentials := range sizes {
		d.seal(sealed+1, credentials)
		sealed = credentials
		p := d.startLimited(memoryGroup(t, 1<<30))
		need := p.need()
		p.kill()
		g := memoryGroup(t, need+1<<20) // whatever clients do adds to it
		p = d.startLimited(g)
		p.crowd()
		peak := g.Peak()
		fmt.Fprintf(out, "%7d credentials: the server needs %.0f MiB and took %.0f MiB\n", credentials, mib(need), mib(peak))
		if n := g.Kills(t); n > 0 || p.dead() {
			t.Fatalf("%d processes were killed: %s", n, p.log.Tail())
		}
		if credentials <= 10_000 && need > smallServer || strings.Contains(p.log.String(), tooLittle) {
			t.Errorf("the server says that it needs %d bytes", need)
		}
		if peak > need || peak < need/2 {
			t.Errorf("it needs %d bytes by the formula, and took %d", need, peak)
		}
		p.kill()
	}
	p = d.startLimited(memoryGroup(t, smallServer/2))
	waitFor(t, func() bool { return strings.Contains(p.log.String(), tooLittle) })
	if !strings.Contains(p.log.String(), "the memory limit is 64 MiB, and this deployment needs ") {
		t.Errorf("the warning is another one:\n%s", p.log.String())
	}
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// longLog is a deployment with a long log, whose server is stopped.
type longLog struct {
	*deployment
	out io.Writer
}

func newLongLog(t *testing.T) longLog {
	t.Helper()
	memoryGroup(t, smallServer)
	l := longLog{newEmbedded(t), transcript(t)}
	p := l.start()
	l.admit(p)
	p.kill()
	entries := 20_000
	if long() {
		entries = 1_000_000
	}
	l.seal(1, 1000)
	l.record(entries/10, writer.SignEntries) // all of them would take most of the time
	l.record(entries/10*9, writer.SignBatches)
	fmt.Fprintf(l.out, "%d entries, 1000 credentials, the limit is %d MiB\n\nMiB  command\n", entries, smallServer>>20)
	return l
}

// run runs a command in 128 MiB, and says how much it took.
func (l longLog) run(args ...string) {
	l.t.Helper()
	peak := l.runLimited(args...)
	words := []string{"latticekeep"}
	for _, a := range args { // paths and keys say nothing
		switch {
		case strings.HasPrefix(a, l.dir):
			a = filepath.Base(a)
		case strings.HasPrefix(a, "http:"):
			a = "URL"
		case a == l.recipient(), a == l.system:
			a = "…"
		}
		words = append(words, a)
	}
	fmt.Fprintf(l.out, "%3.0f  %s\n", mib(peak), strings.Join(words, " "))
}

// Commands that read or write the whole log of a stopped server keep within 128 MiB, however long it is.
func TestALongLogTakesNoMoreMemory(t *testing.T) {
	beside(t)
	l := newLongLog(t)
	data := []string{"--data-dir", l.path("data"), "--kms-key-file", l.path("keys/kms.key")}
	l.run(append([]string{"audit", "verify"}, data...)...)
	l.run(append([]string{"audit", "export", "--output", l.path("log.jsonl")}, data...)...)
	l.run("audit", "verify", "--file", l.path("log.jsonl"))
	must(t, os.Remove(l.path("log.jsonl")))
	l.run(append([]string{"backup", "--output", l.path("backup"), "--recipient", l.recipient()}, data...)...)
	l.run("backup", "verify", "--input", l.path("backup"), "--verify-with", l.path("identity.txt"))
	l.run("restore", "--input", l.path("backup"), "--identity-file", l.path("identity.txt"), "--data-dir", l.path("restored"))
}

// So do a server with such a log, and those who ask it for all of it.
func TestALongLogIsServedInNoMoreMemory(t *testing.T) {
	beside(t)
	l := newLongLog(t)
	g := memoryGroup(t, smallServer)
	p := l.startLimited(g)
	for _, args := range [][]string{
		{"audit", "verify", "--whole"}, {"audit", "export", "--whole", "--output", l.path("log.jsonl")}, {"backup", "--output", l.path("backup"), "--recipient", l.recipient()},
	} {
		l.run(append(args, "--url", p.url, "--api-key", l.system)...)
		fmt.Fprintf(l.out, "%3.0f  … its server\n", mib(g.Peak()))
		if n := g.Kills(t); n > 0 || p.dead() || t.Failed() {
			t.Fatalf("%d processes were killed: %s", n, p.log.Tail())
		}
	}
}
