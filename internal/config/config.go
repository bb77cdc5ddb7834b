// Package config holds the configuration of a production server. It defines the keys, their
// defaults and sources, and the combinations that are not allowed. It opens no file that a key
// names.
package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"regexp"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// APIKeyVariable is the environment variable for an API key. It keeps the key out of process lists.
const APIKeyVariable = "LATTICEKEEP_API_KEY"

// Config is the configuration of a production server. [Load] reads it, and
// docs/reference/configuration.md describes every key. Secrets are in files that the settings name.
type Config struct {
	// Listen is the address to listen on. Beyond loopback it needs tls.certFile, tls.secretName or
	// tls.terminated.
	Listen string `yaml:"listen"`
	// PublicURL is where users reach the service, without a path. It stands in mails and decides
	// about cookies. http is allowed on a loopback address only. Required.
	PublicURL string `yaml:"publicURL"`
	// DataDir is the folder of the embedded database, and of reports. The server makes it if it is
	// missing. Required unless store.url is set.
	DataDir string `yaml:"dataDir"`

	TLS TLS `yaml:"tls"`

	Operations struct {
		// Listen is the address of /healthz, /readyz, /diagnosis and /metrics in plain HTTP, for
		// probes and scrapes inside your network. They are then on no other address.
		Listen string `yaml:"listen"`
		// Profiling adds /debug/pprof/ to operations.listen, which must be a loopback address:
		// profiles show what the process does to everybody who reaches it, but no value.
		Profiling bool `yaml:"profiling"`
	} `yaml:"operations"`

	Log     Log     `yaml:"log"`
	Tracing Tracing `yaml:"tracing"`

	Store Store `yaml:"store"`
	KMS   KMS   `yaml:"kms"`

	Sealing struct {
		// KeyLifetime is how long values are sealed for one sealing key until the server makes a
		// new one. 0s is for ever.
		KeyLifetime time.Duration `yaml:"keyLifetime"`
	} `yaml:"sealing"`

	Backup Backup `yaml:"backup"`

	Audit      Audit      `yaml:"audit"`
	Compliance Compliance `yaml:"compliance"`

	// SystemKeyFile is the file to which the server writes the first system key, once. Required
	// unless systemKeySecret is set.
	SystemKeyFile string `yaml:"systemKeyFile"`
	// SystemKeySecret is a Secret in kubernetes.namespace that takes the first system key instead,
	// under system-key. The server creates it.
	SystemKeySecret string `yaml:"systemKeySecret"`

	Mail struct {
		// From is the address of the sender, with or without a name. Required with
		// mail.smtp.address.
		From string `yaml:"from"`
		SMTP struct {
			// Address is the mail server, host:port. Without one the server drops mails and logs
			// that. Required unless registration.closed is set.
			Address string `yaml:"address"`
			// Security is starttls (which refuses to continue without it), tls from the first byte,
			// or none, to a loopback address only.
			Security mail.Security `yaml:"security"`
			// Username is presented with SCRAM-SHA-256, PLAIN or LOGIN.
			Username string `yaml:"username"`
			// PasswordFile holds the password of mail.smtp.username. A newline at its end does not
			// count.
			PasswordFile string `yaml:"passwordFile"`
		} `yaml:"smtp"`
	} `yaml:"mail"`

	Egress Egress `yaml:"egress"`

	Rate struct {
		// V1 is how many requests a minute one tenant has in /v1.
		V1 int `yaml:"v1"`
		// V2 is how many requests a minute one tenant has in /api/v2.
		V2 int `yaml:"v2"`
		// Address is how many requests a minute all strangers from one address have.
		Address int `yaml:"address"`

		// Registrations is how many registrations a minute one address has. Nothing removes their
		// rows by itself.
		Registrations int `yaml:"registrations"`
	} `yaml:"rate"`

	// TrustedProxies are addresses and networks whose X-Forwarded-For is believed. Without them
	// every client of a proxy shares the proxy's address.
	TrustedProxies []string `yaml:"trustedProxies"`

	Registration struct {
		// Closed refuses registrations: tenants are made with the system key.
		Closed bool `yaml:"closed"`
	} `yaml:"registration"`

	Kubernetes struct {
		// Kubeconfig names the cluster to be the operator of. The default is the pod's own. Outside
		// a cluster and without it there is no operator.
		Kubeconfig string `yaml:"kubeconfig"`
		// Namespace is the operator's own: that of the ConfigMap latticekeep-sealing-key, which
		// claims the cluster, and of systemKeySecret. The default is the pod's, or else
		// latticekeep-system.
		Namespace string `yaml:"namespace"`
		// Namespaces maps namespaces to existing tenants, such as shop: ten_…. Every other
		// namespace is a tenant of its own, and so is one that was deleted and made again under a
		// name of these.
		Namespaces map[string]string `yaml:"namespaces"`
		// NamespacesByUID maps single namespaces, by their UIDs, to existing tenants: one that was
		// deleted and made again then goes on with the tenant of the previous one. Both histories
		// have an entry.
		NamespacesByUID map[string]string `yaml:"namespacesByUID"`

		// Workers is how many objects are reconciled at the same time.
		Workers int `yaml:"workers"`
		// LooksPerMinute is how many target Secrets a minute the operator looks at unasked, above
		// all after a start. A look is one read of the metadata.
		LooksPerMinute int `yaml:"looksPerMinute"`
		// RestartWorkloads restarts workloads that ask for it by annotation when the values of
		// their credential change. It needs the role latticekeep-restart.
		RestartWorkloads bool `yaml:"restartWorkloads"`
		// WatchSecrets are namespaces whose Secrets the operator watches, so that it fixes a target
		// at once. It needs a Role there with list and watch of secrets.
		WatchSecrets []string `yaml:"watchSecrets"`
		// Webhook says that there is an admission webhook, whose certificate comes with
		// tls.secretName. It needs the role latticekeep-certificates.
		Webhook bool `yaml:"webhook"`

		Policy Policy `yaml:"policy"`
	} `yaml:"kubernetes"`
}

