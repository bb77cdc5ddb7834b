package chaos

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/pgtest"
)

// newReplicas returns deployments that share a PostgreSQL, a key and a folder of reports. Each
// reaches PostgreSQL over its own URL.
func newReplicas(t *testing.T, url string, n int, over func(string) string) []*deployment {
	t.Helper()
	var all []*deployment
	for range n {
		d := newDeployment(t)
		shared := d
		if len(all) > 0 {
			shared = all[0]
		}
		d.add("store: {url: %q}\nkms: {url: \"file://%s\"}\ncompliance: {reports: \"file://%s\"}\n",
			over(url), shared.path("keys/kms.key"), shared.path("reports"))
		d.where = []string{"--store", url}
		all = append(all, d)
	}
	must(t, os.Mkdir(all[0].path("reports"), 0o700))
	return all
}

// fleet is a set of replicas on one database.
type fleet struct {
	t        *testing.T
	replicas []*deployment
	servers  []atomic.Pointer[process]
	clients  *clients
	began    time.Time
	shown    int       // answers with plaintext whose entries were found
	out      io.Writer // receives the transcript
}

// directly returns the URL unchanged, for replicas without a link in between.
func directly(url string) string { return url }

// newFleet starts n replicas. It starts the first one alone because that one creates the
// deployment.
func newFleet(t *testing.T, url string, n int, over func(string) string) *fleet {
	t.Helper()
	f := &fleet{t: t, replicas: newReplicas(t, url, n, over), servers: make([]atomic.Pointer[process], n), began: time.Now(), out: transcript(t)}
	f.start(0)
	f.replicas[0].admit(f.servers[0].Load())
	for i := 1; i < n; i++ {
		f.replicas[i].key, f.replicas[i].system = f.replicas[0].key, f.replicas[0].system
		f.start(i)
	}
	return f
}

func (f *fleet) start(i int) { f.servers[i].Store(f.replicas[i].start()) }

// load starts three clients for each replica, which all share the same credentials.
func (f *fleet) load() {
	f.clients = &clients{history: newHistory()}
	for i := range 3 * len(f.replicas) {
		f.clients.asks = append(f.clients.asks, f.ask(i%len(f.replicas)))
	}
	f.clients.start(1 << 20)
}

// ask returns a function that sends calls to a replica.
func (f *fleet) ask(i int) func(call) answer {
	return f.replicas[i].over(f.servers[i].Load, func(err error) { f.t.Errorf("replica %d: %v", i, err) })
}

// say writes a line of the transcript.
func (f *fleet) say(format string, args ...any) {
	fmt.Fprintf(f.out, "%6.1fs  %s\n", time.Since(f.began).Seconds(), fmt.Sprintf(format, args...))
}

// served returns the number of calls that each replica has answered.
func (f *fleet) served() []int64 {
	served := make([]int64, len(f.replicas))
	for i := range f.clients.each {
		served[i%len(served)] += f.clients.each[i].Load()
	}
	return served
}

// goesOn waits until each of the replicas has answered more calls, and writes how long that took to
// the transcript.
func (f *fleet) goesOn(after string, replicas ...int) {
	f.t.Helper()
	before, began := f.served(), time.Now()
	for ; ; time.Sleep(5 * time.Millisecond) {
		now := f.served()
		if !slices.ContainsFunc(replicas, func(i int) bool { return now[i] < before[i]+5 }) {
			break
		}
		if time.Since(began) > patience {
			f.t.Fatalf("after %s replicas %v answer nothing for %s: %v, then %v\n%s", after, replicas, patience, before, now, f.servers[replicas[0]].Load().log.Tail())
		}
	}
	f.say("%s: replicas %v answer again after %s; answered so far: %v", after, replicas, time.Since(began).Round(time.Millisecond), f.served())
}

// judge ends the load, reads everything through each replica, and checks the history.
func (f *fleet) judge() {
	f.t.Helper()
	for i := range f.replicas {
		f.clients.end(f.ask(i))
	}
	f.say("%s", f.clients.history.check(f.t))
}

// account looks for the entries of all plaintexts so far, which are of one tenant.
func (f *fleet) account() {
	f.t.Helper()
	for i, d := range f.replicas {
		f.shown += d.accounted(f.servers[i].Load())
	}
}

// renew continues with another tenant. A list of thousands of credentials would take too long to be
// answered, and then could not be judged.
func (f *fleet) renew() {
	f.t.Helper()
	f.account()
	waitFor(f.t, func() bool { return f.replicas[0].tryAdmit(f.servers[0].Load()) == nil })
	for _, d := range f.replicas[1:] {
		d.key = f.replicas[0].key
	}
}

