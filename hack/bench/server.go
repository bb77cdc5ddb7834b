package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

const (
	readyTimeout = time.Minute
	// serverGrace is the time that a server has to stop, including the wiping of freed pages.
	serverGrace = time.Minute
)

// settings are the properties in which the deployments of a run differ.
type settings struct {
	name    string // name of its folder
	signing string // audit.signing
	store   string // URL of PostgreSQL, or "" for the embedded store
	kms     string // URL, or "" for a key file
	token   string // token for the KMS
	mail    bool   // configure a mail server, so that users can register; it never answers
	traced  bool   // strace writes every sync to a file
	cores   string // cores to run on, such as 0-1; empty for all

	profiled bool // serve the profiles of Go's runtime
}

// A deployment is one running configuration of the built binary, as one process or as several on
// one database.
type deployment struct {
	settings
	binary   string
	dir      string
	replicas []*server
	key      string // API key with all scopes of a tenant
}

// A server is one process.
type server struct {
	process *kubetest.Process
	pid     int // process id of the server, not of strace
	address string
	started time.Duration // time from the start to readiness
	log     string        // path of the log
	trace   string        // path of the recorded syncs, one per line; "" without recording

	operations string // address of operations.listen; "" without profiles
}

// rates raises all quotas so that they do not limit the load.
const rates = "rate: {v1: 1000000000, v2: 1000000000, address: 1000000000, registrations: 1000000000}\n"

// start runs a deployment of one replica. The caller must stop it even after an error.
func start(ctx context.Context, binary, dir string, s settings) (*deployment, error) {
	d := &deployment{settings: s, binary: binary, dir: filepath.Join(dir, s.name)}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return d, fmt.Errorf("making a folder: %w", err)
	}
	if err := d.add(ctx); err != nil {
		return d, err
	}
	return d, d.enter(ctx)
}

// config returns the configuration file of the n-th replica. operations is empty or an address for its
// profiles.
func (d *deployment) config(n int, operations string) string {
	kms := fmt.Sprintf("{url: 'file://%s'}", filepath.Join(d.dir, "kms.key"))
	if d.kms != "" {
		kms = fmt.Sprintf("{url: '%s', tokenFile: %s}", d.kms, filepath.Join(d.dir, "token"))
	}
	text := fmt.Sprintf(`listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
kms: %s
systemKeyFile: %s
audit: {signing: %s}
`, kms, filepath.Join(d.dir, "system.key"), d.signing)
	if d.store != "" {
		text += fmt.Sprintf("store: {url: '%s'}\ncompliance: {reports: 'file://%s'}\n", d.store, filepath.Join(d.dir, "reports"))
	} else {
		text += fmt.Sprintf("dataDir: %s\n", filepath.Join(d.dir, fmt.Sprint("data-", n)))
	}
	if d.mail {
		text += "mail: {from: bench@example.org, smtp: {address: '127.0.0.1:9', security: none}}\n"
	} else {
		text += "registration: {closed: true}\n"
	}
	if operations != "" {
		text += fmt.Sprintf("operations: {listen: '%s', profiling: true}\n", operations)
	}
	return text + rates
}

// add starts another replica.
func (d *deployment) add(ctx context.Context) error {
	n := len(d.replicas)
	s, err := d.launch(ctx, n)
	if s != nil {
		d.replicas = append(d.replicas, s)
	}
	return err
}

func (d *deployment) launch(ctx context.Context, n int) (*server, error) {
	path := func(name string) string { return filepath.Join(d.dir, fmt.Sprintf("%s-%d", name, n)) }
	s := &server{log: path("log")}
	if d.profiled {
		var err error
		if s.operations, err = freeAddress(); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(
		os.WriteFile(path("config"), []byte(d.config(n, s.operations)), 0o600),
		os.WriteFile(filepath.Join(d.dir, "token"), []byte(d.token), 0o600),
		os.MkdirAll(filepath.Join(d.dir, "reports"), 0o700),
	); err != nil {
		return nil, fmt.Errorf("writing a configuration: %w", err)
	}
	out, err := os.Create(path("out"))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	log, err := os.OpenFile(path("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	command := []string{d.binary, "server", "--config", path("config")}
	if d.traced {
		s.trace = path("trace")
		command = append([]string{"strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=fsync,fdatasync", "-o", s.trace}, command...)
	}
	if d.cores != "" {
		command = append([]string{"taskset", "--cpu-list", d.cores}, command...)
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = out, log
	began := time.Now()
	if s.process, err = kubetest.StartProcess(cmd); err != nil {
		return nil, err
	}
	s.pid = s.process.Pid()
	ready := func() bool {
		text, err := os.ReadFile(path("out"))
		var line struct {
			BaseURL string `json:"base_url"`
		}
		if err != nil || !bytes.HasSuffix(text, []byte("\n")) || json.Unmarshal(text, &line) != nil {
			return false
		}
		u, err := url.Parse(line.BaseURL)
		if err != nil {
			return false
		}
		s.address = u.Host
		return true
	}
	if err := s.await(ctx, ready); err != nil {
		return s, err
	}
	s.started = time.Since(began)
	if d.traced {
		s.pid, err = childOf(s.pid)
	}
	return s, err
}

// await polls until what returns true.
func (s *server) await(ctx context.Context, what func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !what() {
		select {
		case <-tick.C:
		case <-s.process.Done():
			return fmt.Errorf("the server ended: %s", s.tail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for the server: %w: %s", ctx.Err(), s.tail())
		}
	}
	return nil
}

// tail returns the end of the server's log.
func (s *server) tail() string {
	text, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-2048):])
}

// enter creates a tenant and an API key with all scopes.
func (d *deployment) enter(ctx context.Context) error {
	system, err := os.ReadFile(filepath.Join(d.dir, "system.key"))
	if err != nil {
		return fmt.Errorf("reading the system key: %w", err)
	}
	c, err := client.New("http://"+d.replicas[0].address, client.WithAPIKey(strings.TrimSpace(string(system))))
	if err != nil {
		return err
	}
	tenant, err := c.V2.CreateTenant(ctx, v2.CreateTenantRequest{Name: "bench"})
	if err != nil {
		return fmt.Errorf("making a tenant: %w", err)
	}
	key, err := c.V2.CreateTenantAPIKey(ctx, tenant.Tenant.TenantId, v2.CreateAPIKeyRequest{Name: "bench", Scopes: []v2.Scope{
		"vault:read", "vault:write", "crypto:encrypt", "crypto:decrypt", "crypto:sign", "crypto:verify",
	}})
	if err != nil {
		return fmt.Errorf("making an API key: %w", err)
	}
	d.key = key.ApiKey
	return nil
}

// stop stops all replicas.
func (d *deployment) stop() error {
	var errs []error
	for _, s := range d.replicas {
		errs = append(errs, s.stop())
	}
	d.replicas = nil
	return errors.Join(errs...)
}

func (s *server) stop() error {
	if s.trace != "" { // strace blocks the signal for itself
		_ = syscall.Kill(s.pid, syscall.SIGINT)
		select {
		case <-s.process.Done():
		case <-time.After(serverGrace):
		}
	}
	if err := s.process.Stop(serverGrace); err != nil {
		return fmt.Errorf("stopping the server: %w: %s", err, s.tail())
	}
	return nil
}
