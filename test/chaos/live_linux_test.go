package chaos

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/kmstest"
)

// outage is a temporary fault while one server is under load.
type outage struct {
	t       *testing.T
	d       *deployment
	p       *process
	clients *clients
	out     io.Writer
}

func (o *outage) say(format string, args ...any) { fmt.Fprintf(o.out, format+"\n", args...) }

// newOutage starts a server and its load.
func newOutage(t *testing.T, d *deployment) *outage {
	t.Helper()
	o := &outage{t: t, d: d, p: d.start(), out: transcript(t)}
	d.admit(o.p)
	o.clients = d.clients(8, func() *process { return o.p })
	o.clients.start(1 << 20)
	o.goesOn()
	return o
}

// goesOn waits for more answers and returns the time until then.
func (o *outage) goesOn() time.Duration {
	o.t.Helper()
	began, before := time.Now(), o.clients.acknowledged.Load()
	waitFor(o.t, func() bool { return o.clients.acknowledged.Load() > before+20 })
	return time.Since(began)
}

// refusal is the result of asking for plaintext during an outage.
type refusal struct {
	first, slowest time.Duration // time until the first 503; time of the slowest answer
	served, denied int           // answers with 200 and 503
}

func (r refusal) String() string {
	return fmt.Sprintf("first 503 after %s, slowest answer %s, %d answers with plaintext and %d with 503",
		r.first.Round(time.Millisecond), r.slowest.Round(time.Millisecond), r.served, r.denied)
}

// refuses asks for plaintext for the given time, or longer until it is refused. There may be
// plaintext between two refusals, because some commits fit on a full disk.
func (o *outage) refuses(id string, during time.Duration) (r refusal) {
	o.t.Helper()
	began := time.Now()
	for time.Since(began) < during || r.denied == 0 {
		asked := time.Now()
		got, err := o.p.ask(o.d.key, "GET", "/api/v2/vault/"+id, "", "")
		r.slowest = max(r.slowest, time.Since(asked))
		switch {
		case err != nil:
			o.t.Fatalf("no answer: %v\n%s", err, o.p.log.Tail())
		case got.status == http.StatusOK:
			r.served++
			o.d.show(got.request) // accounted looks for its entry
		case got.status != http.StatusServiceUnavailable:
			o.t.Fatalf("status %d: %v", got.status, got.made)
		default:
			if r.denied++; r.denied == 1 {
				r.first = time.Since(began)
			}
		}
		if time.Since(began) > patience {
			o.t.Fatal("it still answers with plaintext")
		}
		time.Sleep(20 * time.Millisecond)
	}
	return r
}

// ready returns the status of /readyz.
func (o *outage) ready() int {
	a, err := client.Get(o.p.url + "/readyz")
	if err != nil {
		o.t.Fatal(err)
	}
	_ = a.Body.Close()
	return a.StatusCode
}

// settle ends the load and checks everything, without a restart and after one.
func (o *outage) settle() {
	o.t.Helper()
	ask := o.d.over(func() *process { return o.p }, func(err error) { o.t.Error(err) })
	o.clients.end(ask)
	o.d.accounted(o.p)
	o.p.kill()
	o.p = o.d.start()
	o.clients.end(ask)
	judged := o.clients.history.check(o.t)
	o.p.kill()
	entries, err := o.d.verify()
	must(o.t, err)
	o.say("%s; audit verify: %d entries hold, those of all plaintexts among them", judged, entries)
}

// read asks for plaintext, and returns the status of the answer.
func (o *outage) read(id string) int {
	o.t.Helper()
	got, err := o.p.ask(o.d.key, "GET", "/api/v2/vault/"+id, "", "")
	must(o.t, err)
	if got.status == http.StatusOK {
		o.d.show(got.request) // accounted looks for its entry
	}
	return got.status
}

// changesStop waits until changes are refused, and returns how long that took. A read must go on then.
func (o *outage) changesStop(id string) time.Duration {
	o.t.Helper()
	began := time.Now()
	waitFor(o.t, func() bool {
		got, err := o.p.ask(o.d.key, "POST", "/api/v2/vault/seal", `{"name":"late","credential_type":"t","values":{"v":"1"}}`, "")
		must(o.t, err)
		return got.status == http.StatusServiceUnavailable
	})
	took := time.Since(began)
	waitFor(o.t, func() bool { return o.read(id) == http.StatusOK }) // one may wait for too long beside the load
	return took
}

