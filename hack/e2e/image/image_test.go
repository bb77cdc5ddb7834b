package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestImageIsOneLayerOfOneProgramForAnUnprivilegedUser(t *testing.T) {
	dir := t.TempDir()
	program, archive := filepath.Join(dir, "built-program"), filepath.Join(dir, "image.tar")
	if err := os.WriteFile(program, []byte("machine code"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(archive, "localhost/product:e2e", "latticekeep", program, "version"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	image := files(t, data)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(image["manifest.json"].data, &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || len(manifest[0].Layers) != 1 || manifest[0].RepoTags[0] != "localhost/product:e2e" {
		t.Fatalf("the manifest is %+v", manifest)
	}
	layer := image[manifest[0].Layers[0]].data
	var config struct {
		Config struct {
			User            string
			Entrypoint, Cmd []string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(image[manifest[0].Config].data, &config); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(layer)
	if got := config.RootFS.DiffIDs; len(got) != 1 || got[0] != "sha256:"+hex.EncodeToString(digest[:]) {
		t.Errorf("the configuration names the layers %q, and the layer is %x", got, digest)
	}
	if c := config.Config; c.User != "65532:65532" || len(c.Entrypoint) != 1 || c.Entrypoint[0] != "/latticekeep" || len(c.Cmd) != 1 || c.Cmd[0] != "version" {
		t.Errorf("it runs %+v", c)
	}
	content := files(t, layer)
	if got := content["latticekeep"]; len(content) != 1 || got.mode != 0o755 || string(got.data) != "machine code" {
		t.Errorf("the layer has %v", content)
	}
}

func files(t *testing.T, archive []byte) map[string]entry {
	t.Helper()
	entries := make(map[string]entry)
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if err == io.EOF {
			return entries
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		entries[header.Name] = entry{header.Name, header.Mode, data}
	}
}
