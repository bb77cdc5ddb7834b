package postgres

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// TestAFullDiskIsSurvived puts the table on a small file system of its own.
func TestAFullDiskIsSurvived(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root mounts a small file system")
	}
	owner, err := user.Lookup("postgres")
	if err != nil {
		t.Skip("there is no user postgres to own a small file system")
	}
	dir, err := os.MkdirTemp("/tmp", "latticekeep-small-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	mount := func(options string) error {
		return exec.Command("mount", "-t", "tmpfs", "-o", options+",mode=700,uid="+owner.Uid+",gid="+owner.Gid, "tmpfs", dir).Run()
	}
	if err := mount("size=40m"); err != nil {
		t.Skipf("a small file system cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = exec.Command("umount", "--lazy", dir).Run() })
	server := pgtest.Start(t)
	if err := server.Exec(t.Context(), "CREATE TABLESPACE small LOCATION '"+dir+"'", "CREATE DATABASE small OWNER latticekeep TABLESPACE small"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/small"
	s := openAt(t, u.String(), Options{Hook: chain})
	n := 0
	put := func() error {
		return s.Update(t.Context(), func(tx store.Tx) error {
			tx.Enqueue(fmt.Sprint(n))
			return tx.Put(fmt.Appendf(nil, "%d", n), make([]byte, 4<<20))
		})
	}
	for n < 20 {
		if err = put(); err != nil {
			break
		}
		n++
	}
	if n == 0 || fault.Of(err) != fault.Unavailable {
		t.Fatalf("a full disk after %d rows: %v", n, err)
	}
	if err := put(); fault.Of(err) != fault.Unavailable {
		t.Errorf("again: %v", err)
	}
	if err := mount("remount,size=400m"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no recovery", func() bool { return put() == nil })
	if err := s.Ready(t.Context()); err != nil {
		t.Errorf("not ready: %v", err)
	}
	if got := answers(t, u.String(), "SELECT count(*) FROM latticekeep_kv WHERE key LIKE 'entry/%'::bytea"); got != fmt.Sprint(n+1) {
		t.Errorf("%s entries of %d", got, n+1)
	}
}
