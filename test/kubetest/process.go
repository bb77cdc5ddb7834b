package kubetest

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// A Process is a child that does not outlive its parent: on Linux the kernel kills it when the
// parent ends in any way, including a test's timeout and SIGKILL. It leads a process group of its
// own, so an interrupt typed at a terminal reaches only the parent, which then stops its children
// in the right order.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed once the child has been reaped; err is final then
	err  error
}

// StartProcess starts cmd. Its output must be nil or files: with a pipe, Wait would depend on all
// other processes that hold the pipe.
func StartProcess(cmd *exec.Cmd) (*Process, error) {
	cmd.SysProcAttr = childAttr()
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel sends its signal when the thread that forked ends, which may be long before
		// the process does. So this goroutine keeps its thread until the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	return p, nil
}

// Pid returns the id of the process.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended and been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Stop asks the process to end, kills it if it has not ended within grace (at once when grace is
// zero), and returns when it is gone. It returns the error with which the process ended by itself.
// Having to kill the process after grace is an error, too.
func (p *Process) Stop(grace time.Duration) error {
	if grace > 0 {
		// An error means that the process is already gone, which the wait below notices.
		_ = p.cmd.Process.Signal(os.Interrupt)
		timeout := time.NewTimer(grace)
		defer timeout.Stop()
		select {
		case <-p.done:
			return p.err
		case <-timeout.C:
		}
	}
	_ = p.cmd.Process.Kill()
	<-p.done
	if grace > 0 {
		return fmt.Errorf("%s did not end within %s of an interrupt and was killed", p.cmd.Path, grace)
	}
	return nil
}
