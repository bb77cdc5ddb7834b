package app

import (
	"context"
	"crypto/tls"
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

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
)

// serving is the line of a production server that scripts read. Its fields
// never change their names.
type serving struct {
	BaseURL  string `json:"base_url"` // of the listener
	DataDir  string `json:"data_dir"`
	Identity string `json:"identity"`
	Chain    string `json:"chain"`
}

// Serve runs a production server with settings of [Load] until ctx ends, and
// returns nil once requests and reconciles in flight have finished. stdout
// takes one JSON line once the server is ready, stderr the log.
func Serve(ctx context.Context, s Settings, stdout, stderr io.Writer) (err error) {
	if s.DataDir, err = filepath.Abs(s.DataDir); err != nil { // for scripts that run elsewhere
		return fmt.Errorf("finding the data directory: %w", err)
	}
	logger := slog.New(slog.NewJSONHandler(stderr, nil))
	h := service{logger: logger, now: time.Now, tenants: make(map[string]authz.TenantID)}
	for namespace, tenant := range s.Kubernetes.Namespaces {
		h.tenants[namespace] = authz.TenantID(tenant)
	}
	if h.mails, h.sender, err = mailsOf(s); err != nil {
		return err
	}
	if h.cluster, err = clusterConfig(s.Kubernetes.Kubeconfig); err != nil {
		return err
	}
	handshakes := newHandshakeCounter()
	var encryption *tls.Config
	if s.TLS.CertFile != "" {
		if encryption, err = tlsConfig(s.TLS, handshakes, logger); err != nil {
			return err
		}
	}
	if ok, err := outside(s.DataDir, s.KMS.KeyFile); err != nil {
		return fmt.Errorf("finding kms.keyFile: %w", err)
	} else if !ok {
		return errors.New("kms.keyFile lies in dataDir, where a copy of the one is a copy of the other: move it elsewhere")
	}
	h.deployment, err = openDeployment(ctx, place{
		dir: s.DataDir, keyFile: s.KMS.KeyFile, cacheTTL: s.KMS.CacheTTL, logger: logger, now: h.now,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.store.Close()) }()
	if s.Registration.Closed {
		h.identity.CloseRegistration()
	}
	err = h.identity.FirstSystemKey(ctx, func(key string) error {
		if err := writeSystemKey(s.SystemKeyFile, key); err != nil {
			return err
		}
		logger.Info("the first system key is written: move it to where you keep passwords", "file", s.SystemKeyFile)
		return nil
	})
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	line := serving{BaseURL: "http://" + l.Addr().String(), DataDir: s.DataDir, Identity: h.keys.Identity().ID(), Chain: h.log.Fingerprint()}
	if encryption != nil {
		line.BaseURL = "https://" + l.Addr().String()
		l = tls.NewListener(l, encryption)
	}
	config := server.Config{
		PublicURL: strings.TrimSuffix(s.PublicURL, "/"), TrustedProxies: s.TrustedProxies, Collectors: []prometheus.Collector{handshakes},
	}
	config.Rates = gate.Rates{V1: s.Rate.V1, V2: s.Rate.V2, Address: s.Rate.Address, Registrations: s.Rate.Registrations}
	return h.run(ctx, l, config, func() {
		logger.Info("ready", "base_url", line.BaseURL, "version", version())
		if err := json.NewEncoder(stdout).Encode(line); err != nil {
			logger.Warn("the ready line could not be written", "err", err)
		}
	})
}

// mailsOf returns who takes mails, and whom they come from.
func mailsOf(s Settings) (mail.Transport, string, error) {
	smtp := s.Mail.SMTP
	if smtp.Address == "" {
		return nowhere{}, devSender, nil
	}
	c := mail.SMTPConfig{Address: smtp.Address, Security: smtp.Security, Username: smtp.Username}
	if smtp.PasswordFile != "" {
		b, err := os.ReadFile(smtp.PasswordFile)
		if err != nil {
			return nil, "", fmt.Errorf("reading mail.smtp.passwordFile: %w", err)
		}
		c.Password = []byte(strings.TrimRight(string(b), "\r\n"))
	}
	t, err := mail.NewSMTP(c)
	if err != nil {
		return nil, "", fmt.Errorf("mail.smtp: %w", err)
	}
	return t, s.Mail.From, nil
}

// nowhere is the transport of a deployment without a mail server.
type nowhere struct{}

// Send drops the mail; the outbox logs that.
func (nowhere) Send(context.Context, mail.Envelope) error {
	return fmt.Errorf("%w: no mail server is configured, see mail.smtp.address", mail.ErrRefused)
}

// writeSystemKey writes the key to a file that must not exist, and returns
// once it is durable.
func writeSystemKey(path, key string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("systemKeyFile exists already, and this deployment has no system key: "+
			"what is in it belongs elsewhere, or is left over from a start that was cut off. Move it away and start again: %w", err)
	} else if err != nil {
		return fmt.Errorf("creating systemKeyFile: %w", err)
	}
	_, err = f.WriteString(key + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("writing systemKeyFile: %w", errors.Join(err, os.Remove(path)))
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("writing systemKeyFile: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}
