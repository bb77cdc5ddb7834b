package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/test/machine"
)

// A pod with a volume: the folders of a server, which runs as the user and with the groups that a
// platform gives it.
type volumeOfAPod struct {
	t   *testing.T
	dir string
}

// serveAs starts the server and returns its ready line, or its last words and false.
func (v *volumeOfAPod) serveAs(uid, gid uint32, groups ...uint32) (ready app.Ready, said string, stop func()) {
	v.t.Helper()
	cmd := exec.CommandContext(v.t.Context(), "/proc/self/exe", "server", "--config", filepath.Join(v.dir, "config.yaml"))
	cmd.Args[0] = "latticekeep" // under this name the test binary is the program
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}, Pdeathsig: syscall.SIGKILL}
	cmd.Dir, cmd.Env = "/", []string{"HOME=/"}
	var log machine.Log
	cmd.Stderr = &log
	stdout, err := cmd.StdoutPipe()
	must(v.t, err)
	must(v.t, cmd.Start())
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // its line is what counts
	}
	if err := json.NewDecoder(stdout).Decode(&ready); err != nil {
		stop()
		return ready, log.String(), nil
	}
	v.t.Cleanup(stop)
	return ready, "", stop
}

// give does what kubelet does with a volume whose root has another group than fsGroup.
func (v *volumeOfAPod) give(fsGroup int) {
	v.t.Helper()
	for _, volume := range []string{"data", "kms"} {
		must(v.t, filepath.WalkDir(filepath.Join(v.dir, volume), func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			mode := fs.FileMode(0o660)
			if d.IsDir() {
				mode = 0o770 | fs.ModeSetgid
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			return errors.Join(os.Lchown(path, -1, fsGroup), os.Chmod(path, info.Mode()|mode))
		}))
	}
}

// OpenShift chooses the user of a pod, with group 0 and a group of its own for the volumes. Another
// namespace has another user and group, and the volume may be older than both.
func TestAnotherUserGoesOnWithTheVolumesOfTheFirst(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be processes of other users")
	}
	const (
		ours, theirs = 65532, 1000650000
		other        = 1000660000
	)
	dir, err := os.MkdirTemp("", "latticekeep-volume-") // all of its parents may be entered by anybody
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	v := &volumeOfAPod{t, dir}
	must(t, os.Chmod(dir, 0o755))
	for _, volume := range []string{"data", "kms", "run"} {
		must(t, os.Mkdir(filepath.Join(dir, volume), 0o700))
	}
	must(t, os.Chmod(filepath.Join(dir, "run"), 0o777)) // stands for the API server, which takes the system key
	machine.WriteFile(t, filepath.Join(dir, "config.yaml"), fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %[1]s/data
kms: {url: "file://%[1]s/kms/kms.key"}
systemKeyFile: %[1]s/run/system.key
registration: {closed: true}
`, dir))
	must(t, os.Chmod(filepath.Join(dir, "config.yaml"), 0o644))

	v.give(ours)
	first, said, stop := v.serveAs(ours, ours, ours)
	if stop == nil {
		t.Fatalf("the first user does not start:\n%s", said)
	}
	stop()

	// Nobody gave the volumes to the second: all of them, or what is in folders that anybody may enter, or the database alone.
	for _, open := range []func(){
		func() {},
		func() {
			must(t, errors.Join(os.Chmod(filepath.Join(dir, "data"), 0o777), os.Chmod(filepath.Join(dir, "kms"), 0o777)))
		},
		func() { must(t, os.Chown(filepath.Join(dir, "kms/kms.key"), theirs, theirs)) },
	} {
		open()
		_, said, stop = v.serveAs(theirs, 0, theirs)
		if stop != nil {
			t.Fatal("another user opens the volumes, whoever they belong to")
		}
		for _, want := range []string{" and group 65532, mode 0", "this process is user 1000650000 with group 0 and further groups [1000650000]", "fsGroup"} {
			if !strings.Contains(said, want) {
				t.Errorf("it does not say %q:\n%s", want, said)
			}
		}
	}

	for _, user := range []uint32{theirs, other} {
		v.give(int(user))
		again, said, stop := v.serveAs(user, 0, user)
		if stop == nil {
			t.Fatalf("user %d does not go on with the volumes:\n%s", user, said)
		}
		if again.Identity != first.Identity {
			t.Errorf("user %d has another deployment, %s", user, again.Identity)
		}
		stop()
	}
}
