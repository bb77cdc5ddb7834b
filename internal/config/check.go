package config

import (
	"errors"
	"fmt"
	"io"
	"net"
	netmail "net/mail"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/mail"
)

// check returns all mistakes in the configuration, each with its key. It looks at no files.
func (s *Config) check() error {
	var wrong []error
	need := func(ok bool, format string, args ...any) {
		if !ok {
			wrong = append(wrong, fmt.Errorf(format, args...))
		}
	}
	need(s.DataDir != "" || s.Store.URL != "", "dataDir: name the folder of the database, or in store.url a PostgreSQL")
	need(s.DataDir == "" || s.Store.URL == "", "dataDir: leave it out, since store.url says where the data is")
	need(s.Sealing.KeyLifetime == 0 || s.Sealing.KeyLifetime >= time.Hour, "sealing.keyLifetime: give 0s, which is never, or at least 1h, with its unit")
	need((s.SystemKeyFile == "") != (s.SystemKeySecret == ""),
		"systemKeyFile: name the file that takes the first system key, or in systemKeySecret the Secret that does, and not both")
	need(s.SystemKeySecret == "" || len(validation.IsDNS1123Subdomain(s.SystemKeySecret)) == 0, "systemKeySecret: give the name of a Secret, such as latticekeep-system-key")
	need(checkPublicURL(s.PublicURL),
		"publicURL: give where users reach the service, such as https://vault.example.org, without a path; http only on a loopback address")
	need(s.Rate.V1 > 0, "rate.v1: give at least 1")
	need(s.Rate.V2 > 0, "rate.v2: give at least 1")
	need(s.Rate.Address > 0, "rate.address: give at least 1")
	need(s.Rate.Registrations > 0, "rate.registrations: give at least 1")
	for _, proxy := range s.TrustedProxies {
		_, addrErr := netip.ParseAddr(proxy)
		network, prefixErr := netip.ParsePrefix(proxy)
		need(addrErr == nil || prefixErr == nil, "trustedProxies: %q is neither an address nor a network such as 10.0.0.0/8", proxy)
		need(prefixErr != nil || network.Bits() > 0, "trustedProxies: %q is everybody, who could then call from any address: name the proxy", proxy)
	}
	_, err := s.BackupRecipients()
	need(err == nil, "backup.recipients: %w", err)
	for namespace, tenant := range s.Kubernetes.Namespaces {
		need(namespace != "" && authz.ValidID("ten", tenant), "kubernetes.namespaces: %q: give the id of a tenant, ten_…", namespace)
	}
	for uid, tenant := range s.Kubernetes.NamespacesByUID {
		need(uid != "" && authz.ValidID("ten", tenant), "kubernetes.namespacesByUID: %q: give the id of a tenant, ten_…", uid)
	}
	host, _, err := net.SplitHostPort(s.Operations.Listen)
	need(err == nil || s.Operations.Listen == "", "operations.listen: give host:port")
	need(!s.Operations.Profiling || isLoopback(host),
		"operations.profiling: it needs a loopback address in operations.listen, such as 127.0.0.1:8201, since profiles ask for no key")
	need(s.Kubernetes.Namespace == "" || len(validation.IsDNS1123Label(s.Kubernetes.Namespace)) == 0, "kubernetes.namespace: give the name of a namespace")
	need(s.Kubernetes.Workers > 0, "kubernetes.workers: give at least 1")
	need(s.Kubernetes.LooksPerMinute > 0, "kubernetes.looksPerMinute: give at least 1")
	for _, namespace := range s.Kubernetes.WatchSecrets {
		need(len(validation.IsDNS1123Label(namespace)) == 0, "kubernetes.watchSecrets: %q is not the name of a namespace", namespace)
	}
	return errors.Join(append(wrong, s.Store.check(s.Compliance), s.KMS.check(), s.Audit.check(), s.Backup.check(s.DataDir), s.Compliance.check(), s.Kubernetes.Policy.check(), s.Log.check(), s.Tracing.check(), s.Egress.check(), s.checkListener(), s.checkMail())...)
}

func (p Policy) check() error {
	days := func(n int) bool { return n >= 0 && n <= v1beta1.MaxTTLDays }
	switch {
	case !days(p.MinTTLDays):
		return fmt.Errorf("kubernetes.policy.minTTLDays: give 1 to %d, or 0 for no bound", v1beta1.MaxTTLDays)
	case !days(p.MaxTTLDays):
		return fmt.Errorf("kubernetes.policy.maxTTLDays: give 1 to %d, or 0 for no bound", v1beta1.MaxTTLDays)
	case p.MaxTTLDays != 0 && p.MinTTLDays > p.MaxTTLDays:
		return errors.New("kubernetes.policy.minTTLDays: it is more than maxTTLDays, so no object would be allowed")
	case slices.Contains(p.Types, ""):
		return errors.New("kubernetes.policy.types: one is empty")
	}
	for _, scope := range p.Scopes {
		if !slices.Contains([]v1beta1.Scope{v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster}, v1beta1.Scope(scope)) {
			return fmt.Errorf("kubernetes.policy.scopes: %q is none: give Strict, Namespace or Cluster", scope)
		}
	}
	return nil
}

