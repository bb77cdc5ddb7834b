package app

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
)

func TestTheLogOfAProcessRepeatsNoErrorAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		logger, end := openLog(t.Context(), slog.New(slog.NewTextHandler(&out, nil)))
		for range 9 {
			logger.Error("committing failed", "error", "disk full")
		}
		end(errors.New("too much"))
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 3 || !strings.HasSuffix(lines[1], `left_out=7`) || !strings.HasSuffix(lines[2], `level=ERROR msg=ended reason="an error" error="too much"`) {
			t.Error(out.String())
		}
	})
}
