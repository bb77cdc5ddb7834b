package cli

import (
	"net/http"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/machine"
)

// With 256 open files, strangers take neither all of them nor the connection of a caller with a
// key.
func TestStrangersDoNotHoldAllConnections(t *testing.T) {
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\n")
	line := s.run(func(program string) *exec.Cmd {
		return exec.CommandContext(t.Context(), "/bin/sh", "-c", `ulimit -n 256 && exec "$@"`, "sh", program, "server", "--config", s.file)
	})
	caller := s.client()
	caller.Transport.(*http.Transport).DisableKeepAlives = false
	list := func() {
		t.Helper()
		if status, body := s.ask(caller, "GET", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), ""); status != http.StatusOK {
			t.Fatal(status, body)
		}
	}
	metric := func(name string) int {
		t.Helper()
		_, metrics := s.ask(s.client(), "GET", s.operations()+"/metrics", "", "")
		m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\d+)$`).FindStringSubmatch(metrics)
		if m == nil {
			t.Fatal("no metric ", name)
		}
		n, err := strconv.Atoi(m[1])
		must(t, err)
		return n
	}
	list()
	address := line.BaseURL[len("https://"):]
	const ended = `latticekeep_connections_closed_total{reason="address"}`
	for deadline := time.Now().Add(time.Minute); metric(ended) < 50; { // those that say nothing end by themselves after 10 s, too
		if time.Now().After(deadline) {
			t.Fatal("only so many were ended:", metric(ended))
		}
		for range 50 {
			machine.DialFrom(t, "127.0.0.2", address)
		}
	}
	// 144 are three quarters of three quarters of the files; from there on each ends another.
	if idle, kept := metric(`latticekeep_connections{state="idle"}`), metric(`latticekeep_connections{state="kept"}`); idle > 144 || kept != 1 {
		t.Errorf("%d strangers, and %d connections with a key", idle, kept)
	}
	list() // on the connection that it has
	if kept := metric(`latticekeep_connections{state="kept"}`); kept != 1 {
		t.Error("the caller had to connect again:", kept)
	}
	caller = s.client()
	list() // and on a new one
}