func (l Log) check() error {
	_, err := l.Logger(io.Discard)
	return err
}

func (t Tracing) check() error {
	if !(t.SampleRatio > 0 && t.SampleRatio <= 1) { // also rejects NaN
		return errors.New("tracing.sampleRatio: give more than 0, and at most 1; to trace nothing leave out tracing.endpoint")
	}
	if t.Endpoint == "" {
		return nil
	}
	u, err := url.Parse(t.Endpoint)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || strings.ContainsAny(t.Endpoint, "?#") {
		return errors.New("tracing.endpoint: give the URL of a receiver of OTLP over HTTP, such as http://collector.monitoring:4318/v1/traces")
	}
	return nil
}

func (s *Config) checkListener() error {
	host, _, err := net.SplitHostPort(s.Listen)
	t := s.TLS
	own := t.CertFile != "" || t.SecretName != "" // this process terminates TLS
	switch {
	case err != nil:
		return errors.New("listen: give host:port")
	case (t.CertFile == "") != (t.KeyFile == ""):
		return errors.New("tls.certFile and tls.keyFile go together: give both or neither")
	case t.SecretName != "" && t.CertFile != "":
		return errors.New("tls.secretName: it takes the place of tls.certFile and tls.keyFile: leave it out, or those")
	case t.SecretName != "" && len(validation.IsDNS1123Subdomain(t.SecretName)) > 0:
		return errors.New("tls.secretName: give the name of a Secret, such as latticekeep-tls")
	case t.Terminated && own:
		return errors.New("tls.terminated: it is for a server without tls.certFile and tls.secretName: leave one out")
	case t.Terminated && len(s.TrustedProxies) == 0:
		return errors.New("tls.terminated: name the proxy in trustedProxies, since all its clients would share one address and so one rate limit")
	case (t.Terminated || own) && strings.HasPrefix(s.PublicURL, "http:"):
		return errors.New("publicURL: it is https when TLS is used, since cookies would go over plain HTTP too")
	case t.PQRequired && !own:
		return errors.New("tls.pqRequired: it needs tls.certFile or tls.secretName, since a proxy decides for itself")
	case !own && !t.Terminated && !isLoopback(host):
		return errors.New("listen: beyond a loopback address give tls.certFile and tls.keyFile, or tls.secretName, or tls.terminated: true behind a proxy that encrypts")
	}
	return nil
}

// checkMail allows a deployment without registration to have no mail server.
func (s *Config) checkMail() error {
	smtp := s.Mail.SMTP
	if smtp.Address == "" {
		if smtp.Username != "" || smtp.PasswordFile != "" {
			return errors.New("mail.smtp.address: name the mail server, host:port")
		}
		if !s.Registration.Closed {
			return errors.New("mail.smtp.address: name the mail server, host:port, or set registration.closed: true")
		}
		return nil
	}
	if (smtp.Username == "") != (smtp.PasswordFile == "") {
		return errors.New("mail.smtp.username and mail.smtp.passwordFile go together: give both or neither")
	}
	if _, err := netmail.ParseAddress(s.Mail.From); err != nil {
		return errors.New("mail.from: give the sender's address, such as Latticekeep <noreply@example.org>")
	}
	if _, err := mail.NewSMTP(mail.SMTPConfig{Address: smtp.Address, Security: smtp.Security}); err != nil {
		return fmt.Errorf("mail.smtp: %w", err)
	}
	return nil
}

