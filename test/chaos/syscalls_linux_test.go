package chaos

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// strace makes system calls fail, or kills the process during one. It counts the calls of each
// thread separately, so one point of a sweep is the n-th call of every thread that gets that far.
// It cannot simulate a power cut: written data stays in the page cache of the machine. The tests of
// the store cover power cuts.

// class is a kind of system call and the ways in which it fails.
type class struct {
	name   string
	faults []string
	ours   bool // only on files of the deployment
}

// syscalls are the calls with which the program changes or reads its files. Where other calls of
// the kind are frequent, only those on the deployment's files fail.
var syscalls = []class{
	{"mkdirat", []string{"EIO", "ENOSPC", "EROFS", kill}, false},
	{"openat", []string{"EIO", "EROFS", "EMFILE", kill}, false},
	{"write", []string{"EIO", "ENOSPC"}, true}, // Go's runtime gives up when it cannot wake itself with a write
	{"write", []string{kill}, false},
	{"pwrite64", []string{"EIO", "ENOSPC", "EROFS", kill}, false},
	{"fsync", []string{"EIO", "ENOSPC", kill}, false},
	{"fdatasync", []string{"EIO", "ENOSPC", kill}, false},
	{"ftruncate", []string{"EIO", "ENOSPC", "EROFS", kill}, false},
	{"renameat", []string{"EIO", "ENOSPC", "EROFS", kill}, false},
	{"linkat", []string{"EIO", "ENOSPC", "EROFS", kill}, false},
	{"unlinkat", []string{"EIO", "EROFS", kill}, false},
	{"flock", []string{"EIO", "ENOLCK", kill}, false},
	{"mmap", []string{"ENOMEM", kill}, true},
	{"pread64", []string{"EIO", kill}, false},
	{"read", []string{"EIO", kill}, true},
	{"fstat", []string{"EIO", kill}, true},
	{"newfstatat", []string{"EIO", kill}, true},
	{"close", []string{"EIO", kill}, true},
}

const (
	kill       = "KILL"
	mostPoints = 60 // for one kind of call and fault; later points show nothing new
)

// scenario is the work of the program while one of its system calls fails.
type scenario struct {
	name string
	from *deployment // deployment whose files are copied first; nil: none
	then []call
}

// traced returns the command below which a server meets a fault at the n-th call.
func (d *deployment) traced(c class, fault string, n int) []string {
	argv := []string{"strace", "-f", "-q", "-o", d.path("trace"), "-e", "trace=" + c.name, "-e"}
	if fault == kill {
		argv = append(argv, fmt.Sprintf("inject=%s:signal=KILL:when=%d", c.name, n))
	} else { // the filter is faster, but strace 6.1 loses signals with it
		argv = append(argv, fmt.Sprintf("inject=%s:error=%s:when=%d", c.name, fault, n), "--seccomp-bpf")
	}
	if c.ours {
		for _, name := range []string{"data", "data/latticekeep.db", "data/latticekeep.db.init", "data/reports", "keys", "keys/kms.key", "system.key"} {
			argv = append(argv, "-P", d.path(name))
		}
	}
	return argv
}

// injected returns the number of faults that have happened.
func (d *deployment) injected() int {
	trace, _ := os.ReadFile(d.path("trace"))                  // no file: no fault
	if strings.Contains(string(trace), "killed by SIGKILL") { // strace prints this once per thread of the one process
		return 1
	}
	return strings.Count(string(trace), "(INJECTED)")
}

// needsStrace skips a test where strace is missing or may trace nothing.
func needsStrace(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("strace", "-q", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("strace (package strace) cannot be used here: %v %s", err, out)
	}
}

// point is the result of one fault.
type point struct {
	hits    int
	refused string        // reason why the server did not start
	failed  int           // calls without an outcome
	slow    time.Duration // slowest answer
	restart time.Duration // time until the next server was ready
	hand    string        // manual step that was needed first
}

