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

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/identity/tokenreview"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Config of a development server. Zero fields take the defaults.
type Config struct {
	DataDir    string // default: a temporary one that is removed at the end
	Listen     string // default DefaultListen; port 0 takes a free one
	Kubeconfig string // turns the operator on; in a pod its ServiceAccount token does
	Now        func() time.Time

	Stdout io.Writer // takes one JSON line once the server is ready
	Stderr io.Writer // takes everything else
}

// DefaultListen is where a server listens that is told nothing else.
const DefaultListen = "127.0.0.1:8200"

func newServerCommand() *cobra.Command {
	var c Config
	var dev bool
	var file string
	cmd := &cobra.Command{
		Use:   "server --config FILE | --dev",
		Short: "Run the HTTP service, and the operator beside it",
		Long: `Run the HTTP service, on an embedded store or PostgreSQL, and the operator when there is a
kubeconfig or the process runs in a pod with a ServiceAccount token. While the
cluster does not answer, lacks the CRD or belongs to another deployment, the
HTTP service runs alone and the operator is tried again.

--config runs a production server; docs/reference/configuration.md lists every setting.
Environment variables (LATTICEKEEP_DATA_DIR is dataDir) go before the file, and
flags before both. On its first start it writes the system key to the file that
systemKeyFile names. Once ready, one JSON line on stdout says base_url,
data_dir, identity and chain.

--dev runs a development server, which needs nothing and reads no
configuration. Once ready, one JSON line on stdout says where: base_url,
tenant_id, api_key, data_dir and dashboard_url. The API key has all scopes of
the tenant. Started again on the same --data-dir the server keeps all data and
the tenant, makes a new key and revokes the one it made before. Mails are files
in the folder mail of the data directory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Stdout, c.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			collectSeldom()
			switch {
			case dev:
				return Run(cmd.Context(), c)
			case file == "":
				return errors.New("say which server to run: --config FILE for production, or --dev")
			}
			flags := make(map[string]string)
			for flag, key := range map[string]string{"listen": "listen", "data-dir": "dataDir", "kubeconfig": "kubernetes.kubeconfig"} {
				if f := cmd.Flags().Lookup(flag); f.Changed {
					flags[key] = f.Value.String()
				}
			}
			s, err := Load(file, os.Environ(), flags)
			if err != nil {
				return err
			}
			return Serve(cmd.Context(), s, c.Stdout, c.Stderr)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&dev, "dev", false, "run a development server: embedded store, key file beside it, plain HTTP")
	flags.StringVar(&file, "config", "", "run a production server with this configuration file")
	flags.StringVar(&c.DataDir, "data-dir", "", "folder of the database (with --dev also of the key; default a temporary one, removed at the end)")
	flags.StringVar(&c.Listen, "listen", DefaultListen, "address to listen on; port 0 takes a free one")
	flags.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the cluster to be the operator of")
	cmd.MarkFlagsMutuallyExclusive("dev", "config")
	return cmd
}

// ready is the line that scripts read. Its fields never change their names.
type ready struct {
	BaseURL      string         `json:"base_url"`
	TenantID     authz.TenantID `json:"tenant_id"`
	APIKey       string         `json:"api_key"`
	DataDir      string         `json:"data_dir"`
	DashboardURL string         `json:"dashboard_url"`
}

// devSender is who mails of a development server come from.
const devSender = "Latticekeep <noreply@latticekeep.localhost>"

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
	s := service{dev: true, logger: logger, now: c.Now, mails: mail.Directory(filepath.Join(c.DataDir, mailDirectory)), sender: devSender,
		sealingLifetime: DefaultSealingLifetime, proving: devProving()}
	defer func() { err = errors.Join(err, s.proving.close()) }()
	if err := s.connect(c.Kubeconfig); err != nil {
		return err
	}
	s.deployment, err = openDeployment(ctx, place{
		dir: c.DataDir, kms: keyFileIn(c.DataDir),
		objects: s.objects(), proving: s.proving, logger: logger, now: c.Now,
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
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	line := ready{BaseURL: "http://" + l.Addr().String(), TenantID: tenant, APIKey: key, DataDir: c.DataDir}
	line.DashboardURL = line.BaseURL         // its first page is at the root
	rates := gate.Rates{Registrations: 1000} // scripts that try things out register a lot
	return s.run(ctx, l, server.Config{PublicURL: line.BaseURL, Rates: rates}, func() {
		if err := json.NewEncoder(c.Stdout).Encode(line); err != nil {
			logger.Warn("the ready line could not be written", "err", err)
		}
		fmt.Fprint(c.Stderr, nextSteps(line, os.Args[0], s.keys.Identity().ID(), s.log.Fingerprint(), systemKey, s.cluster != nil))
	})
}

// service is everything that runs beside each other, whether in development or
// in production.
type service struct {
	*deployment
	logger  *slog.Logger
	now     func() time.Time
	mails   mail.Transport
	sender  string                    // of mails
	cluster *rest.Config              // nil: there is no operator
	tenants map[string]authz.TenantID // by namespace

	operator   controllers.Options // as far as they are configured
	operations net.Listener        // nil: what it serves is on the other one
	tracing    *tracing            // nil: there are no traces
	clock      *sharedClock        // of the database that replicas share; nil: there is one replica
	lender     *quota.Shared       // of requests, likewise

	dev        bool               // a development server, which hides nothing from whoever administers it
	recipients []backup.Recipient // of backups over the interface; empty: any, and then no KMS key goes with them

	sealingLifetime time.Duration // of a sealing key until a new one is made; 0: for ever

	proving    *proving // of the log
	compliance *compliance.Service
}

// maintenance is how often the work is done that nobody waits for.
const maintenance = time.Minute

// audience is what pods request the tokens for that they present here.
const audience = "latticekeep"

// run serves on l, which it closes, until ctx ends. config is what the two
// kinds of server differ in; ready is called once the rest is made.
func (s *service) run(ctx context.Context, l net.Listener, config server.Config, ready func()) error {
	config.Vault, config.Transit, config.Identity, config.Audit, config.Guard, config.Reader, config.Keys, config.Store = s.vault, s.transit, s.identity, s.log, s.guard, s.reader, s.keys, s.store
	config.Sealing, config.Custody, config.Recipients = s.sealing, s.custody, s.recipients
	if s.dev || len(s.recipients) > 0 {
		config.KMSKeys = s.keyFiles // to nobody whom the configuration does not name
	}
	var reports *objects.Bucket
	var err error
	if s.compliance, reports, err = s.proving.judge(ctx, s, s.dir, config.PublicURL); err == nil {
		err = s.proving.keepArchive(ctx, s)
	}
	if err != nil {
		return errors.Join(err, l.Close(), s.closeOperations())
	}
	config.Compliance = s.compliance
	if reports != nil {
		config.Reports = reports
	}
	config.Collectors = append(config.Collectors, proofCollector{s.log, s.verifier, s.proving.keeper})
	config.Collectors = append(config.Collectors, sealingKeyCollector{s.sealing})
	config.Collectors = append(config.Collectors, auditCollector{s.log})
	fit := config.Ready
	config.Ready = func() error {
		if err := refuseMarked(ctx, s.store); err != nil || fit == nil {
			return err
		}
		return fit()
	}
	if s.clock != nil {
		s.lender = quota.NewLender(s.store, s.clock.Clock)
		config.Lender = s.lender
	}
	config.Logger, config.Now, config.Version = s.logger, s.now, version()
	config.OperationsApart = s.operations != nil
	if s.cluster != nil {
		config.Collectors = append(config.Collectors, s.operator.Metrics)
		config.Cluster = s.operator.View
		config.Gatherers = append(config.Gatherers, prometheus.GathererFunc(gatherOperator))
	}
	if s.tracing != nil {
		config.Tracer = s.tracing.tracer
	}
	h, err := server.New(config)
	if err != nil {
		return errors.Join(err, l.Close(), s.closeOperations())
	}
	if s.cluster != nil {
		reviewer, err := tokenreview.New(s.cluster, audience, s.now)
		if err != nil {
			return errors.Join(err, l.Close(), s.closeOperations())
		}
		s.identity.UseCluster(reviewer, s.tenants)
	}
	parts, running := errgroup.WithContext(ctx)
	probed, endProbes := context.WithCancel(context.WithoutCancel(ctx))
	parts.Go(func() error {
		defer endProbes() // not before the requests in flight have ended
		return h.Serve(running, l)
	})
	if s.operations != nil {
		parts.Go(func() error { return h.ServeOperations(probed, s.operations) })
	}
	parts.Go(func() error {
		return s.identity.Outbox().Run(running, s.mails, mail.Options{PublicURL: config.PublicURL, From: s.sender, Logger: s.logger})
	})
	parts.Go(func() error {
		s.maintain(running)
		return nil
	})
	if s.clock != nil {
		parts.Go(func() error {
			s.clock.Follow(running, s.logger)
			return nil
		})
	}
	s.proving.run(running, s, parts)
	if s.cluster != nil {
		o := s.operator
		o.Vault, o.Identity, o.Keys, o.Logger, o.Now, o.Tenants, o.Tracer = s.vault, s.identity, s.keys, s.logger, s.now, s.tenants, config.Tracer
		parts.Go(func() error {
			return operate(running, s.logger, func() error {
				return controllers.Run(running, s.cluster, o)
			})
		})
	}
	ready()
	if reason := s.log.HaltedBy(); reason != nil {
		s.logger.Error("nothing is served: /readyz and all calls answer 503 until the rollback is accepted with latticekeep audit accept-rollback", "err", reason)
	}
	return parts.Wait()
}

func (s *service) closeOperations() error {
	if s.operations == nil {
		return nil
	}
	return s.operations.Close()
}

// connect finds the cluster to be the operator of, if there is one.
func (s *service) connect(kubeconfig string) (err error) {
	if s.cluster, err = clusterConfig(kubeconfig); err != nil || s.cluster == nil {
		return err
	}
	controllers.LogLibrariesTo(s.logger.Handler())
	s.operator.Metrics, s.operator.View = controllers.NewMetrics(), new(controllers.View)
	return nil
}

// objects is what the operator knows of the use of sealing keys.
func (s *service) objects() sealingKeyUse {
	if s.cluster == nil {
		return nil
	}
	return s.operator.Metrics.SealingKeyUse
}

// maintain does each minute what is due, until ctx ends, and then writes down for
// the last time when API keys were used.
func (s *service) maintain(ctx context.Context) {
	tick := time.NewTicker(maintenance)
	defer tick.Stop()
	for {
		s.tend(ctx)
		select {
		case <-tick.C:
			s.flush(ctx)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			s.flush(last)
			return
		}
	}
}

// tend rotates the keys that are due, the sealing key too, forgets idempotency keys
// and reports, and assesses tenants. Trouble with any of it is tried again the next
// time. A log that is refused lets nothing be written, and has said so.
func (s *service) tend(ctx context.Context) {
	if err := s.proving.forget(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("old reports could not be removed, it is tried again", "in", maintenance, "err", err)
	}
	if s.log.HaltedBy() != nil {
		return
	}
	if n, err := s.transit.RotateDue(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("keys that are due could not be rotated, it is tried again", "in", maintenance, "err", err)
	} else if n > 0 {
		s.logger.Info("keys that were due are rotated", "keys", n)
	}
	if rotated, err := s.sealing.RotateDue(ctx, s.sealingLifetime); err != nil && ctx.Err() == nil {
		s.logger.Error("the sealing key could not be rotated, it is tried again", "in", maintenance, "err", err)
	} else if rotated {
		s.logger.Info("the sealing key was due, and there is a new one")
	}
	if s.lender != nil {
		if err := s.lender.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("old quotas could not be forgotten, it is tried again", "in", maintenance, "err", err)
		}
	}
	if _, err := s.vault.Sweep(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("idempotency keys could not be forgotten, it is tried again", "in", maintenance, "err", err)
	}
	if err := s.compliance.AssessAll(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("tenants could not be assessed, it is tried again", "in", maintenance, "err", err)
	}
}

// flushTimeout bounds what a server that ends still writes.
const flushTimeout = 5 * time.Second

func (s *service) flush(ctx context.Context) {
	if s.log.HaltedBy() != nil {
		return
	}
	if err := s.identity.FlushLastUsed(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("the last use of API keys could not be written, it is tried again", "in", maintenance, "err", err)
	}
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
func nextSteps(r ready, program, identity, chain, systemKey string, operator bool) string {
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
	if systemKey != "" {
		fmt.Fprintf(&b, `
  # the system key, which administers tenants, is shown at this first start only
  export SYSTEM_KEY=%s
  curl -s $BASE/api/v2/system/tenants -H "X-API-Key: $SYSTEM_KEY"
`, systemKey)
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
