package transfer

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A stream that ends before the server's signature is no backup, however long it is.
func TestABackupWithoutItsSignatureGetsNoName(t *testing.T) {
	dir := t.TempDir()
	_, err := writeBackup(t.Context(), filepath.Join(dir, "all.backup"), func(context.Context) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(bytes.Repeat([]byte("encrypted"), 100_000))), nil
	}, checkOptions{})
	if err == nil || !strings.Contains(err.Error(), "ended before its signature") {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
}
