package chaos

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/pgtest"
)

// link is a network between a replica and the database. It can silently stop carrying data for a
// while.
type link struct {
	listener net.Listener
	server   string

	mu   sync.Mutex
	open chan struct{} // closed while the link carries data
}

// newLink returns a link to the server of a URL, and the URL that uses the link.
func newLink(t *testing.T, database string) (*link, string) {
	t.Helper()
	u, err := url.Parse(database)
	must(t, err)
	l := &link{server: u.Host, open: make(chan struct{})}
	close(l.open)
	l.listener, err = net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() {
		_ = l.listener.Close()
		l.mend() // releases waiting connections
	})
	go func() {
		for {
			near, err := l.listener.Accept()
			if err != nil {
				return
			}
			go l.carry(near)
		}
	}()
	u.Host = l.listener.Addr().String()
	return l, u.String()
}

func (l *link) carry(near net.Conn) {
	defer near.Close()
	<-l.opened()
	far, err := net.Dial("tcp", l.server)
	if err != nil {
		return
	}
	defer far.Close()
	go l.pass(far, near)
	l.pass(near, far)
}

// pass copies one direction until either end closes.
func (l *link) pass(to, from net.Conn) {
	defer to.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		<-l.opened()
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (l *link) opened() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// cut stops all data. mend delivers it later.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = make(chan struct{})
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.open:
	default:
		close(l.open)
	}
}

// First one replica loses the network to the database, then all do. Replicas without the database
// soon answer 503, the others continue, and all serve again when the network is back.
func TestTheNetworkDrops(t *testing.T) {
	beside(t)
	gone := 4 * time.Second
	if long() {
		gone = time.Minute
	}
	database := pgtest.Start(t)
	var links []*link
	f := newFleet(t, database.URL(), 3, func(address string) string {
		l, over := newLink(t, address)
		links = append(links, l)
		return over
	})
	f.load()
	f.goesOn("the start", 0, 1, 2)

	links[1].cut()
	f.goesOn("the loss of replica 1's network", 0, 2)
	f.refuses(1)
	time.Sleep(gone)
	f.goesOn("more of that", 0, 2)
	links[1].mend()
	f.goesOn("its return", 0, 1, 2)

	for _, l := range links {
		l.cut()
	}
	f.refuses(0)
	f.refuses(2)
	time.Sleep(gone)
	for _, l := range links {
		l.mend()
	}
	f.goesOn("the return of the network of all", 0, 1, 2)
	f.judge()
	f.settle()
}

// refuses waits until a replica answers a request with 503 within a second.
func (f *fleet) refuses(i int) {
	f.t.Helper()
	p, key := f.servers[i].Load(), f.replicas[i].key
	began := time.Now()
	var slowest time.Duration
	for {
		asked := time.Now()
		got, err := p.ask(key, "POST", "/api/v2/vault/seal", `{"name":"refused","credential_type":"t","values":{"v":"1"}}`, "")
		took := time.Since(asked)
		slowest = max(slowest, took)
		if err == nil && got.status == 503 && took < time.Second {
			break
		}
		if time.Since(began) > patience {
			f.t.Errorf("replica %d has no database, and answers %d %v %v after %s", i, got.status, got.made, err, took)
			break
		}
	}
	f.say("replica %d answers 503 within a second %s after it lost the database; the slowest answer took %s",
		i, time.Since(began).Round(time.Millisecond), slowest.Round(time.Millisecond))
}

// Two deployments want the same empty database. One gets it. The other reports, then and later,
// that the database belongs to another deployment.
func TestADatabaseBelongsToOneDeployment(t *testing.T) {
	beside(t)
	database := pgtest.Shared(t)
	one, other := newReplicas(t, database.URL(), 1, directly)[0], newReplicas(t, database.URL(), 1, directly)[0]
	all := []*deployment{one, other}
	processes, errs := make([]*process, 2), make([]error, 2)
	var starts sync.WaitGroup
	for i, d := range all {
		starts.Go(func() { processes[i], errs[i] = d.launch() })
	}
	starts.Wait()
	winner := slices.Index(errs, nil)
	if winner < 0 || errs[1-winner] == nil {
		t.Fatalf("of two deployments on one empty database exactly one has to start: %v", errs)
	}
	for range 2 {
		loser := all[1-winner]
		_, err := loser.launch()
		if err == nil || !strings.Contains(err.Error(), "latticekeep: ") {
			t.Fatalf("the other deployment starts, or says nothing: %v", err)
		}
		t.Logf("refused: %s", err)
	}
	all[winner].admit(processes[winner])
	processes[winner].must(all[winner].key, "POST", "/api/v2/vault/seal", `{"name":"mine","credential_type":"t","values":{"v":"1"}}`)
	processes[winner].kill()
	processes[winner] = all[winner].start()
	processes[winner].must(all[winner].key, "GET", "/api/v2/vault/by-name/mine", "")
	processes[winner].kill() // nothing may write while the log is verified
	_, err := all[winner].verify()
	must(t, err)
}

// Replicas that start together on an empty database create one deployment. A replica that was too
// late to deliver its system key says what to do.
func TestReplicasMayStartTogether(t *testing.T) {
	beside(t)
	all := newReplicas(t, pgtest.Shared(t).URL(), 3, directly)
	processes, errs := make([]*process, len(all)), make([]error, len(all))
	var starts sync.WaitGroup
	for i, d := range all {
		starts.Go(func() { processes[i], errs[i] = d.launch() })
	}
	starts.Wait()
	for i, d := range all {
		if errs[i] == nil {
			continue
		}
		t.Logf("replica %d: %v", i, errs[i])
		if !strings.Contains(errs[i].Error(), "another replica made the first system key at the same time") {
			t.Error("that is another reason")
		}
		_ = os.Remove(d.path("system.key")) // follows the server's advice
		processes[i] = d.start()
	}
	admitted := slices.IndexFunc(all, func(d *deployment) bool { _, err := os.Stat(d.path("system.key")); return err == nil })
	all[admitted].admit(processes[admitted])
	key := all[admitted].key
	for i, p := range processes {
		p.must(key, "POST", "/api/v2/vault/seal", fmt.Sprintf(`{"name":"of replica %d","credential_type":"t","values":{"v":"1"}}`, i))
	}
	for _, p := range processes {
		if n := len(p.must(key, "GET", "/api/v2/vault/list", "")["credentials"].([]any)); n != len(all) {
			t.Errorf("a replica lists %d credentials of %d", n, len(all))
		}
	}
	for _, p := range processes {
		p.kill()
	}
	_, err := all[0].verify()
	must(t, err)
}
