package app

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/logs"
)

// openLog returns the log of a process, which repeats an error at most once a second. end writes its
// last line, with the reason: err, or else what ended ctx.
func openLog(ctx context.Context, unlimited *slog.Logger) (logger *slog.Logger, end func(err error)) {
	limited, endLimit := logs.Limit(unlimited.Handler())
	return slog.New(limited), func(err error) {
		endLimit()
		if err != nil {
			unlimited.Error("ended", "reason", "an error", "error", err)
			return
		}
		unlimited.Info("ended", "reason", context.Cause(ctx))
	}
}

// ignoreHangups has SIGHUP leave a line in the log, until stop. Many programs read their
// configuration again then, and by default a Go program dies without finishing its requests.
func ignoreHangups(logger *slog.Logger) (stop func()) {
	hangups, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		defer close(done)
		for range hangups {
			logger.Info("ignoring SIGHUP: certificates, tokens and passwords are read again when their files change; restart to change the configuration")
		}
	}()
	return func() {
		signal.Stop(hangups)
		close(hangups)
		<-done
	}
}
