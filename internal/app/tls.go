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

// newHandshakeCounter counts TLS handshakes by the group that client and server agree on. The
// counts show whether classical groups can be switched off.
func newHandshakeCounter() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "latticekeep_tls_handshakes_total",
		Help: "TLS handshakes, by the key-exchange group that was negotiated.",
	}, []string{"group"})
}

// tlsConfig returns the TLS configuration of a listener whose certificate is in files. It fails if
// they are missing.
func tlsConfig(s config.TLS, handshakes *prometheus.CounterVec, logger *slog.Logger) (*tls.Config, error) {
	c := &certificate{certFile: s.CertFile, keyFile: s.KeyFile, logger: logger}
	if err := c.load(); err != nil {
		return nil, err
	}
	return listenerTLS(c.get, s.PQRequired, handshakes), nil
}

// listenerTLS returns the TLS configuration of a listener. It allows TLS 1.3 only, whose cipher
// suites are all acceptable. The hybrid of X25519 and ML-KEM-768 comes before the classical groups,
// or replaces them. get returns the certificate for each handshake.
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

// certificate is a pair of files that are renewed from time to time.
type certificate struct {
	certFile, keyFile string
	logger            *slog.Logger

	mu      sync.Mutex
	seen    stamp // state of the files at the last attempt
	current *tls.Certificate
}

// stamp identifies a state of the files.
type stamp struct {
	certTime, keyTime time.Time
	certSize, keySize int64
}

// errNoCertificate ends handshakes while the server waits for its first certificate.
var errNoCertificate = errors.New("there is no TLS certificate yet")

// get returns the certificate in the files. The two files are not replaced in one step, so get
// returns the last valid certificate while they do not match.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.seen
	if now, err := c.stat(); err != nil || now != before {
		if err := c.loadLocked(); err != nil && c.seen != before { // log once for each state, not for each handshake
			c.logger.Error("the new TLS certificate cannot be used; keeping the previous one, if any", "error", err)
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
	c.seen = now // set before reading, so that a change meanwhile is noticed
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

// secretCertificate is the pair in a Secret of type kubernetes.io/tls, which the operator or
// another party renews. It reads only that one Secret, by name.
type secretCertificate struct {
	secrets typedcorev1.SecretInterface
	name    string
	now     func() time.Time
	logger  *slog.Logger

	mu      sync.Mutex
	version string // resource version that current comes from
	current *tls.Certificate
}

// tlsFromSecret returns the certificate of a Secret. run reads the Secret. Handshakes fail until
// the Secret exists, but nothing else waits for it, because the operator in this process may have
// to create it.
func tlsFromSecret(cluster *rest.Config, namespace, name string, now func() time.Time, logger *slog.Logger) (*secretCertificate, error) {
	core, err := typedcorev1.NewForConfig(cluster)
	if err != nil {
		return nil, fmt.Errorf("making a client for tls.secretName: %w", err)
	}
	return &secretCertificate{secrets: core.Secrets(namespace), name: name, now: now, logger: logger}, nil
}

// The Secret is read again after secretPause. The interval is secretRetry while there is no
// certificate, the last read failed, or the certificate expires within secretNear, because a
// working issuer would have renewed it long before.
const (
	secretPause   = time.Minute
	secretRetry   = 2 * time.Second
	secretNear    = time.Hour
	secretTimeout = 10 * time.Second
)

// run reads the Secret repeatedly until ctx ends.
func (s *secretCertificate) run(ctx context.Context) {
	told := ""
	for {
		err := s.read(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			told = ""
		} else if told != err.Error() { // log each kind of error once
			told = err.Error()
			if cert, _ := s.get(nil); cert == nil {
				s.logger.Warn("waiting for the TLS certificate of tls.secretName", "secret", s.name, "error", err)
			} else {
				s.logger.Error("the Secret of tls.secretName cannot be used; keeping the previous certificate", "secret", s.name, "error", err)
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

// read takes the current certificate from the Secret.
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

// get returns the certificate from the last successful read.
func (s *secretCertificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		return nil, errNoCertificate
	}
	return s.current, nil
}

// Names of the webhook's objects. They are the same in every installation.
const (
	webhookName      = "latticekeep-webhook" // name of its Service and its ValidatingWebhookConfiguration
	webhookTLSSecret = "latticekeep-webhook-tls"
)

// servingCertificates returns the certificates that the operator makes when tls.secretName is set:
// one for the names of this server's Service and its public URL, and one for the webhook if there
// is one.
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

// serviceNames returns the DNS names of a Service inside its cluster.
func serviceNames(service, namespace string) []string {
	short := service + "." + namespace
	return []string{short + ".svc", short, short + ".svc.cluster.local"}
}
