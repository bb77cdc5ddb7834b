package kms

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/kmstest"
)

func startAWS(t *testing.T) *kmstest.Server {
	t.Helper()
	s, err := kmstest.NewAWS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	for _, variable := range s.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	return s
}

func TestWhoDestroysAKeyOfSeveralRegionsIsToldOfItsReplicas(t *testing.T) {
	s := startAWS(t)
	s.SetMultiRegion(kmstest.DefaultKey)
	k, err := Open(t.Context(), s.URL(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if d, err := k.Destroy(t.Context()); err != nil || !strings.Contains(d.Left, "replicas in other regions still open") || d.When.IsZero() {
		t.Error(d, err)
	}
}

// A refusal because of the key's state does not count as a destruction, and neither does an answer
// that cannot be read.
func TestADisabledKeyIsDestroyedAndAnUnclearOneIsNot(t *testing.T) {
	s := startAWS(t)
	k, err := Open(t.Context(), s.URL(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	s.SetDisabled(kmstest.DefaultKey, true)
	if _, err := k.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.SetForbidden("describe", true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := k.Destroy(ctx); fault.Of(err) != fault.Unavailable {
		t.Error("whether it was destroyed is not known:", err)
	}
}

// Without credentials there is a line in the log, and the SDK writes nothing to stderr.
func TestTheSDKOfAWSIsQuiet(t *testing.T) {
	s := startAWS(t)
	metadata := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(metadata.Close)
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.URL,
	} {
		t.Setenv(name, value)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	stderr := os.Stderr
	os.Stderr = file
	defer func() { os.Stderr = stderr }()
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := Open(ctx, s.URL(), Options{Logger: logger}); fault.Of(err) != fault.Unavailable || !strings.Contains(err.Error(), "no credentials for AWS") {
		t.Error(err)
	}
	if text, err := os.ReadFile(file.Name()); err != nil || len(text) > 0 {
		t.Errorf("on stderr: %s %v", text, err)
	}
	if n := strings.Count(log.String(), "retrying"); n != 1 {
		t.Errorf("%d lines of tries: %s", n, log.String())
	}
	if !strings.Contains(log.String(), "IMDSv1") {
		t.Errorf("the SDK had nothing to say, so this shows nothing: %s", log.String())
	}
}
