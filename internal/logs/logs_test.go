package logs_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/logs"
)

// newLog returns a limited log, a function that returns and forgets its lines, and the end of the
// limit.
func newLog() (logger *slog.Logger, lines func() string, end func()) {
	var out bytes.Buffer
	h, end := logs.Limit(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}}))
	return slog.New(h), func() string {
		defer out.Reset()
		return strings.TrimSpace(out.String())
	}, end
}

func wants(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("the log says\n%s\nwant\n%s", got, want)
	}
}

func TestARepeatedErrorIsWrittenOnceASecondWithHowManyWereLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger, lines, end := newLog()
		defer end()
		full := errors.New("disk full")
		for i := range 100 {
			logger.Error("committing failed", "error", full, "n", i)
		}
		wants(t, lines(), `msg="committing failed" error="disk full" n=0`)
		time.Sleep(time.Second)
		synctest.Wait()
		wants(t, lines(), `msg="committing failed" error="disk full" n=99 left_out=98`)
		logger.Error("committing failed", "error", full, "n", 100)
		wants(t, lines(), "")
		time.Sleep(time.Second)
		synctest.Wait()
		wants(t, lines(), `msg="committing failed" error="disk full" n=100`)
		time.Sleep(time.Second) // without one: it is forgotten
		synctest.Wait()
		logger.Error("committing failed", "error", full, "n", 101)
		wants(t, lines(), `msg="committing failed" error="disk full" n=101`)
	})
}

func TestAChangeIsWrittenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger, lines, end := newLog()
		defer end()
		for range 3 {
			logger.Error("committing failed", "error", "disk full")
			logger.Error("committing failed", "error", "read-only")
			logger.Warn("a call of the KMS failed", "err", "disk full") // as libraries do
		}
		wants(t, lines(), "msg=\"committing failed\" error=\"disk full\"\nmsg=\"committing failed\" error=read-only\nmsg=\"a call of the KMS failed\" error=\"disk full\"")
	})
}

func TestAnErrorWhoseTextChangesEachTimeIsLimitedToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger, lines, end := newLog()
		defer end()
		for port := range 1000 {
			logger.Error("request", "error", fmt.Sprint("connection reset by port ", port))
		}
		if got := strings.Split(lines(), "\n"); len(got) != 5 || !strings.Contains(got[4], "port 4") {
			t.Error(got)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		wants(t, lines(), `msg=request error="connection reset by port 999" left_out=994`)
	})
}

func TestOnlyErrorsAreLimited(t *testing.T) {
	logger, lines, end := newLog()
	defer end()
	for range 2 {
		logger.Info("request", "error", "canceled")
		logger.Warn("a clock differs", "by", 3)
	}
	wants(t, lines(), "msg=request error=canceled\nmsg=\"a clock differs\" by=3\nmsg=request error=canceled\nmsg=\"a clock differs\" by=3")
}

func TestTheEndWritesWhatWasHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger, lines, end := newLog()
		for range 3 {
			logger.With("part", "store").WithGroup("g").Error("failed", "error", "e")
		}
		wants(t, lines(), `msg=failed part=store g.error=e`)
		end()
		wants(t, lines(), `msg=failed part=store g.error=e g.left_out=1`)
		logger.Error("failed", "error", "e")
		wants(t, lines(), `msg=failed error=e`)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		wants(t, lines(), "")
	})
}
