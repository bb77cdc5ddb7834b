package command

import (
	"fmt"
	"io"
	"os"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// ReadFile reads a file of at most limit bytes, whose path is the user's. The caller zeroes it.
func ReadFile(path string, limit int64) (secret.Bytes, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err // the error names the path
	}
	defer f.Close()
	return ReadAll(f, path, limit)
}

// ReadAll reads at most limit bytes of what title names. The caller zeroes them.
func ReadAll(r io.Reader, title string, limit int64) (secret.Bytes, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		clear(text)
		return nil, fmt.Errorf("reading %s: %w", title, err)
	case int64(len(text)) > limit:
		clear(text)
		return nil, UsageError(fmt.Sprintf("%s is larger than %d KiB", title, limit>>10))
	}
	return text, nil
}
