package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
)

// Config of a server. Zero fields take the defaults.
type Config struct {
	DataDir    string // default: a temporary one that is removed at the end
	Listen     string // default DefaultListen; port 0 takes a free one
	Kubeconfig string // turns the operator on; in a pod its ServiceAccount token does
	Now        func() time.Time

	Stdout io.Writer // takes one JSON line once the server is ready
	Stderr io.Writer // takes everything else
}

// DefaultListen is where a development server listens.
const DefaultListen = "127.0.0.1:8200"

func newServerCommand() *cobra.Command {
	var c Config
	var dev bool
	cmd := &cobra.Command{
		Use:   "server --dev",
		Short: "Run the HTTP service, and the operator beside it",
		Long: `Run the HTTP service on an embedded store, and the operator when --kubeconfig
is given or the process runs in a pod with a ServiceAccount token. While the
cluster does not answer, lacks the CRD or belongs to another deployment, the
HTTP service runs alone and the operator is tried again.

Once ready, one JSON line on stdout says where: base_url, tenant_id, api_key,
data_dir and dashboard_url. The API key has all scopes of the tenant. Started
again on the same --data-dir the server keeps all data and the tenant, makes a
new key and revokes the one it made before.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !dev {
				return errors.New("this release runs development servers only: add --dev")
			}
			c.Stdout, c.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			return Run(cmd.Context(), c)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&dev, "dev", false, "run a development server: embedded store, key file beside it, plain HTTP")
	flags.StringVar(&c.DataDir, "data-dir", "", "folder of database and key (default a temporary one, removed at the end)")
	flags.StringVar(&c.Listen, "listen", DefaultListen, "address to listen on; port 0 takes a free one")
	flags.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the cluster to be the operator of")
	return cmd
}

// ready is the line that scripts read. Its fields never change their names.
type ready struct {
	BaseURL      string         `json:"base_url"`
	TenantID     authz.TenantID `json:"tenant_id"`
	APIKey       string         `json:"api_key"`
	DataDir      string         `json:"data_dir"`
	DashboardURL *string        `json:"dashboard_url"` // null: this release has no dashboard
}

// Run runs a development server until ctx ends, and returns nil once requests
// and reconciles in flight have finished.
func Run(ctx context.Context, c Config) (err error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.DataDir == "" {
		if c.DataDir, err = os.MkdirTemp("", "latticekeep-"); err != nil {
			return fmt.Errorf("making a data directory: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(c.DataDir)) }()
	}
	if c.DataDir, err = filepath.Abs(c.DataDir); err != nil { // for scripts that run elsewhere
		return fmt.Errorf("finding the data directory: %w", err)
	}
	logger := slog.New(slog.NewTextHandler(c.Stderr, nil))
	cluster, err := clusterConfig(c.Kubeconfig)
	if err != nil {
		return err
	}
	d, err := openDeployment(ctx, c.DataDir, logger, c.Now)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.store.Close()) }()
	tenant, key, err := d.identity.Dev(ctx)
	if err != nil {
		return err
	}
	s, err := server.New(server.Config{
		Vault: d.vault, Identity: d.identity, Audit: d.log, Keys: d.keys, Store: d.store,
		Logger: logger, Now: c.Now, Version: version(),
	})
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	parts, running := errgroup.WithContext(ctx)
	parts.Go(func() error { return s.Serve(running, l) })
	if cluster != nil {
		parts.Go(func() error {
			return operate(running, logger, func() error {
				return controllers.Run(running, cluster, controllers.Options{
					Vault: d.vault, Identity: d.identity, Keys: d.keys, Logger: logger, Now: c.Now,
					Tenants: map[string]authz.TenantID{"default": tenant},
				})
			})
		})
	}
	line := ready{BaseURL: "http://" + l.Addr().String(), TenantID: tenant, APIKey: key, DataDir: c.DataDir}
	if err := json.NewEncoder(c.Stdout).Encode(line); err != nil {
		logger.Warn("the ready line could not be written", "err", err)
	}
	fmt.Fprint(c.Stderr, nextSteps(line, os.Args[0], d.keys.Identity().ID(), d.log.Fingerprint(), cluster != nil))
	return parts.Wait()
}

// The operator is run again after operatorFirstRetry, then twice as long each
// time, up to operatorLastRetry.
const operatorFirstRetry, operatorLastRetry = time.Second, time.Minute

// operate runs the operator again and again until ctx ends. What ends it early
// is trouble with the cluster, which is no reason to end the HTTP service that
// workloads read from: it is logged, with the remedy that the error names.
func operate(ctx context.Context, logger *slog.Logger, run func() error) error {
	wait := operatorFirstRetry
	for {
		began := time.Now()
		err := run()
		if ctx.Err() != nil {
			return err
		}
		if time.Since(began) > operatorLastRetry { // this is new trouble
			wait = operatorFirstRetry
		}
		logger.Error("the operator is not running, it is tried again", "in", wait, "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(2*wait, operatorLastRetry)
	}
}

// clusterConfig returns the cluster to be the operator of, and nil for none.
func clusterConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("reading the kubeconfig: %w", err)
		}
		return cfg, nil
	}
	cfg, err := rest.InClusterConfig()
	// A pod without a ServiceAccount token is meant to have nothing to do with its cluster.
	if errors.Is(err, rest.ErrNotInCluster) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the pod's cluster configuration: %w", err)
	}
	return cfg, nil
}

// nextSteps tells a person what to type.
func nextSteps(r ready, program, identity, chain string, operator bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, `
latticekeep is ready on %[1]s (development: plain HTTP, the KMS key lies beside the database)
identity: %[2]s
chain: %[3]s

Type next, in another terminal:

  export BASE=%[1]s KEY=%[4]s

  # seal a credential
  curl -s $BASE/api/v2/vault/seal -H "X-API-Key: $KEY" -H 'Content-Type: application/json' \
    -d '{"name":"db","credential_type":"database","values":{"user":"app","password":"s3cret"},"ttl_days":30}'

  # list what there is, then unseal one
  curl -s $BASE/api/v2/vault/list -H "X-API-Key: $KEY"
  ID=$(curl -s $BASE/api/v2/vault/list -H "X-API-Key: $KEY" | sed 's/.*"credential_id":"\([^"]*\)".*/\1/')
  curl -s $BASE/api/v2/vault/$ID -H "X-API-Key: $KEY"

  # the audit log, and the proof that it is whole
  curl -s "$BASE/api/v2/audit/logs?limit=1" -H "X-API-Key: $KEY"
  %[5]s audit verify --url $BASE --api-key $KEY --fingerprint %[3]s
`, r.BaseURL, identity, chain, r.APIKey, program)
	if operator {
		fmt.Fprintf(&b, `
  # seal values into a manifest for the namespace default, and apply it
  %s seal --url $BASE --identity %s \
    --name app-db --namespace default --type database --from-literal password=s3cret | kubectl apply -f -
`, program, identity)
	}
	return b.String() + "\n"
}
