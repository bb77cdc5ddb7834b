package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/internal/config"
)

// newHandshakeCounter counts what clients agree on, so that it shows whether
// the classical groups can be switched off.
func newHandshakeCounter() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "latticekeep_tls_handshakes_total",
		Help: "TLS handshakes, by the key-exchange group that was negotiated.",
	}, []string{"group"})
}

// tlsConfig returns the listener's configuration with the certificate of the
// files, which must be there.
func tlsConfig(s config.TLS, handshakes *prometheus.CounterVec, logger *slog.Logger) (*tls.Config, error) {
	c := &certificate{certFile: s.CertFile, keyFile: s.KeyFile, logger: logger}
	if err := c.load(); err != nil {
		return nil, err
	}
	return listenerTLS(c.get, s.PQRequired, handshakes), nil
}

// listenerTLS returns a listener's configuration: TLS 1.3, whose cipher suites
// are all fit, and the hybrid of X25519 and ML-KEM-768 before or instead of
// the classical groups. get returns the certificate for each handshake.
func listenerTLS(get func(*tls.ClientHelloInfo) (*tls.Certificate, error), pqRequired bool, handshakes *prometheus.CounterVec) *tls.Config {
	groups := []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384}
	if pqRequired {
		groups = groups[:1]
	}
	return &tls.Config{
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: groups,
		NextProtos:       []string{"h2", "http/1.1"},
		GetCertificate:   get,
		VerifyConnection: func(state tls.ConnectionState) error {
			handshakes.WithLabelValues(state.CurveID.String()).Inc()
			return nil
		},
	}
}

// certificate is a pair of files that somebody renews from time to time.
type certificate struct {
	certFile, keyFile string
	logger            *slog.Logger

	mu      sync.Mutex
	seen    stamp // of the files at the last try
	current *tls.Certificate
}

// stamp tells one state of the files from another.
type stamp struct {
	certTime, keyTime time.Time
	certSize, keySize int64
}

// errNoCertificate ends the handshakes of a server that waits for its first
// certificate.
var errNoCertificate = errors.New("there is no TLS certificate yet")

// get returns the certificate of the files as they are now, and the last good
// one while they do not belong together: they are not replaced in one step.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.seen
	if now, err := c.stat(); err != nil || now != before {
		if err := c.loadLocked(); err != nil && c.seen != before { // once for each state, not for each handshake
			c.logger.Error("the new TLS certificate cannot be used; keeping the previous one, if any", "err", err)
		}
	}
	if c.current == nil {
		return nil, errNoCertificate
	}
	return c.current, nil
}

func (c *certificate) load() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.loadLocked()
}

func (c *certificate) loadLocked() error {
	now, err := c.stat()
	c.seen = now // before the files are read, so that a change meanwhile shows
	if err != nil {
		return fmt.Errorf("finding the TLS certificate: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("reading the TLS certificate: %w", err)
	}
	c.current = &pair
	return nil
}

// stat returns the zero stamp when a file is missing.
func (c *certificate) stat() (stamp, error) {
	cert, err := os.Stat(c.certFile)
	if err != nil {
		return stamp{}, err
	}
	key, err := os.Stat(c.keyFile)
	if err != nil {
		return stamp{}, err
	}
	return stamp{cert.ModTime(), key.ModTime(), cert.Size(), key.Size()}, nil
}

// secretCertificate is the pair of a Secret of type kubernetes.io/tls, which the
// operator or somebody else renews from time to time. It is asked for by its
// name alone.
type secretCertificate struct {
	secrets typedcorev1.SecretInterface
	name    string
	now     func() time.Time
	logger  *slog.Logger

	mu      sync.Mutex
	version string // of the Secret that current is of
	current *tls.Certificate
}

// tlsFromSecret returns the certificate of a Secret, which run reads. Until it
// is there handshakes fail, and nothing else waits: the operator of the same
// process may be the one that makes it.
func tlsFromSecret(cluster *rest.Config, namespace, name string, now func() time.Time, logger *slog.Logger) (*secretCertificate, error) {
	core, err := typedcorev1.NewForConfig(cluster)
	if err != nil {
		return nil, fmt.Errorf("making a client for tls.secretName: %w", err)
	}
	return &secretCertificate{secrets: core.Secrets(namespace), name: name, now: now, logger: logger}, nil
}

// The Secret is read again after secretPause, and after secretRetry as long as
// there is no certificate, it could not be read or it expires within
// secretNear: it should have been renewed long before.
const (
	secretPause   = time.Minute
	secretRetry   = 2 * time.Second
	secretNear    = time.Hour
	secretTimeout = 10 * time.Second
)

// run reads the Secret again and again until ctx ends.
func (s *secretCertificate) run(ctx context.Context) {
	told := ""
	for {
		err := s.read(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			told = ""
		} else if told != err.Error() { // once for each kind of trouble
			told = err.Error()
			if cert, _ := s.get(nil); cert == nil {
				s.logger.Warn("waiting for the TLS certificate of tls.secretName", "secret", s.name, "err", err)
			} else {
				s.logger.Error("the Secret of tls.secretName cannot be used; keeping the previous certificate", "secret", s.name, "err", err)
			}
		}
		timer := time.NewTimer(s.pause(err))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (s *secretCertificate) pause(err error) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || s.current.Leaf.NotAfter.Sub(s.now()) < secretNear {
		return secretRetry
	}
	return secretPause
}

// read takes the certificate of the Secret as it is now.
func (s *secretCertificate) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, secretTimeout)
	defer cancel()
	secret, err := s.secrets.Get(ctx, s.name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading the Secret: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && secret.ResourceVersion == s.version {
		return nil
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return fmt.Errorf("reading the certificate of the Secret: %w", err)
	}
	s.logger.Info("using the TLS certificate of the Secret", "secret", s.name, "until", pair.Leaf.NotAfter)
	s.current, s.version = &pair, secret.ResourceVersion
	return nil
}

// get returns the certificate that was read last.
func (s *secretCertificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		return nil, errNoCertificate
	}
	return s.current, nil
}

// Names of the webhook's objects, which are the same in every installation.
const (
	webhookName      = "latticekeep-webhook" // of its Service and its ValidatingWebhookConfiguration
	webhookTLSSecret = "latticekeep-webhook-tls"
)

// servingCertificates are those that the operator makes when tls.secretName is
// set: for this server, where its Service and users have it, and for the
// webhook if there is one.
func servingCertificates(s config.Config, namespace string) []cluster.Certificate {
	own := serviceNames("latticekeep", namespace)
	if u, err := url.Parse(s.PublicURL); err == nil {
		host := strings.ToLower(u.Hostname())
		_, err := netip.ParseAddr(host)
		if err != nil && len(validation.IsDNS1123Subdomain(host)) == 0 && !slices.Contains(own, host) {
			own = append(own, host)
		}
	}
	all := []cluster.Certificate{{SecretName: s.TLS.SecretName, DNSNames: own}}
	if s.Kubernetes.Webhook {
		all = append(all, cluster.Certificate{
			SecretName: webhookTLSSecret, DNSNames: serviceNames(webhookName, namespace), WebhookConfiguration: webhookName,
		})
	}
	return all
}

// serviceNames are what a Service is called inside its cluster.
func serviceNames(service, namespace string) []string {
	short := service + "." + namespace
	return []string{short + ".svc", short, short + ".svc.cluster.local"}
}