func checkPublicURL(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.User != nil || strings.TrimSuffix(u.Path, "/") != "" || strings.ContainsAny(text, "?#'") {
		return false
	}
	return u.Scheme == "https" || u.Scheme == "http" && isLoopback(u.Hostname())
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

func (a Audit) check() error {
	var wrong []error
	need := func(ok bool, text string) {
		if !ok {
			wrong = append(wrong, errors.New(text))
		}
	}
	need(a.Signing == string(writer.SignEntries) || a.Signing == string(writer.SignBatches), "audit.signing: give entry or batch")
	need(a.Verification == 0 || a.Verification >= time.Minute, "audit.verification: give 0s, which is never, or at least 1m, with its unit")
	need(a.Anchor.ConfigMap == "" || len(validation.IsDNS1123Subdomain(a.Anchor.ConfigMap)) == 0,
		"audit.anchor.configMap: give the name of a ConfigMap, such as latticekeep-audit-anchor, or nothing")
	need(isBucket(a.Anchor.Bucket), "audit.anchor.bucket: "+bucketHint)
	r := a.Retention
	need(r.Keep == 0 || r.Keep >= 24*time.Hour, "audit.retention.keep: give 0s, which moves no entry for its age, or at least 24h, with its unit")
	need(r.MaxEntries == 0 || r.MaxEntries >= 10_000, "audit.retention.maxEntries: give 0, which moves no entry for their number, or at least 10000")
	need(isBucket(r.Archive), "audit.retention.archive: "+bucketHint)
	need(r.Archive == "" || r.Keep > 0 || r.MaxEntries > 0,
		"audit.retention: nothing moves to the archive: give keep, such as 2160h, or maxEntries, or leave the archive out")
	chosen := r.Keep != 0 && r.Keep != DefaultKeep || r.MaxEntries != 0 && r.MaxEntries != DefaultMaxEntries
	need(r.Archive != "" || !chosen, "audit.retention.archive: name the bucket that entries are moved to, since none is deleted without its copy")
	return errors.Join(wrong...)
}

func (b Backup) check(dataDir string) error {
	switch {
	case !isBucket(b.Bucket):
		return errors.New("backup.bucket: " + bucketHint)
	case b.Every < time.Hour:
		return errors.New("backup.every: give at least 1h, with its unit")
	case b.Keep != 0 && b.Keep < b.Every:
		return errors.New("backup.keep: give 0s, which is for ever, or at least backup.every, with its unit")
	case b.Bucket == "":
		if b.Scratch != "" {
			return errors.New("backup.scratch: it goes with backup.bucket, which is not set")
		}
		return nil
	case len(b.Recipients) == 0:
		return errors.New("backup.recipients: say who can open the backups in backup.bucket: age1pq1…, as latticekeep backup keygen prints it")
	case b.Scratch == "" && dataDir == "":
		return errors.New("backup.scratch: name a folder with half as much room again as the database takes, in which each backup is restored to verify it")
	}
	return nil
}

func (c Compliance) check() error {
	if !isBucket(c.Reports) {
		return errors.New("compliance.reports: " + bucketHint)
	}
	return nil
}

const bucketHint = "give the URL of a bucket: s3://name?region=…, gs://name or file:///folder"

// isBucket reports whether text is empty or the URL of a bucket.
func isBucket(text string) bool {
	if text == "" {
		return true
	}
	u, err := url.Parse(text)
	if err != nil || u.User != nil {
		return false
	}
	if u.Scheme == "file" {
		return u.Host == "" && strings.HasPrefix(u.Path, "/")
	}
	return slices.Contains([]string{"s3", "gs"}, u.Scheme) && u.Host != ""
}

func (s Store) check(c Compliance) error {
	if s.URL == "" {
		if s.PasswordFile != "" {
			return errors.New("store.passwordFile: it goes with store.url, which is not set")
		}
		return nil
	}
	u, err := url.Parse(s.URL)
	switch {
	case err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql": // the parser's error would repeat a password
		return errors.New("store.url: give postgres://user@host/database, or leave it out for the embedded database")
	case s.Connections < 2:
		return errors.New("store.connections: give at least 2")
	case c.Reports == "":
		return errors.New("compliance.reports: name a bucket, or a folder that all replicas share, since a report is handed out by whichever replica is asked")
	}
	return nil
}

// kmsSchemes are the URL schemes that kms.url may have.
var kmsSchemes = []string{"file", "awskms", "gcpkms", "hashivault"}

const kmsHint = "give file:///path of a key file, awskms://…, gcpkms://… or hashivault://…"

func (k KMS) check() error {
	var wrong []error
	if k.URL == "" {
		wrong = append(wrong, errors.New("kms.url: "+kmsHint))
	} else if err := checkKMS(k.URL); err != nil {
		wrong = append(wrong, fmt.Errorf("kms.url: %w", err))
	}
	for _, former := range k.Former {
		if err := checkKMS(former); err != nil {
			wrong = append(wrong, fmt.Errorf("kms.former: %w", err))
		}
	}
	if k.CacheTTL != 0 && k.CacheTTL < time.Second {
		wrong = append(wrong, errors.New("kms.cacheTTL: give 0s or at least 1s, with its unit"))
	}
	return errors.Join(wrong...)
}

func checkKMS(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New(kmsHint)
	case u.Scheme == "azurekeyvault":
		return errors.New("azurekeyvault wraps with RSA, which a quantum computer opens: use another key-management service, or a key file")
	case !slices.Contains(kmsSchemes, u.Scheme), u.User != nil:
		return errors.New(kmsHint)
	case u.Scheme == "file" && (u.Host != "" || !strings.HasPrefix(u.Path, "/")):
		return errors.New("give the whole path of the key file: file:///etc/latticekeep/kms.key")
	}
	return nil
}
