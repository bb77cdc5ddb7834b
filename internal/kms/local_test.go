package kms

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func create(t *testing.T) (*Key, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kms.key")
	if err := CreateLocal(path); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLocal(path)
	if err != nil {
		t.Fatal(err)
	}
	return l, path
}

func TestWrappedKeysOpenOnlyUnderTheirKeyAndContext(t *testing.T) {
	l, _ := create(t)
	other, _ := create(t)
	key := bytes.Repeat([]byte{7}, 32)
	wrapped, err := l.Wrap(t.Context(), "tenant a", key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := l.Unwrap(t.Context(), "tenant a", wrapped); err != nil || !bytes.Equal(got, key) {
		t.Fatal(got, err)
	}
	if _, err := l.Unwrap(t.Context(), "tenant b", wrapped); err == nil {
		t.Error("opened for another context")
	}
	if _, err := other.Unwrap(t.Context(), "tenant a", wrapped); err == nil {
		t.Error("opened by another key")
	}
	if l.ID() == other.ID() {
		t.Error("two keys have one id")
	}
	for i := range wrapped {
		bad := bytes.Clone(wrapped)
		bad[i] ^= 1
		if _, err := l.Unwrap(t.Context(), "tenant a", bad); err == nil {
			t.Errorf("opened with byte %d flipped", i)
		}
	}
	for n := range wrapped {
		if _, err := l.Unwrap(t.Context(), "tenant a", wrapped[:n]); err == nil {
			t.Errorf("opened when cut to %d bytes", n)
		}
	}
}

func TestTheKeyFileIsPrivateAndNeverReplaced(t *testing.T) {
	l, path := create(t)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatal(info.Mode(), err)
	}
	if err := CreateLocal(path); err == nil {
		t.Error("an existing key was replaced")
	}
	again, err := OpenLocal(path)
	if err != nil || again.ID() != l.ID() {
		t.Error("the key changed", err)
	}
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	if len(left) != 1 {
		t.Errorf("files left behind: %v", left)
	}
}

func TestAnUnusableKeyFileIsRefusedWithARemedy(t *testing.T) {
	_, path := create(t)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		content []byte
		mode    os.FileMode
		says    string
	}{
		"readable by others":  {good, 0o604, "chmod 600"},
		"writable by others":  {good, 0o662, "chmod 600"},
		"traversed by others": {good, 0o601, "chmod 600"},
		"empty":               {nil, 0o600, "restore"},
		"truncated":           {good[:len(good)-8], 0o600, "restore"},
		"another format":      {[]byte("-----BEGIN PRIVATE KEY-----\n"), 0o600, "restore"},
		"trailing bytes":      {append(bytes.Clone(good), "x\n"...), 0o600, "restore"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := filepath.Join(t.TempDir(), "k")
			if err := errors.Join(os.WriteFile(p, c.content, 0o600), os.Chmod(p, c.mode)); err != nil {
				t.Fatal(err)
			}
			_, err := OpenLocal(p)
			if fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), c.says) {
				t.Fatalf("got %v", err)
			}
			if bytes.Contains([]byte(err.Error()), good[len(filePrefix):len(filePrefix)+20]) {
				t.Fatal("the error quotes the key")
			}
		})
	}
	for _, mode := range []os.FileMode{0o400, 0o440, 0o640, 0o660} { // modes of a Secret and of a file in a volume, as a pod sees them
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenLocal(path); err != nil {
			t.Errorf("a file of mode %04o: %v", mode, err)
		}
	}
	if _, err := OpenLocal(filepath.Join(t.TempDir(), "none")); fault.Of(err) != fault.Invalid {
		t.Fatal(err)
	}
	if _, err := OpenLocal(t.TempDir()); fault.Of(err) != fault.Invalid {
		t.Fatal("a directory was read as a key")
	}
}

func FuzzParseFile(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		if key, err := parseFile(text); err == nil && formatFile(key) != string(text) {
			t.Fatal("parse and format differ")
		}
	})
}