// Policy says which SealedCredentials are allowed. An empty field allows everything.
type Policy struct {
	// MinTTLDays is the least spec.ttlDays of a SealedCredential.
	MinTTLDays int `yaml:"minTTLDays"`
	// MaxTTLDays is the greatest spec.ttlDays. An object without it has 90.
	MaxTTLDays int `yaml:"maxTTLDays"`
	// Types are the allowed values of spec.credentialType. Without any, all are allowed.
	Types []string `yaml:"types"`
	// Scopes are the allowed values of spec.sealed.scope: Strict, Namespace, Cluster. Without any,
	// all are allowed.
	Scopes []string `yaml:"scopes"`
}

func (p Policy) SealingPolicy() sealing.Policy {
	policy := sealing.Policy{MinTTLDays: p.MinTTLDays, MaxTTLDays: p.MaxTTLDays, Types: p.Types}
	for _, scope := range p.Scopes {
		policy.Scopes = append(policy.Scopes, v1beta1.Scope(scope))
	}
	return policy
}

// Proxies returns the networks that trustedProxies names.
func (s Config) Proxies() (all []netip.Prefix) {
	for _, text := range s.TrustedProxies {
		if a, err := netip.ParseAddr(text); err == nil {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		} else if p, err := netip.ParsePrefix(text); err == nil { // check refuses anything else
			all = append(all, p)
		}
	}
	return all
}

// Egress says which addresses the server calls because a tenant names them, such as that of a webhook:
// https to public addresses only.
type Egress struct {
	// Allow are networks that may be called although they are not public, such as 10.20.0.0/16. Every
	// tenant can then send requests there, so name nothing that trusts whoever reaches it.
	Allow []string `yaml:"allow"`
	// CAFile holds certificates, PEM, that are trusted there besides those of the system. The server reads
	// it at the start.
	CAFile string `yaml:"caFile"`
}

// Networks returns the networks that egress.allow names.
func (e Egress) Networks() (all []netip.Prefix) {
	for _, text := range e.Allow {
		if p, err := netip.ParsePrefix(text); err == nil { // check refuses anything else
			all = append(all, p)
		}
	}
	return all
}

func (e Egress) check() error {
	for _, text := range e.Allow {
		switch p, err := netip.ParsePrefix(text); {
		case err != nil || p.Masked() != p:
			return fmt.Errorf("egress.allow: %q is not a network such as 10.20.0.0/16", text)
		case p.Bits() == 0:
			return fmt.Errorf("egress.allow: %q is everything, this server included: name the networks of the receivers", text)
		}
	}
	return nil
}

// Log says what a process writes to its log, and how.
type Log struct {
	// Level is the least severity that is logged: debug, info, warn or error. The lines of requests
	// are info.
	Level string `yaml:"level"`
	// Format is the form of each line: json, or text for people.
	Format string `yaml:"format"`
	// ClientAddress has the line of a request name the client's address, as its audit entry does.
	// Without it a flood cannot be traced to who sends it. Leave it out where addresses are personal
	// data that the log must not keep.
	ClientAddress bool `yaml:"clientAddress"`
}

