// Package s3test runs a real S3 server, versitygw on a temporary folder, for tests of object
// storage.
//
// It listens on loopback with random credentials. Two things are promised: once Start has returned,
// it answers; and the process ends with Stop, or with the process that started it. There is no TLS.
// No part of the product imports the package.
package s3test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

// startTimeout bounds Start when its context has no deadline. A start usually takes a tenth of a
// second.
const startTimeout = time.Minute

// Server is a running S3 server.
type Server struct {
	// Endpoint is its URL without a path.
	Endpoint string

	access, secret string
	dir            string // removed by Stop
	process        *kubetest.Process
}

// ForTest starts a server for the duration of a test. It sets the credentials in the environment,
// so the test cannot be parallel. Under -short it skips the test. Without the binary it fails the
// test and says what to run.
func ForTest(t testing.TB) *Server {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs an S3 server")
	}
	s, err := Start(t.Context())
	if err != nil {
		t.Fatalf("starting an S3 server: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stopping the S3 server: %v", err)
		}
	})
	for name, value := range s.Environment() {
		t.Setenv(name, value)
	}
	return s
}

// Start starts a server from the binary that `make versitygw` compiled. The context bounds only the
// start. The working directory must be inside the repository.
func Start(ctx context.Context) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	binary, err := binary()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "latticekeep-s3-")
	if err != nil {
		return nil, fmt.Errorf("making the server's directory: %w", err)
	}
	s := &Server{dir: dir, access: rand.Text(), secret: rand.Text()}
	for _, folder := range []string{"buckets", "attributes"} {
		if err := os.Mkdir(filepath.Join(dir, folder), 0o700); err != nil {
			return nil, errors.Join(err, s.Stop())
		}
	}
	// The server cannot be given a listener. Another process may take the port after it was found
	// free and before the server binds it.
	const attempts = 5
	for range attempts {
		if err = s.start(ctx, binary); err == nil || !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

var errPortTaken = errors.New("port taken")

func (s *Server) start(ctx context.Context, binary string) error {
	address, err := freeAddress()
	if err != nil {
		return fmt.Errorf("finding a free port: %w", err)
	}
	s.Endpoint = "http://" + address
	health := "/" + rand.Text() // distinguishes our server from another one that took the port
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		return fmt.Errorf("creating a log: %w", err)
	}
	defer log.Close()
	// Attributes of objects are stored in files because some file systems have no extended
	// attributes.
	cmd := exec.Command(binary, "--port", address, "--health", health, "--quiet",
		"posix", "--sidecar", filepath.Join(s.dir, "attributes"), filepath.Join(s.dir, "buckets"))
	cmd.Env = []string{"ROOT_ACCESS_KEY=" + s.access, "ROOT_SECRET_KEY=" + s.secret}
	cmd.Stdout, cmd.Stderr = log, log
	if s.process, err = kubetest.StartProcess(cmd); err != nil {
		return err
	}
	client := &http.Client{Timeout: 5 * time.Second}
	defer client.CloseIdleConnections()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !answers(ctx, client, s.Endpoint+health) {
		select {
		case <-ticker.C:
		case <-s.process.Done():
			output, _ := os.ReadFile(log.Name())
			if bytes.Contains(output, []byte("address already in use")) {
				return fmt.Errorf("starting versitygw at %s: %w", address, errPortTaken)
			}
			return fmt.Errorf("versitygw ended while starting: %s", output)
		case <-ctx.Done():
			return fmt.Errorf("waiting for versitygw: %w", ctx.Err())
		}
	}
	return nil
}

func answers(ctx context.Context, client *http.Client, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// Environment returns the variables from which the AWS SDK reads its credentials. They hide all
// other AWS settings of the machine.
func (s *Server) Environment() map[string]string {
	return map[string]string{
		"AWS_ACCESS_KEY_ID":           s.access,
		"AWS_SECRET_ACCESS_KEY":       s.secret,
		"AWS_SESSION_TOKEN":           "",
		"AWS_PROFILE":                 "",
		"AWS_CONFIG_FILE":             os.DevNull,
		"AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
		"AWS_EC2_METADATA_DISABLED":   "true",
	}
}

// Bucket creates a bucket if it is absent, and returns its URL.
func (s *Server) Bucket(name string) (string, error) {
	if err := os.Mkdir(s.folder(name), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("making a bucket: %w", err)
	}
	query := url.Values{"endpoint": {s.Endpoint}, "region": {"us-east-1"}, "use_path_style": {"true"}}
	return "s3://" + name + "?" + query.Encode(), nil
}

// RemoveBucket removes a bucket with all its objects, as an administrator might.
func (s *Server) RemoveBucket(name string) error { return os.RemoveAll(s.folder(name)) }

// Object returns the path of the file with the bytes of an object. A test may alter it without the
// server's knowledge.
func (s *Server) Object(bucket, name string) string {
	return filepath.Join(s.folder(bucket), filepath.FromSlash(name))
}

func (s *Server) folder(bucket string) string { return filepath.Join(s.dir, "buckets", bucket) }

// Stop kills the process, waits until it is gone and removes all its files. It may be called again.
func (s *Server) Stop() error {
	var err error
	if s.process != nil {
		err = s.process.Stop(0)
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// binary returns the path of versitygw in the repository that contains the working directory.
func binary() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the working directory: %w", err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "hack", "versitygw", "go.mod")); err == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("the working directory is not inside the repository")
		}
	}
	path := filepath.Join(dir, "bin", "tools", "versitygw")
	if _, err := os.Stat(path); err != nil {
		return "", errors.New("there is no bin/tools/versitygw: run make versitygw")
	}
	return path, nil
}

// freeAddress returns a loopback address that was free a moment ago.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
