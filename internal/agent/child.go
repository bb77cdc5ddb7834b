package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// stopTime is how long the command has to end before it is killed, when it is started anew.
const stopTime = 30 * time.Second

// Reaction is what happens to the command after a change of the files: it is started anew, it gets a signal, or,
// as the zero value says, nothing.
type Reaction struct {
	Restart bool
	Signal  syscall.Signal // 0: none
}

// forwarded are the signals that go to the command as they are. The end of ctx stands for the two that end a
// program.
var forwarded = []os.Signal{syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH}

// Command is a command with its arguments, the first of which is its name, and its environment.
type Command struct {
	Path string
	Args []string
	Env  []string
}

// Run runs a command as a child until it ends, and returns its exit status, or 128 and the number of the signal
// that ended it. The end of ctx ends the command with SIGTERM; how long it has is up to whoever ended ctx. Each
// value of changed is a change of the files.
func Run(ctx context.Context, c Command, changed <-chan struct{}, r Reaction) (status int, err error) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	for {
		again, status, err := runOnce(ctx, c, changed, signals, r)
		if err != nil || !again {
			return status, err
		}
	}
}

// runOnce runs the command once. again is set if it was ended to be started anew.
func runOnce(ctx context.Context, command Command, changed <-chan struct{}, signals <-chan os.Signal, r Reaction) (again bool, status int, err error) {
	c := &exec.Cmd{Path: command.Path, Args: command.Args, Env: command.Env}
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := c.Start(); err != nil {
		return false, 0, fmt.Errorf("starting the command: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	done, kill := ctx.Done(), (<-chan time.Time)(nil)
	for {
		select {
		case err := <-ended:
			status, err := statusOf(err)
			return again && ctx.Err() == nil, status, err
		case s := <-signals:
			_ = c.Process.Signal(s) // fails if it has just ended
		case <-done:
			done = nil
			_ = c.Process.Signal(syscall.SIGTERM)
		case <-kill:
			_ = c.Process.Kill()
		case <-changed:
			switch {
			case r.Restart && !again:
				again, kill = true, time.After(stopTime)
				_ = c.Process.Signal(syscall.SIGTERM)
			case r.Signal != 0:
				_ = c.Process.Signal(r.Signal)
			}
		}
	}
}

func statusOf(err error) (int, error) {
	exit := new(exec.ExitError)
	switch {
	case err == nil:
		return 0, nil
	case !errors.As(err, &exit):
		return 0, fmt.Errorf("waiting for the command: %w", err)
	}
	if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		return 128 + int(s.Signal()), nil
	}
	return exit.ExitCode(), nil
}
