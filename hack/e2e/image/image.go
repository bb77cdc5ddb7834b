// Package image writes images without a registry.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
)

// User is the user of the Dockerfile, as which the program of an image runs.
const User = 65532

// Write writes an image with one static program at its root, which runs as the user of the
// Dockerfile. The format is that of `docker save`, which containerd, kind and k3d read as well.
func Write(path, image, name, program string, cmd ...string) (err error) {
	binary, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("reading the program of %s: %w", image, err)
	}
	var layer bytes.Buffer
	if err := writeTar(&layer, entry{name, 0o755, binary}); err != nil {
		return fmt.Errorf("writing the layer of %s: %w", image, err)
	}
	digest := sha256.Sum256(layer.Bytes())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"User": fmt.Sprintf("%d:%[1]d", User), "Entrypoint": []string{"/" + name}, "Cmd": cmd},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(digest[:])}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]any{map[string]any{"Config": "config.json", "RepoTags": []string{image}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("creating an image: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return writeTar(f, entry{"config.json", 0o644, config}, entry{"layer.tar", 0o644, layer.Bytes()}, entry{"manifest.json", 0o644, manifest})
}

// An entry is a file of an archive.
type entry struct {
	name string
	mode int64
	data []byte
}

func writeTar(w io.Writer, entries ...entry) error {
	archive := tar.NewWriter(w)
	for _, e := range entries {
		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: e.name, Mode: e.mode, Size: int64(len(e.data))}); err != nil {
			return err
		}
		if _, err := archive.Write(e.data); err != nil {
			return err
		}
	}
	return archive.Close()
}