// deployment returns a deployment with a copy of another one's files, or a new one.
func (s scenario) deployment(t *testing.T) *deployment {
	t.Helper()
	d := newEmbedded(t)
	if s.from == nil {
		return d
	}
	for _, name := range []string{"keys", "data"} {
		must(t, os.RemoveAll(d.path(name)))
		must(t, os.CopyFS(d.path(name), os.DirFS(s.from.path(name))))
	}
	must(t, os.Chmod(d.path("keys/kms.key"), 0o600))
	d.key, d.system = s.from.key, s.from.system
	return d
}

// run causes one fault, starts the server again without it, and checks everything.
func (s scenario) run(t *testing.T, of class, fault string, n int) (o point) {
	t.Helper()
	name := fmt.Sprintf("%s: %s %s %d", s.name, of.name, fault, n)
	d := s.deployment(t)
	defer os.RemoveAll(d.dir)
	h := newHistory()
	var credential string
	var healthy bool
	ask := func(p *process, c call) answer {
		if c.id == "" {
			c.id = credential
		}
		for try := 0; ; try++ {
			began := time.Now()
			a := h.record(0, c, d.over(func() *process { return p }, func(err error) { t.Errorf("%s: %v", name, err) }))
			if o.slow = max(o.slow, time.Since(began)); c.action == seal && len(a.seen) > 0 {
				credential = a.seen[0].id
			}
			if !a.unknown && !a.unasked {
				return a
			}
			if !healthy { // otherwise the machine is busy
				o.failed++
			}
			if fault == kill && p.dead() {
				return a
			}
			if try == 100 {
				t.Fatalf("%s: %s does not get better: %s", name, c.action, p.log.Tail())
			}
			p.recover()
		}
	}
	p, err := d.launch(d.traced(of, fault, n)...)
	switch {
	case err != nil && fault != kill && !strings.Contains(err.Error(), "latticekeep: "):
		t.Errorf("%s: no clear refusal: %v", name, err)
	case err != nil:
		o.refused = err.Error()
	case s.from == nil:
		d.admitOnce(p)
	}
	if err == nil && d.key != "" {
		for _, c := range s.then {
			ask(p, c)
		}
	}
	o.hits = d.injected()
	p.kill()

	began := time.Now()
	p, err = d.launch()
	if err != nil && strings.Contains(err.Error(), "Move it away and start again") {
		o.hand = "systemKeyFile moved away"
		must(t, os.Remove(d.path("system.key")))
		began = time.Now()
		p, err = d.launch()
	}
	if err != nil {
		t.Fatalf("%s: it does not start again: %v\nbefore: %s", name, err, o.refused)
	}
	o.restart = time.Since(began)
	if d.key == "" {
		d.admitOnce(p)
	}
	healthy = true
	if credential == "" {
		ask(p, call{action: seal, name: "n", value: "after"})
	}
	ask(p, call{action: unsealNewest, name: "n"})
	for _, s := range ask(p, call{action: list, name: "n"}).seen {
		ask(p, call{action: unseal, name: "n", id: s.id})
	}
	p.kill()
	if ok, _, err := h.linearisable(); err != nil || !ok {
		t.Errorf("%s: the history contradicts itself: %v %v", name, h.resolved(), err)
	}
	if _, err := d.verify(); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	if left := d.leftovers(); len(left) > 0 {
		t.Errorf("%s: it left %v", name, left)
	}
	return o
}

// admitOnce is admit for a server that may fail meanwhile.
func (d *deployment) admitOnce(p *process) {
	for try := 0; !p.dead(); try++ {
		err := d.tryAdmit(p)
		if err == nil {
			return
		}
		if try == 100 {
			d.t.Fatalf("the first system key is of no use: %v\n%s", err, p.log.Tail())
		}
		p.recover()
	}
}

// recover waits until the server says that it is ready, or has ended. A disk may stand still for longer
// than any number of requests takes that are refused at once.
func (p *process) recover() {
	for range 6000 {
		time.Sleep(10 * time.Millisecond)
		a, err := client.Get(p.url + "/readyz")
		if err == nil {
			a.Body.Close()
		}
		if p.dead() || err == nil && a.StatusCode == http.StatusOK {
			return
		}
	}
}

