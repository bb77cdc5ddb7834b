package app

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	netmail "net/mail"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// Settings of a production server. [Load] reads them; docs/reference/configuration.md tells
// of every key. Secrets are in files that the settings name.
type Settings struct {
	Listen    string `yaml:"listen"`    // address; default DefaultListen
	PublicURL string `yaml:"publicURL"` // where users reach the service: in mails, and the origin that cookies are for
	DataDir   string `yaml:"dataDir"`   // folder of the embedded database, and of reports

	TLS TLSSettings `yaml:"tls"`

	Operations struct {
		Listen string `yaml:"listen"` // plain HTTP for /healthz, /readyz and /metrics, which then are nowhere else
	} `yaml:"operations"`

	Tracing TracingSettings `yaml:"tracing"`

	Store StoreSettings `yaml:"store"`
	KMS   KMSSettings   `yaml:"kms"`

	Sealing struct {
		KeyLifetime time.Duration `yaml:"keyLifetime"` // of a sealing key until a new one is made; default 720h, 0 never
	} `yaml:"sealing"`

	Backup struct {
		Recipients []string `yaml:"recipients"` // whom backups over the interface go to, age1pq1…; only with these do they carry a key file of the KMS
	} `yaml:"backup"`

	Audit      AuditSettings      `yaml:"audit"`
	Compliance ComplianceSettings `yaml:"compliance"`

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

		Policy PolicySettings `yaml:"policy"`
	} `yaml:"kubernetes"`
}

// PolicySettings say which SealedCredentials are allowed. What is left out
// allows everything.
type PolicySettings struct {
	MinTTLDays int      `yaml:"minTTLDays"`
	MaxTTLDays int      `yaml:"maxTTLDays"`
	Types      []string `yaml:"types"`
	Scopes     []string `yaml:"scopes"`
}

func (p PolicySettings) policy() sealing.Policy {
	policy := sealing.Policy{MinTTLDays: p.MinTTLDays, MaxTTLDays: p.MaxTTLDays, Types: p.Types}
	for _, scope := range p.Scopes {
		policy.Scopes = append(policy.Scopes, v1alpha1.Scope(scope))
	}
	return policy
}

// TracingSettings say where spans go.
type TracingSettings struct {
	Endpoint    string  `yaml:"endpoint"`    // URL of a receiver of OTLP over HTTP; none turns tracing off
	SampleRatio float64 `yaml:"sampleRatio"` // of the traces that are kept, over 0 to 1; default 1
}

// TLSSettings say how the listener is encrypted, or who does it instead.
type TLSSettings struct {
	CertFile   string `yaml:"certFile"`   // PEM, with the chain; read again when it changes
	KeyFile    string `yaml:"keyFile"`    // PEM; read again when it changes
	SecretName string `yaml:"secretName"` // has both instead: a Secret in kubernetes.namespace, made by the operator unless it is there
	PQRequired bool   `yaml:"pqRequired"` // refuse the classical key exchanges
	Terminated bool   `yaml:"terminated"` // a proxy in front terminates TLS
}

// DefaultSealingLifetime is how long a deployment that configures nothing seals
// for one key.
const DefaultSealingLifetime = 30 * 24 * time.Hour