// Logger returns a logger that writes to w, by default lines of JSON from info up.
func (l Log) Logger(w io.Writer) (*slog.Logger, error) {
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	level, known := levels[cmp.Or(l.Level, "info")]
	if !known {
		return nil, errors.New("log.level: give debug, info, warn or error")
	}
	options := &slog.HandlerOptions{Level: level}
	switch cmp.Or(l.Format, "json") {
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	}
	return nil, errors.New("log.format: give json or text")
}

// Tracing says where spans are sent.
type Tracing struct {
	// Endpoint is the URL of a receiver of OpenTelemetry traces, OTLP over HTTP, such as
	// http://collector.monitoring:4318/v1/traces. Without one there are no traces.
	Endpoint string `yaml:"endpoint"`
	// SampleRatio is the share of traces that is sent, more than 0 and at most 1.
	SampleRatio float64 `yaml:"sampleRatio"`
}

// TLS says how the listener is encrypted, or that a proxy does it instead.
type TLS struct {
	// CertFile is a certificate with its chain, PEM. The server reads it again when it changes.
	CertFile string `yaml:"certFile"`
	// KeyFile is the key of the certificate, PEM. The server reads it again when it changes.
	KeyFile string `yaml:"keyFile"`
	// SecretName is a Secret of type kubernetes.io/tls in kubernetes.namespace that replaces both
	// files. The operator makes and renews it, and that of the webhook.
	SecretName string `yaml:"secretName"`
	// PQRequired refuses classical key exchange: only X25519MLKEM768 is allowed. Otherwise it comes
	// first, and classical groups serve older clients.
	PQRequired bool `yaml:"pqRequired"`
	// Terminated says that a proxy in front terminates TLS and reaches this process over a network
	// that nobody else reads. It needs trustedProxies.
	Terminated bool `yaml:"terminated"`
}

// DefaultSealingLifetime is the lifetime of a sealing key when none is configured.
const DefaultSealingLifetime = 30 * 24 * time.Hour

func Default() Config {
	var s Config
	s.Listen = DefaultListen
	s.Log = Log{Level: "info", Format: "json", ClientAddress: true}
	s.Tracing.SampleRatio = 1
	s.Store.Connections = 16
	s.KMS.CacheTTL = keyring.DefaultCacheTTL
	s.Sealing.KeyLifetime = DefaultSealingLifetime
	s.Audit.Signing = string(writer.SignEntries)
	s.Audit.Verification = DefaultVerification
	s.Audit.Anchor.ConfigMap = DefaultAnchorConfigMap
	s.Audit.Retention.Keep, s.Audit.Retention.MaxEntries = DefaultKeep, DefaultMaxEntries
	s.Backup.Every, s.Backup.Keep = 24*time.Hour, 30*24*time.Hour
	s.Mail.SMTP.Security = mail.STARTTLS
	s.Rate.V1, s.Rate.V2, s.Rate.Address, s.Rate.Registrations = 1000, 5000, 1000, 30
	s.Kubernetes.Workers = controllers.DefaultWorkers
	s.Kubernetes.LooksPerMinute = controllers.DefaultLooksPerMinute
	s.Kubernetes.Webhook = true
	return s
}

// A word ends before a capital letter. An abbreviation ends before the next word.
var (
	camelHump    = regexp.MustCompile(`([a-z])([A-Z])`)
	abbreviation = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
)

// Audit says how the log is signed, proven and kept.
type Audit struct {
	// Signing is entry or batch. entry signs each audit entry. batch signs the entries of a commit
	// with one signature, and each entry carries its proof. It may change at any start.
	Signing string `yaml:"signing"`
	// Verification is how often the whole log is verified while the server runs, and also at its
	// start. 0s is never, and scores say so. A start continues the verification of the previous
	// process if that rests on a whole verification no older than twice this, so scores are
	// available at once. Otherwise they are withheld until the whole log is verified.
	Verification time.Duration `yaml:"verification"`

	Anchor struct {
		// ConfigMap is a ConfigMap in kubernetes.namespace that keeps the newest checkpoint, when there is a
		// cluster. Empty for none.
		ConfigMap string `yaml:"configMap"`
		// Bucket is the URL of a bucket that keeps the newest checkpoint, too.
		Bucket string `yaml:"bucket"`
	} `yaml:"anchor"`

	Retention struct {
		// Archive is the URL of the bucket to which old audit entries move, by age and by number.
		// Without one all entries stay in the database.
		Archive string `yaml:"archive"`
		// Keep is how long entries stay in the database, at least 24h. 0s moves none for its age.
		Keep time.Duration `yaml:"keep"`
		// MaxEntries is how many entries stay in the database, at least 10000; the oldest beyond it
		// move before audit.retention.keep, but none that is younger than an hour. An entry takes
		// about 4 KB, and 1 KB with audit.signing batch, so the default is some 4 GB. 0 moves none
		// for their number.
		MaxEntries int `yaml:"maxEntries"`
	} `yaml:"retention"`
}