// leftovers returns files that no part of the program will use again.
func (d *deployment) leftovers() (left []string) {
	_ = filepath.WalkDir(d.path("data"), func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() && !slices.Contains([]string{"latticekeep.db", "latticekeep.db.wal"}, e.Name()) {
			left = append(left, path)
		}
		return err
	})
	return left
}

// sum is a line of the report.
type sum struct {
	points, hits, refused, failed, hands int
	slow, restart                        time.Duration
}

func (s *sum) add(o point) {
	s.points++
	s.hits += o.hits
	s.failed += o.failed
	if o.refused != "" {
		s.refused++
	}
	if o.hand != "" {
		s.hands++
	}
	s.slow, s.restart = max(s.slow, o.slow), max(s.restart, o.restart)
}

// byHand describes how many of the refused starts needed a manual step.
func (s *sum) byHand() string {
	if s.hands == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d then needed a hand)", s.hands)
}

// scenarios returns the first start, and a later start with the work after it.
func scenarios(t *testing.T) []scenario {
	t.Helper()
	d := newEmbedded(t)
	p := d.start()
	d.admit(p)
	p.must(d.key, "POST", "/api/v2/vault/seal", `{"name":"other","credential_type":"t","values":{"v":"1"}}`)
	p.kill()
	life := []call{
		{action: seal, name: "n", value: "first"}, {action: unseal, name: "n"}, {action: rotate, name: "n"},
		{action: replace, name: "n", value: "second"}, {action: seal, name: "n", value: "third"}, {action: remove, name: "n"},
		{action: seal, name: "n", value: "fourth"}, {action: unsealNewest, name: "n"}, {action: list, name: "n"},
	}
	return []scenario{{"The first start", nil, life[:2]}, {"A start and changes", d, life}}
}

// Tests a few points of the sweep, chosen at random.
func TestAFailingSystemCallLosesNothing(t *testing.T) {
	beside(t)
	needsStrace(t)
	all := scenarios(t)
	for _, c := range syscalls {
		if !slices.Contains([]string{"openat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate"}, c.name) {
			continue
		}
		s, fault, n := all[rand.IntN(len(all))], c.faults[rand.IntN(len(c.faults))], 1+rand.IntN(8)
		t.Logf("%s, %s %s %d: %+v", s.name, c.name, fault, n, s.run(t, c, fault, n))
	}
}

// Tests the whole sweep, which produces the table in docs/chaos.md. Each call of each kind fails
// once in every way, until a run no longer makes such a call.
func TestEverySystemCallMayFail(t *testing.T) {
	needsStrace(t)
	if !long() {
		t.Skip("takes an hour: run make chaos-syscalls")
	}
	var out io.Writer = os.Stderr
	if path := os.Getenv("CHAOS_TRANSCRIPT"); path != "" {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		must(t, err)
		defer func() { must(t, f.Close()) }()
		out = io.MultiWriter(f, os.Stderr)
	}
	only := os.Getenv("CHAOS_SYSCALL")
	var total sum
	for _, s := range scenarios(t) {
		fmt.Fprintf(out, "\n## %s\n\n| system call | fault | points | faults | starts refused | calls without an outcome | slowest answer | longest restart |\n|---|---|---|---|---|---|---|---|\n", s.name)
		for _, each := range syscalls {
			if only != "" && only != each.name {
				continue
			}
			for _, fault := range each.faults {
				var all sum
				for n := 1; n <= mostPoints; n++ {
					o := s.run(t, each, fault, n)
					if o.hits == 0 {
						break
					}
					all.add(o)
					total.add(o)
				}
				if all.points == 0 {
					continue
				}
				fmt.Fprintf(out, "| %s | %s | %d | %d | %d%s | %d | %s | %s |\n", each.name, fault, all.points, all.hits, all.refused,
					all.byHand(), all.failed,
					all.slow.Round(time.Millisecond), all.restart.Round(time.Millisecond))
			}
		}
	}
	fmt.Fprintf(out, "\nAll together: %d points, %d faults; slowest answer %s, longest restart %s.\n", total.points, total.hits,
		total.slow.Round(time.Millisecond), total.restart.Round(time.Millisecond))
}