func defaults() Settings {
	var s Settings
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

// Load reads settings from the YAML file at path, then from the variables of
// environ (as [os.Environ] returns them) whose names begin with LATTICEKEEP_,
// then from flags, by key. The later one wins. A key or variable that does not
// exist is an error, as is a combination that cannot be run.
func Load(path string, environ []string, flags map[string]string) (Settings, error) {
	s := defaults()
	text, err := os.ReadFile(path)
	if err != nil {
		return Settings{}, fmt.Errorf("reading the configuration: %w", err)
	}
	if err := s.readYAML(text); err != nil {
		return Settings{}, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	if err := s.readEnvironment(environ); err != nil {
		return Settings{}, err
	}
	for _, k := range s.keys() {
		if value, ok := flags[k.name]; ok {
			if err := k.set(value); err != nil {
				return Settings{}, err
			}
		}
	}
	if err := s.check(); err != nil {
		return Settings{}, fmt.Errorf("the configuration cannot be used:\n%w", err)
	}
	return s, nil
}

var unknownField = regexp.MustCompile(`field (\S+) not found in type \S+`)

// What a configuration of an earlier release is told.
const (
	insteadOfKeyExchange = "tls.keyExchange is gone: leave it out for preferred, and for required set tls.pqRequired: true"
	insteadOfKeyFile     = "kms.keyFile is gone: give its path as kms.url, file:///path"
)

var insteadOf = strings.NewReplacer("there is no key keyExchange here", insteadOfKeyExchange, "there is no key keyFile here", insteadOfKeyFile)

func (s *Settings) readYAML(text []byte) error {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	err := d.Decode(s)
	if errors.Is(err, io.EOF) {
		return nil // an empty file; the environment may hold everything
	}
	if wrong := new(yaml.TypeError); errors.As(err, &wrong) {
		text := unknownField.ReplaceAllString(strings.Join(wrong.Errors, "\n"), "there is no key $1 here")
		return errors.New(insteadOf.Replace(text))
	} else if err != nil {
		return err
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("it holds more than one document: keep the first")
	}
	return nil
}

const variablePrefix = "LATTICEKEEP_"

// otherVariables are those of other commands, which a shell may have set.
var otherVariables = []string{identityEnv, apiKeyVariable, "LATTICEKEEP_URL"}

// serviceLink matches what Kubernetes sets in every pod of a namespace for a
// Service whose name begins with latticekeep.
var serviceLink = regexp.MustCompile(`_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)

func (s *Settings) readEnvironment(environ []string) error {
	known := make(map[string]key)
	for _, k := range s.keys() {
		known[k.variable] = k
	}
	for _, pair := range environ {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, variablePrefix) || slices.Contains(otherVariables, name) || serviceLink.MatchString(name) {
			continue
		}
		switch name {
		case variableOf("tls.keyExchange"):
			return fmt.Errorf("reading the environment: %s: %s", name, insteadOfKeyExchange)
		case variableOf("kms.keyFile"):
			return fmt.Errorf("reading the environment: %s: %s", name, insteadOfKeyFile)
		}
		k, ok := known[name]
		if !ok {
			return fmt.Errorf("reading the environment: no configuration key belongs to the variable %s: unset it, or mend its name", name)
		}
		if err := k.set(value); err != nil {
			return fmt.Errorf("reading the environment: %s: %w", name, err)
		}
	}
	return nil
}

// key is one setting, by its full name.
type key struct {
	name     string // such as kms.cacheTTL
	variable string // LATTICEKEEP_KMS_CACHE_TTL
	value    reflect.Value
}

// keys returns every key of s, which they set.
func (s *Settings) keys() []key {
	var all []key
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		if v.Kind() != reflect.Struct {
			all = append(all, key{path, variableOf(path), v})
			return
		}
		for i := range v.NumField() {
			name := v.Type().Field(i).Tag.Get("yaml")
			if path != "" {
				name = path + "." + name
			}
			walk(v.Field(i), name)
		}
	}
	walk(reflect.ValueOf(s).Elem(), "")
	return all
}

// A word ends before a capital, and an abbreviation before the word after it.
var (
	camelHump    = regexp.MustCompile(`([a-z])([A-Z])`)
	abbreviation = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
)

func variableOf(name string) string {
	name = abbreviation.ReplaceAllString(camelHump.ReplaceAllString(name, "${1}_$2"), "${1}_$2")
	return variablePrefix + strings.ToUpper(strings.ReplaceAll(name, ".", "_"))
}

// set reads a value as it is written in a variable or after a flag: a list
// with commas, a map as name=value with commas.
func (k key) set(text string) error {
	switch v := k.value.Addr().Interface().(type) {
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%s is true or false", k.name)
		}
		*v = b
	case *int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%s is a whole number", k.name)
		}
		*v = n
	case *float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%s is a number", k.name)
		}
		*v = f
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%s is a time such as 5m", k.name)
		}
		*v = d
	case *[]string:
		*v = fields(text)
	case *map[string]string:
		m := make(map[string]string)
		for _, pair := range fields(text) {
			name, value, ok := strings.Cut(pair, "=")
			if !ok {
				return fmt.Errorf("%s is a list such as name=value,name=value", k.name)
			}
			m[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
		*v = m
	default: // a string, of whatever type
		k.value.SetString(text)
	}
	return nil
}

func fields(text string) (list []string) {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			list = append(list, item)
		}
	}
	return list
}

// check returns everything that is wrong, by key, as far as it shows without
// looking at files.
func (s *Settings) check() error {
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
	_, err := s.backupRecipients()
	need(err == nil, "backup.recipients: %w", err)
	for namespace, tenant := range s.Kubernetes.Namespaces {
		need(namespace != "" && authz.ValidID("ten", tenant), "kubernetes.namespaces: %q: give the id of a tenant, ten_…", namespace)
	}
	if s.Operations.Listen != "" {
		_, _, err := net.SplitHostPort(s.Operations.Listen)
		need(err == nil, "operations.listen: give host:port")
	}
	need(s.Kubernetes.Namespace == "" || len(validation.IsDNS1123Label(s.Kubernetes.Namespace)) == 0, "kubernetes.namespace: give the name of a namespace")
	need(s.Kubernetes.Workers > 0, "kubernetes.workers: give at least 1")
	return errors.Join(append(wrong, s.Store.check(s.Compliance), s.KMS.check(), s.Audit.check(), s.Compliance.check(), s.Kubernetes.Policy.check(), s.Tracing.check(), s.checkListener(), s.checkMail())...)
}

func (p PolicySettings) check() error {
	days := func(n int) bool { return n >= 0 && n <= v1alpha1.MaxTTLDays }
	switch {
	case !days(p.MinTTLDays):
		return fmt.Errorf("kubernetes.policy.minTTLDays: give 1 to %d, or 0 for no bound", v1alpha1.MaxTTLDays)
	case !days(p.MaxTTLDays):
		return fmt.Errorf("kubernetes.policy.maxTTLDays: give 1 to %d, or 0 for no bound", v1alpha1.MaxTTLDays)
	case p.MaxTTLDays != 0 && p.MinTTLDays > p.MaxTTLDays:
		return errors.New("kubernetes.policy.minTTLDays: it is more than maxTTLDays, so no object would be allowed")
	case slices.Contains(p.Types, ""):
		return errors.New("kubernetes.policy.types: one is empty")
	}
	for _, scope := range p.Scopes {
		if !slices.Contains([]v1alpha1.Scope{v1alpha1.ScopeStrict, v1alpha1.ScopeNamespace, v1alpha1.ScopeCluster}, v1alpha1.Scope(scope)) {
			return fmt.Errorf("kubernetes.policy.scopes: %q is none: give Strict, Namespace or Cluster", scope)
		}
	}
	return nil
}

func (t TracingSettings) check() error {
	if !(t.SampleRatio > 0 && t.SampleRatio <= 1) { // false for what is no number, too
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

func (s *Settings) checkListener() error {
	host, _, err := net.SplitHostPort(s.Listen)
	t := s.TLS
	own := t.CertFile != "" || t.SecretName != "" // this process encrypts
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

// checkMail lets a deployment without accounts do without a mail server.
func (s *Settings) checkMail() error {
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
