package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// RestartKubelet ends kubelet and starts it again, while the containers run on.
func (n *Node) RestartKubelet() error {
	if err := n.kill("kubelet"); err != nil {
		return err
	}
	return n.runKubelet()
}

// Restart has the effect of a restart of the machine on the containers and on what runs them: they are
// killed, and what they had in memory is gone. The control plane runs on, as on another machine. Call it
// after [Node.StartCSI].
func (n *Node) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := n.kill("kubelet", "csi-driver", "registrar", "containerd"); err != nil {
		return err
	}
	if err := n.killPods(ctx); err != nil {
		return err
	}
	if err := unmountBelow("/run/containerd/", "/run/netns/", "/var/lib/kubelet/pods/"); err != nil {
		return err
	}
	if err := os.RemoveAll("/run/containerd"); err != nil {
		return err
	}
	if err := n.startContainerd(ctx, nil); err != nil {
		return err
	}
	if err := n.runKubelet(); err != nil {
		return err
	}
	return n.runCSI(ctx)
}

// killPods kills the processes of pods and their shims, and returns when none is left.
func (n *Node) killPods(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		links, err := filepath.Glob("/proc/[0-9]*/exe")
		if err != nil {
			return err
		}
		var left int
		for _, link := range links {
			program, err := os.Readlink(link)
			if err != nil { // it has ended
				continue
			}
			cgroups, err := os.ReadFile(filepath.Join(filepath.Dir(link), "cgroup"))
			if err != nil || filepath.Base(program) != "containerd-shim-runc-v2" && !bytes.Contains(cgroups, []byte("/"+filepath.Base(n.Dir)+"/")) {
				continue
			}
			left++
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			if err != nil {
				return err
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("killing %s: %w", program, err)
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the end of the pods: %w", ctx.Err())
		}
	}
}

// unmountBelow unmounts what is mounted below folders.
func unmountBelow(folders ...string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var points []string
	for line := range strings.Lines(string(mounts)) {
		point := strings.Fields(line)[4] // proc_pid_mountinfo(5)
		if slices.ContainsFunc(folders, func(folder string) bool { return strings.HasPrefix(point, folder) }) {
			points = append(points, point)
		}
	}
	for _, point := range slices.Backward(points) {
		if err := syscall.Unmount(point, syscall.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", point, err)
		}
	}
	return nil
}