// The disk becomes full under load. It is a separate file system that is really full. Changes are
// refused at once, and reads when the reserve is used up.
func TestAFullDiskInTheMiddleOfLoad(t *testing.T) {
	beside(t)
	d := newEmbedded(t)
	must(t, os.Mkdir(d.path("data"), 0o700))
	if err := syscall.Mount("tmpfs", d.path("data"), "tmpfs", 0, "size=32m"); err != nil {
		t.Skipf("a file system cannot be mounted here, which takes root: %v", err)
	}
	t.Cleanup(func() { must(t, syscall.Unmount(d.path("data"), syscall.MNT_DETACH)) })
	o := newOutage(t, d)
	id := o.p.must(d.key, "POST", "/api/v2/vault/seal", `{"name":"kept","credential_type":"t","values":{"v":"1"}}`)["credential_id"].(string)
	for round := range 3 {
		f, err := os.Create(d.path("data/ballast"))
		must(t, err)
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		changes := o.changesStop(id)
		r := o.refuses(id, 2*time.Second)
		waitFor(t, func() bool { // The load comes to send seals alone, so these reads use up the reserve.
			o.read(id)
			return o.ready() == http.StatusServiceUnavailable
		})
		must(t, errors.Join(f.Close(), os.Remove(d.path("data/ballast"))))
		// The load may have filled what the ballast leaves, so the volume is made larger, too.
		must(t, syscall.Mount("tmpfs", d.path("data"), "tmpfs", syscall.MS_REMOUNT, fmt.Sprintf("size=%dm", 32*(round+2))))
		took := o.goesOn()
		o.say("full: changes end after %s; reads: %s; going on %s after there was space", changes.Round(time.Millisecond), r, took.Round(time.Millisecond))
		waitFor(t, func() bool { return o.ready() == http.StatusOK })
	}
	o.settle()
}

// Every change of the database file fails for a while under load, as on a read-only file system or
// a broken disk.
func TestADiskThatFailsInTheMiddleOfLoad(t *testing.T) {
	beside(t)
	needsStrace(t)
	for _, errno := range []string{"EROFS", "EIO", "ENOSPC"} {
		t.Run(errno, func(t *testing.T) {
			d := newEmbedded(t)
			o := newOutage(t, d)
			id := o.p.must(d.key, "POST", "/api/v2/vault/seal", `{"name":"kept","credential_type":"t","values":{"v":"1"}}`)["credential_id"].(string)
			calls := "pwrite64,fsync,fdatasync,ftruncate"
			if errno == "EROFS" {
				calls += ",openat"
			}
			trace := exec.Command("strace", "-f", "-q", "-o", d.path("trace"), "-p", fmt.Sprint(o.p.cmd.Process.Pid), "-P", d.path("data/latticekeep.db"),
				"-e", "trace="+calls, "-e", fmt.Sprintf("inject=%s:error=%s", calls, errno))
			must(t, trace.Start())
			r := o.refuses(id, 2*time.Second)
			if ready := o.ready(); ready != http.StatusServiceUnavailable {
				t.Errorf("/readyz is %d", ready)
			}
			must(t, trace.Process.Signal(os.Interrupt))
			_ = trace.Wait() // an interrupt ended it
			took := o.goesOn()
			o.say("%s, %d times: %s (strace's start is part of it); going on %s after it was over", errno, d.injected(), r, took.Round(time.Millisecond))
			waitFor(t, func() bool { return o.ready() == http.StatusOK })
			o.settle()
		})
	}
}

// The KMS is unreachable under load. The server serves cached keys until they expire, then nothing,
// and everything again once the KMS is back.
func TestAKMSOutageInTheMiddleOfLoad(t *testing.T) {
	cached := 2 * time.Second
	service, err := kmstest.NewVault()
	must(t, err)
	t.Cleanup(service.Close)
	for _, e := range service.Env() {
		name, value, _ := strings.Cut(e, "=")
		t.Setenv(name, value)
	}
	d := newDeployment(t)
	d.add("dataDir: %s\nkms: {url: %q, cacheTTL: %s}\n", d.path("data"), service.URL(), cached)
	d.where = []string{"--data-dir", d.path("data")}
	o := newOutage(t, d)
	id := o.p.must(d.key, "POST", "/api/v2/vault/seal", `{"name":"kept","credential_type":"t","values":{"v":"1"}}`)["credential_id"].(string)
	for name, away := range map[string]func(bool){
		"refuses":    service.SetFailing,
		"is silent":  func(on bool) { service.SetLatency(map[bool]time.Duration{true: time.Minute}[on]) },
		"is revoked": service.SetRevoked,
	} {
		before := service.Calls()
		away(true)
		gone := time.Now()
		served := o.goesOn() // answers from the cache
		r := o.refuses(id, 2*time.Second)
		outage := time.Since(gone)
		away(false)
		took := o.goesOn()
		o.say("the KMS %s for %s: 20 calls in %s at first, then %s; going on after %s; %d calls of the KMS",
			name, outage.Round(time.Millisecond), served.Round(time.Millisecond), r, took.Round(time.Millisecond), service.Calls()-before)
	}
	if peak := service.Peak(); peak > 2 {
		t.Errorf("%d calls of the KMS at the same time, for one tenant", peak)
	}
	o.settle()
}
