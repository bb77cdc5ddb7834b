package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
)

// mailDirectory is the folder of e-mails in the data directory of a development server.
const mailDirectory = "mail"

// keyFileIn returns the KMS settings for a key file in a data directory.
func keyFileIn(dir string) config.KMS {
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(filepath.Join(dir, offline.KMSKeyFileName))}
	return config.KMS{URL: u.String(), CacheTTL: keyring.DefaultCacheTTL}
}

// DevConfig configures a development server. Zero fields take the defaults.
type DevConfig struct {
	DataDir    string // default: a temporary folder, removed at the end
	Listen     string // default DefaultListen; port 0 picks a free port
	Kubeconfig string // starts the operator, as a pod's ServiceAccount token does
	Now        func() time.Time
	Patience   time.Duration // time limit of most answers; default 900 ms

	Stdout io.Writer // receives one JSON line once the server is ready
	Stderr io.Writer // receives all other output
}

// DevReady is the JSON line that scripts read. The names of its fields never change.
type DevReady struct {
	BaseURL      string         `json:"base_url"`
	TenantID     authz.TenantID `json:"tenant_id"`
	APIKey       string         `json:"api_key"`
	DataDir      string         `json:"data_dir"`
	DashboardURL string         `json:"dashboard_url"`
}

// devNetworks are what webhooks of a development server may be sent to besides public addresses.
var devNetworks = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// devSender is the sender of a development server's e-mails.
const devSender = "Latticekeep <noreply@latticekeep.localhost>"

// Dev runs a development server until ctx ends, and returns nil once requests and reconciles in
// flight have finished.
func Dev(ctx context.Context, c DevConfig) (err error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.Listen) // before anything is made
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	defer l.Close()
	if c.DataDir == "" {
		if c.DataDir, err = os.MkdirTemp("", "latticekeep-"); err != nil {
			return fmt.Errorf("making a data directory: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(c.DataDir)) }()
	}
	if c.DataDir, err = filepath.Abs(c.DataDir); err != nil { // scripts may run in another folder
		return fmt.Errorf("finding the data directory: %w", err)
	}
	logger, endLog := openLog(ctx, slog.New(slog.NewTextHandler(c.Stderr, nil)))
	defer func() { endLog(err) }()
	s := service{dev: true, logger: logger, calls: metrics.NewCalls(), now: c.Now, mails: mail.Directory(filepath.Join(c.DataDir, mailDirectory)), sender: devSender, egress: egress.New(egress.Options{Allow: devNetworks}),
		sealingLifetime: config.DefaultSealingLifetime, evidence: devProving()}
	defer func() { err = errors.Join(err, s.evidence.close()) }()
	if err := s.connect(c.Kubeconfig); err != nil {
		return err
	}
	s.deployment, err = openDeployment(ctx, deploymentOptions{
		dir: c.DataDir, kms: keyFileIn(c.DataDir), dev: true,
		objects: s.sealingKeyUse(), accepted: s.acceptedValues(), evidence: s.evidence, calls: s.calls, logger: logger, now: c.Now,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.deployment.close()) }()
	var systemKey string
	if err := s.identity.FirstSystemKey(ctx, func(key string) error { systemKey = key; return nil }); err != nil {
		return err
	}
	tenant, key, err := s.identity.Dev(ctx)
	if err != nil {
		return err
	}
	s.tenants = map[string]authz.TenantID{"default": tenant}
	line := DevReady{BaseURL: "http://" + l.Addr().String(), TenantID: tenant, APIKey: key, DataDir: c.DataDir}
	line.DashboardURL = line.BaseURL                                 // the dashboard is at the root
	limits := gate.Limits{Registrations: 1000, Patience: c.Patience} // scripts that experiment register often
	inspected := config.Default()
	inspected.DataDir, inspected.PublicURL = c.DataDir, line.BaseURL
	return s.run(ctx, l, server.Config{PublicURL: line.BaseURL, Limits: limits, Operations: server.Operations{Diagnosis: s.diagnose(inspected, nil)}}, func() {
		if err := json.NewEncoder(c.Stdout).Encode(line); err != nil {
			logger.Warn("writing the ready line failed", "error", err)
		}
		fmt.Fprint(c.Stderr, nextSteps(line, os.Args[0], s.keys.Identity().ID(), s.log.Fingerprint(), systemKey, s.cluster != nil))
	})
}

// nextSteps returns the commands to try next.
func nextSteps(r DevReady, program, identity, chain, systemKey string, operator bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, `
latticekeep is ready on %[1]s (development: plain HTTP, the KMS key lies beside the database)
identity: %[2]s
chain: %[3]s

API key: %[4]s

Type next, in another terminal:

  # log in: it asks for the API key
  %[5]s login --url %[1]s

  # store a credential, and read it
  echo s3cret | %[5]s put db --type database password=-
  %[5]s get db

  # the audit log, and the proof that it is whole
  %[5]s audit search
  %[5]s audit verify --fingerprint %[3]s
`, r.BaseURL, identity, chain, r.APIKey, program)
	if systemKey != "" {
		fmt.Fprintf(&b, `
  # the system key, which administers tenants, is shown at this first start only
  export SYSTEM_KEY=%s
  LATTICEKEEP_API_KEY=$SYSTEM_KEY %s tenant list
`, systemKey, program)
	}
	if operator {
		fmt.Fprintf(&b, `
  # seal values into a manifest for the namespace default, and apply it
  %s seal --url $BASE --identity %s \
    --name app-db --namespace default --type database --from-literal password=s3cret | kubectl apply -f -
`, program, identity)
	}
	return b.String() + "\n"
}
