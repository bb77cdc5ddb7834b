// Package config is the configuration of a production server: its keys, their defaults, where they
// are read from, and the combinations that cannot run. It opens no file that a key names.
package config

import (
	"regexp"
	"time"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// APIKeyVariable names the environment variable that keeps an API key out of
// process lists.
const APIKeyVariable = "LATTICEKEEP_API_KEY"

// Config of a production server. [Load] reads them; docs/reference/configuration.md tells
// of every key. Secrets are in files that the settings name.
type Config struct {
	Listen    string `yaml:"listen"`    // address; default DefaultListen
	PublicURL string `yaml:"publicURL"` // where users reach the service: in mails, and the origin that cookies are for
	DataDir   string `yaml:"dataDir"`   // folder of the embedded database, and of reports

	TLS TLS `yaml:"tls"`

	Operations struct {
		Listen string `yaml:"listen"` // plain HTTP for /healthz, /readyz and /metrics, which then are nowhere else
	} `yaml:"operations"`

	Tracing Tracing `yaml:"tracing"`

	Store Store `yaml:"store"`
	KMS   KMS   `yaml:"kms"`

	Sealing struct {
		KeyLifetime time.Duration `yaml:"keyLifetime"` // of a sealing key until a new one is made; default 720h, 0 never
	} `yaml:"sealing"`

	Backup struct {
		Recipients []string `yaml:"recipients"` // whom backups over the interface go to, age1pq1…; only with these do they carry a key file of the KMS
	} `yaml:"backup"`

	Audit      Audit      `yaml:"audit"`
	Compliance Compliance `yaml:"compliance"`

	SystemKeyFile   string `yaml:"systemKeyFile"`   // takes the first system key, once
	SystemKeySecret string `yaml:"systemKeySecret"` // does so instead: a Secret in kubernetes.namespace, which is created

	Mail struct {
		From string `yaml:"from"` // address of the sender
		SMTP struct {
			Address      string        `yaml:"address"`  // host:port
			Security     mail.Security `yaml:"security"` // starttls (default), tls or none
			Username     string        `yaml:"username"`
			PasswordFile string        `yaml:"passwordFile"`
		} `yaml:"smtp"`
	} `yaml:"mail"`

	Rate struct {
		V1      int `yaml:"v1"`      // requests a minute of a tenant; default 1000
		V2      int `yaml:"v2"`      // likewise; default 5000
		Address int `yaml:"address"` // of strangers from one address; default 1000

		Registrations int `yaml:"registrations"` // of those, registrations; default 30
	} `yaml:"rate"`

	TrustedProxies []string `yaml:"trustedProxies"` // addresses and networks whose X-Forwarded-For is believed

	Registration struct {
		Closed bool `yaml:"closed"` // nobody registers
	} `yaml:"registration"`

	Kubernetes struct {
		Kubeconfig string            `yaml:"kubeconfig"` // of the cluster to be the operator of; default the pod's own
		Namespace  string            `yaml:"namespace"`  // the operator's own; default the pod's, or else latticekeep-system
		Namespaces map[string]string `yaml:"namespaces"` // namespace: id of the tenant it is part of

		Workers          int  `yaml:"workers"`          // objects that are reconciled at the same time; default 16
		RestartWorkloads bool `yaml:"restartWorkloads"` // restart workloads that ask for it when values change
		Webhook          bool `yaml:"webhook"`          // there is one, whose certificate comes with tls.secretName; default true

		Policy Policy `yaml:"policy"`
	} `yaml:"kubernetes"`
}

// Policy say which SealedCredentials are allowed. What is left out
// allows everything.
type Policy struct {
	MinTTLDays int      `yaml:"minTTLDays"`
	MaxTTLDays int      `yaml:"maxTTLDays"`
	Types      []string `yaml:"types"`
	Scopes     []string `yaml:"scopes"`
}

func (p Policy) SealingPolicy() sealing.Policy {
	policy := sealing.Policy{MinTTLDays: p.MinTTLDays, MaxTTLDays: p.MaxTTLDays, Types: p.Types}
	for _, scope := range p.Scopes {
		policy.Scopes = append(policy.Scopes, v1alpha1.Scope(scope))
	}
	return policy
}

// Tracing say where spans go.
type Tracing struct {
	Endpoint    string  `yaml:"endpoint"`    // URL of a receiver of OTLP over HTTP; none turns tracing off
	SampleRatio float64 `yaml:"sampleRatio"` // of the traces that are kept, over 0 to 1; default 1
}

// TLS say how the listener is encrypted, or who does it instead.
type TLS struct {
	CertFile   string `yaml:"certFile"`   // PEM, with the chain; read again when it changes
	KeyFile    string `yaml:"keyFile"`    // PEM; read again when it changes
	SecretName string `yaml:"secretName"` // has both instead: a Secret in kubernetes.namespace, made by the operator unless it is there
	PQRequired bool   `yaml:"pqRequired"` // refuse the classical key exchanges
	Terminated bool   `yaml:"terminated"` // a proxy in front terminates TLS
}

// DefaultSealingLifetime is how long a deployment that configures nothing seals
// for one key.
const DefaultSealingLifetime = 30 * 24 * time.Hour

func Default() Config {
	var s Config
	s.Listen = DefaultListen
	s.Tracing.SampleRatio = 1
	s.Store.Connections = 16
	s.KMS.CacheTTL = keyring.DefaultCacheTTL
	s.Sealing.KeyLifetime = DefaultSealingLifetime
	s.Audit.Signing = string(audit.SignEntries)
	s.Audit.Verification = DefaultVerification
	s.Audit.Anchor.ConfigMap = DefaultAnchorConfigMap
	s.Mail.SMTP.Security = mail.STARTTLS
	s.Rate.V1, s.Rate.V2, s.Rate.Address, s.Rate.Registrations = 1000, 5000, 1000, 30
	s.Kubernetes.Workers = controllers.DefaultWorkers
	s.Kubernetes.Webhook = true
	return s
}

// A word ends before a capital, and an abbreviation before the word after it.
var (
	camelHump    = regexp.MustCompile(`([a-z])([A-Z])`)
	abbreviation = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
)

// Audit say how the log is signed, proven and kept.
type Audit struct {
	Signing      string        `yaml:"signing"`      // entry (default): a signature for each entry; batch: one for each commit
	Verification time.Duration `yaml:"verification"` // how often all of the log is verified in the background; default 24h, 0 never

	Anchor struct {
		ConfigMap string `yaml:"configMap"` // in kubernetes.namespace; default latticekeep-audit-anchor, empty for none
		Bucket    string `yaml:"bucket"`    // URL of a bucket; empty for none
	} `yaml:"anchor"`

	Retention struct {
		Keep    time.Duration `yaml:"keep"`    // how long entries stay in the database; default 0, for ever
		Archive string        `yaml:"archive"` // URL of the bucket that older ones are moved to
	} `yaml:"retention"`
}

// Compliance say what scores are judged by and where reports are kept.
type Compliance struct {
	Catalogues string `yaml:"catalogues"` // folder of files that replace catalogues of the program by name
	Reports    string `yaml:"reports"`    // URL of a bucket; default the folder reports in dataDir
}

// DefaultVerification is how often a deployment that configures nothing verifies
// all of its log.
const DefaultVerification = 24 * time.Hour

// DefaultAnchorConfigMap keeps the newest checkpoint in a cluster.
const DefaultAnchorConfigMap = "latticekeep-audit-anchor"

// Store say where the data is. The zero value is the embedded database
// in dataDir.
type Store struct {
	URL          string `yaml:"url"`          // postgres://user@host/database?sslmode=verify-full; default the embedded database in dataDir
	PasswordFile string `yaml:"passwordFile"` // holds the password of url; read again for every connection
	Connections  int    `yaml:"connections"`  // to PostgreSQL, at most; default 16
}

// KMS say which key wraps all others.
type KMS struct {
	URL       string        `yaml:"url"`       // file:///path, awskms://…, gcpkms://… or hashivault://…
	Former    []string      `yaml:"former"`    // URLs of keys that still open what latticekeep kms rewrap has not moved yet
	TokenFile string        `yaml:"tokenFile"` // holds the token for hashivault; read again when it changes
	CacheTTL  time.Duration `yaml:"cacheTTL"`  // how long an unwrapped key is used; default 5m
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

// DefaultListen is where a server listens that is told nothing else.
const DefaultListen = "127.0.0.1:8200"