// Backup says for whom backups are, and where the server puts those that it takes by itself.
type Backup struct {
	// Recipients are those to which backups are encrypted, age1pq1…, and nobody else: one over the
	// interface to that which the caller names, one by the server itself to all of them. Only with
	// these do backups carry the KMS key, if that is a key file.
	Recipients []string `yaml:"recipients"`
	// Bucket is the URL of the bucket into which the server takes backups by itself. It lies outside
	// dataDir. Without one the server takes none.
	Bucket string `yaml:"bucket"`
	// Every is how often the server takes a backup, at least 1h. With several replicas one of them
	// takes it.
	Every time.Duration `yaml:"every"`
	// Keep is how long a backup stays in backup.bucket, at least backup.every. 0s is for ever. The
	// server deletes older ones once a newer one is verified.
	Keep time.Duration `yaml:"keep"`
	// Scratch is the folder in which each backup is restored to verify it. The scratch store needs half
	// as much room again as the database, and is removed. The default is dataDir. Required with
	// backup.bucket and store.url.
	Scratch string `yaml:"scratch"`
}

// Compliance says what scores are judged by and where reports are kept.
type Compliance struct {
	// Catalogues is a folder with files such as soc2.yaml that replace the program's own catalogue
	// of that framework. A malformed file stops the start, and the error names its line.
	Catalogues string `yaml:"catalogues"`
	// Reports is the URL of the bucket that keeps reports. The default is the folder reports in
	// dataDir. Required with store.url.
	Reports string `yaml:"reports"`
}

// DefaultVerification is how often the whole log is verified when nothing else is configured.
const DefaultVerification = 24 * time.Hour

// What stays in the database when there is an archive and nothing else is configured.
const (
	DefaultKeep       = 90 * 24 * time.Hour
	DefaultMaxEntries = 1_000_000
)

// DefaultAnchorConfigMap is the ConfigMap that keeps the newest checkpoint in a cluster.
const DefaultAnchorConfigMap = "latticekeep-audit-anchor"

// Store says where the data is. The zero value is the embedded database in dataDir.
type Store struct {
	// URL is a PostgreSQL that several replicas share: postgres://user@host/database. The default
	// is the embedded database in dataDir.
	URL string `yaml:"url"`
	// PasswordFile holds the password of store.url. The server reads it again for every connection.
	PasswordFile string `yaml:"passwordFile"`
	// Connections is how many connections a replica has to PostgreSQL, at most.
	Connections int `yaml:"connections"`
}

// KMS says which key wraps all others.
type KMS struct {
	// URL is the key that wraps all others: file:///path of a key file, awskms://…, gcpkms://… or
	// hashivault://…. A key file lies outside dataDir, only its owner and group can read it, and
	// the server makes it with mode 0600 at the first start. Required.
	URL string `yaml:"url"`
	// Former is a list of URLs of keys that still open what `latticekeep kms rewrap` has not moved
	// to kms.url yet.
	Former []string `yaml:"former"`
	// TokenFile holds the token for hashivault://…. The server reads it again when it changes.
	TokenFile string `yaml:"tokenFile"`
	// CacheTTL is how long an unwrapped key is used before the server asks the KMS again. With 0s
	// it asks every time.
	CacheTTL time.Duration `yaml:"cacheTTL"`
}

// BackupRecipients returns the recipients that backup.recipients names.
func (s Config) BackupRecipients() (all []backup.Recipient, err error) {
	for _, text := range s.Backup.Recipients {
		r, err := backup.ParseRecipient(text)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// IdentityVariable is the environment variable with the fingerprint of the pinned identity.
const IdentityVariable = "LATTICEKEEP_IDENTITY"

// DefaultListen is the address of a server when none is configured.
const DefaultListen = "127.0.0.1:8200"
