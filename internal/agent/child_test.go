package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/agent"
)

// script runs a shell that writes to a file, which the script knows as $OUT.
type script struct {
	out     string
	changed chan struct{}
	stop    context.CancelFunc
	ended   chan int
}

func runScript(t *testing.T, text string, r agent.Reaction) *script {
	s := &script{out: filepath.Join(t.TempDir(), "out"), changed: make(chan struct{}, 1), ended: make(chan int, 1)}
	t.Setenv("OUT", s.out)
	ctx, stop := context.WithCancel(t.Context())
	s.stop = stop
	go func() {
		status, err := agent.Run(ctx, agent.Command{Path: "/bin/sh", Args: []string{"sh", "-c", text}, Env: os.Environ()}, s.changed, r)
		if err != nil {
			t.Error(err)
		}
		s.ended <- status
	}()
	t.Cleanup(stop)
	return s
}

// until waits until the file has a text.
func (s *script) until(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		b, _ := os.ReadFile(s.out)
		if strings.Contains(string(b), text) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%q has no %q", b, text)
		}
	}
}

func TestACommandEndsAsItIs(t *testing.T) {
	for text, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -KILL $$": 128 + 9} {
		if got := <-runScript(t, text, agent.Reaction{}).ended; got != want {
			t.Errorf("%s: %d", text, got)
		}
	}
}

func TestACommandGetsSignals(t *testing.T) {
	const text = `trap 'echo hup >>$OUT' HUP; trap 'echo term >>$OUT; exit 3' TERM; echo ready >>$OUT; while :; do sleep 0.05; done`
	s := runScript(t, text, agent.Reaction{Signal: syscall.SIGHUP})
	s.until(t, "ready")
	s.changed <- struct{}{}
	s.until(t, "hup")
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil { // to the agent itself
		t.Fatal(err)
	}
	s.until(t, "hup\nhup")
	s.stop()
	s.until(t, "term")
	if got := <-s.ended; got != 3 {
		t.Error(got)
	}
}

func TestACommandIsStartedAnew(t *testing.T) {
	s := runScript(t, `trap 'echo ended >>$OUT; exit 0' TERM; echo begun >>$OUT; while :; do sleep 0.05; done`, agent.Reaction{Restart: true})
	s.until(t, "begun")
	s.changed <- struct{}{}
	s.until(t, "begun\nended\nbegun")
	s.stop()
	if got := <-s.ended; got != 0 {
		t.Error(got)
	}
}

// Without a reaction the command is left alone.
func TestACommandIsLeftAlone(t *testing.T) {
	s := runScript(t, `trap 'echo signal >>$OUT' HUP USR1; echo begun >>$OUT; sleep 0.5; echo end >>$OUT`, agent.Reaction{})
	s.until(t, "begun")
	s.changed <- struct{}{}
	if got := <-s.ended; got != 0 {
		t.Error(got)
	}
	b, err := os.ReadFile(s.out)
	must(t, err)
	if string(b) != "begun\nend\n" {
		t.Errorf("%q", b)
	}
}