// settle stops the fleet and checks the whole log.
func (f *fleet) settle() {
	f.t.Helper()
	f.account()
	for i := range f.servers {
		f.servers[i].Load().kill()
	}
	entries, err := f.replicas[0].verify()
	must(f.t, err)
	f.say("audit verify: %d entries hold, and every one of %d plaintexts has its own", entries, f.shown)
}

// transcript returns the destination for the lines of a run: the test's log and the file of
// CHAOS_TRANSCRIPT.
func transcript(t *testing.T) io.Writer {
	t.Helper()
	path := os.Getenv("CHAOS_TRANSCRIPT")
	if path == "" {
		return t.Output()
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(t, err)
	fmt.Fprintf(f, "\n## %s\n\n```text\n", t.Name())
	t.Cleanup(func() {
		_, err := fmt.Fprintln(f, "```")
		must(t, errors.Join(err, f.Close()))
	})
	return io.MultiWriter(f, t.Output())
}

// Three replicas serve the same credentials while one is killed, one is frozen and PostgreSQL is
// restarted and killed.
func TestReplicasUnderFire(t *testing.T) {
	beside(t)
	frozen, pause := 4*time.Second, time.Second
	if long() {
		frozen, pause = 30*time.Second, 5*time.Second
	}
	database := pgtest.Start(t)
	f := newFleet(t, database.URL(), 3, directly)
	rate := f.newLimited(100)
	f.load()
	f.goesOn("the start", 0, 1, 2)

	f.servers[1].Load().kill()
	f.goesOn("SIGKILL of replica 1", 0, 2)
	time.Sleep(pause)
	f.start(1)
	f.goesOn("its start", 0, 1, 2)

	f.servers[2].Load().signal(syscall.SIGSTOP)
	f.goesOn("SIGSTOP of replica 2", 0, 1)
	time.Sleep(frozen)
	f.goesOn("more of that", 0, 1)
	f.servers[2].Load().signal(syscall.SIGCONT)
	f.goesOn("SIGCONT of replica 2", 0, 1, 2)

	must(t, database.Restart())
	f.goesOn("a restart of PostgreSQL", 0, 1, 2)
	time.Sleep(pause)

	must(t, database.Kill())
	time.Sleep(pause)
	must(t, database.Restart())
	f.goesOn("SIGKILL of PostgreSQL and its start", 0, 1, 2)
	f.say("%s", rate.check(t))
	f.judge()
	f.settle()
}

// underFire is how long the replicas are under any fire.
const underFire = 45 * time.Minute

// Faults of any kind, one after the other.
func TestReplicasUnderAnyFire(t *testing.T) {
	if !long() {
		t.Skip("takes most of an hour: run make chaos")
	}
	database := pgtest.Start(t)
	var links []*link
	f := newFleet(t, database.URL(), 3, func(address string) string {
		l, over := newLink(t, address)
		links = append(links, l)
		return over
	})
	rate := f.newLimited(200)
	for began := time.Now(); time.Since(began) < underFire; {
		f.load()
		for range 3 { // bounds the length of a history and so the time of its check
			i, during := rand.IntN(3), time.Duration(rand.IntN(8000))*time.Millisecond
			others := slices.DeleteFunc([]int{0, 1, 2}, func(j int) bool { return j == i })
			switch rand.IntN(6) {
			case 0:
				f.servers[i].Load().kill()
				f.goesOn(fmt.Sprintf("SIGKILL of replica %d", i), others...)
				f.start(i)
			case 1:
				f.servers[i].Load().signal(syscall.SIGSTOP)
				f.goesOn(fmt.Sprintf("SIGSTOP of replica %d for %s", i, during), others...)
				time.Sleep(during)
				f.servers[i].Load().signal(syscall.SIGCONT)
			case 2:
				must(t, database.Restart())
				f.say("PostgreSQL was restarted")
			case 3:
				must(t, database.Kill())
				f.say("PostgreSQL is killed for %s", during)
				time.Sleep(during)
				must(t, database.Restart())
			case 4:
				must(t, database.Freeze())
				f.say("PostgreSQL is frozen for %s", during)
				time.Sleep(during)
				must(t, database.Thaw())
			case 5:
				links[i].cut()
				f.goesOn(fmt.Sprintf("the loss of replica %d's network for %s", i, during), others...)
				time.Sleep(during)
				links[i].mend()
			}
			f.goesOn("its end", 0, 1, 2)
		}
		f.judge()
		f.renew()
	}
	f.say("%s", rate.check(t))
	f.settle()
}
