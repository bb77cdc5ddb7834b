package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"
)

// logLines returns the lines of the server's log with a message.
func (s *site) logLines(message string) (lines []map[string]any) {
	s.t.Helper()
	for text := range strings.Lines(s.log.String()) {
		var line map[string]any
		if json.Unmarshal([]byte(text), &line) == nil && line["msg"] == message {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestTheLogSaysWhyTheServerEnded(t *testing.T) {
	ctx, ignore := signal.NotifyContext(t.Context(), syscall.SIGTERM) // as main does
	defer ignore()
	s := newSite(t, closed)
	_, stop := s.serveIn(ctx)

	const hangup = "ignoring SIGHUP: certificates, tokens and passwords are read again when their files change; restart to change the configuration"
	must(t, syscall.Kill(syscall.Getpid(), syscall.SIGHUP))
	for deadline := time.Now().Add(time.Minute); len(s.logLines(hangup)) == 0; time.Sleep(time.Millisecond) { // asks again
		if time.Now().After(deadline) {
			t.Fatal("no line about SIGHUP:", s.log.String())
		}
	}
	if ended := s.logLines("ended"); len(ended) != 0 {
		t.Error("SIGHUP ended it:", ended)
	}

	must(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
	<-ctx.Done()
	stop()
	text := strings.TrimSpace(s.log.String())
	var last map[string]any
	must(t, json.Unmarshal([]byte(text[strings.LastIndex(text, "\n")+1:]), &last))
	if last["msg"] != "ended" || last["level"] != "INFO" || last["reason"] != "terminated signal received" {
		t.Error("the last line:", last)
	}
}

func TestTheLogSaysWhichErrorEndedTheServer(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	s := newSite(t, closed)
	cmd := Command()
	cmd.SetArgs([]string{"server", "--config", s.file, "--listen", taken.Addr().String()})
	cmd.SetOut(io.Discard)
	cmd.SetErr(&s.log)
	err = cmd.ExecuteContext(t.Context())
	if err == nil {
		t.Fatal("it serves on an address that another process has")
	}
	if lines := s.logLines("ended"); len(lines) != 1 || lines[0]["level"] != "ERROR" || lines[0]["error"] != err.Error() {
		t.Errorf("%v\nwant one with %v", lines, err)
	}
}

// A failed handshake has no request, and its line names the client only where that is allowed.
func TestALineAboutAConnectionNamesItsClientIfItMay(t *testing.T) {
	for _, named := range []bool{true, false} {
		s := newSite(t, closed+fmt.Sprintf("log: {clientAddress: %v}\n", named))
		line, stop := s.serve()
		c, err := net.Dial("tcp", strings.TrimPrefix(line.BaseURL, "https://"))
		must(t, err)
		_, err = io.WriteString(c, "neither TLS nor HTTP\n")
		must(t, err)
		_, _ = io.Copy(io.Discard, c) // until the server closes it
		port := c.LocalAddr().(*net.TCPAddr).Port
		must(t, c.Close())
		stop()
		lines := s.logLines("a connection failed")
		if len(lines) != 1 {
			t.Fatal(s.log.String())
		}
		text, _ := lines[0]["error"].(string)
		if !strings.HasPrefix(text, "http: TLS handshake error: tls: ") || strings.Contains(text, fmt.Sprint(port)) {
			t.Errorf("%q", text)
		}
		if got := lines[0]["source_ip"]; named && got != "127.0.0.1" || !named && got != nil {
			t.Errorf("clientAddress %v: %v", named, got)
		}
	}
}
