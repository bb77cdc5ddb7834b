package config

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
)

// minimal is a configuration with required settings only.
const minimal = `
publicURL: https://vault.example.org
dataDir: /var/lib/latticekeep
kms:
  url: file:///etc/latticekeep/kms.key
systemKeyFile: /run/latticekeep/system.key
registration:
  closed: true
`

// whole sets every key.
const whole = `
listen: 0.0.0.0:8443
publicURL: https://vault.example.org
store:
  url: postgres://vault@db.example.org/vault?sslmode=verify-full
  passwordFile: /etc/latticekeep/database
  connections: 5
tls:
  certFile: /etc/latticekeep/tls.crt
  keyFile: /etc/latticekeep/tls.key
  pqRequired: true
  terminated: false
operations:
  listen: 127.0.0.1:8201
  profiling: true
log:
  level: debug
  format: text
  clientAddress: false
tracing:
  endpoint: http://127.0.0.1:4318/v1/traces
  sampleRatio: 0.25
kms:
  url: gcpkms://projects/p/locations/l/keyRings/r/cryptoKeys/k
  former: ["file:///etc/latticekeep/kms.key"]
  tokenFile: /etc/latticekeep/token
  cacheTTL: 90s
sealing:
  keyLifetime: 24h
backup:
  recipients: [RECIPIENT]
  bucket: s3://backups?region=eu-central-1
  every: 12h
  keep: 240h
  scratch: /var/lib/latticekeep-scratch
audit:
  signing: batch
  verification: 12h
  anchor:
    configMap: vault-anchor
    bucket: gs://anchors
  retention:
    keep: 9000h
    archive: s3://archive?region=eu-central-1
    maxEntries: 250000
compliance:
  catalogues: /etc/latticekeep/catalogues
  reports: gs://reports
systemKeyFile: /run/latticekeep/system.key
mail:
  from: Latticekeep <noreply@example.org>
  smtp:
    address: mail.example.org:465
    security: tls
    username: vault
    passwordFile: /etc/latticekeep/smtp
egress:
  allow: [10.20.0.0/16]
  caFile: /etc/latticekeep/receivers.pem
rate:
  v1: 11
  v2: 12
  address: 13
  registrations: 14
trustedProxies: [10.0.0.0/8, 192.0.2.1]
registration:
  closed: false
kubernetes:
  kubeconfig: /etc/latticekeep/kubeconfig
  namespace: vault
  namespaces:
    shop: ten_aaaaaaaaaaaaaaaaaaaaaaaaaa
  namespacesByUID:
    6f2c5b1e-0000-4000-8000-000000000000: ten_aaaaaaaaaaaaaaaaaaaaaaaaaa
  watchSecrets: [shop]
  workers: 3
  restartWorkloads: true
  webhook: false
  policy:
    minTTLDays: 7
    maxTTLDays: 365
    types: [database, api_key]
    scopes: [Strict, Namespace]
`

// instead lists the keys that whole leaves out because another key replaces them.
var instead = []string{"dataDir", "systemKeySecret", "tls.secretName"}

func settings(t *testing.T, text string, environ []string, flags map[string]string) (Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	text = strings.ReplaceAll(text, "RECIPIENT", anyRecipient(t))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(path, environ, flags)
}

// anyRecipient returns a backup recipient whose identity nobody has.
func anyRecipient(t *testing.T) string {
	t.Helper()
	identity, err := age.GenerateHybridIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return identity.Recipient().String()
}

// shown returns a setting as %v prints it.
func shown(s Config, name string) string {
	for _, k := range s.keys() {
		if k.name == name {
			return fmt.Sprint(k.value.Interface())
		}
	}
	return "there is no such key"
}

func TestAnEmptyKeyHasItsDefault(t *testing.T) {
	s, err := settings(t, minimal, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"listen": "127.0.0.1:8200", "tls.pqRequired": "false", "tls.terminated": "false", "kms.cacheTTL": "5m0s",
		"mail.smtp.security": "starttls", "rate.v1": "1000", "rate.v2": "5000", "rate.address": "1000", "rate.registrations": "30", "trustedProxies": "[]",
		"kubernetes.namespaces": "map[]", "kubernetes.namespacesByUID": "map[]", "kubernetes.workers": "16", "kubernetes.restartWorkloads": "false", "kubernetes.policy.types": "[]",
		"kubernetes.webhook": "true",
		"operations.listen":  "", "log.level": "info", "log.format": "json", "log.clientAddress": "true", "operations.profiling": "false", "tracing.endpoint": "", "tracing.sampleRatio": "1",
		"audit.signing": "entry", "audit.verification": "24h0m0s", "audit.anchor.configMap": "latticekeep-audit-anchor", "audit.anchor.bucket": "",
		"backup.bucket": "", "backup.every": "24h0m0s", "backup.keep": "720h0m0s", "backup.scratch": "",
		"audit.retention.keep": "2160h0m0s", "audit.retention.archive": "", "audit.retention.maxEntries": "1000000", "compliance.reports": "", "compliance.catalogues": "",
	} {
		if got := shown(s, name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestEveryKeyIsReadFromTheFile(t *testing.T) {
	s, err := settings(t, whole, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	none := Config{}
	empty := make(map[string]bool)
	for _, k := range none.keys() {
		empty[k.name] = true
	}
	for _, k := range s.keys() {
		if k.value.IsZero() && k.value.Kind() != reflect.Bool && !slices.Contains(instead, k.name) {
			t.Errorf("%s is empty", k.name)
		}
		delete(empty, k.name)
	}
	if len(empty) != 0 || s.KMS.CacheTTL != 90*time.Second || s.Kubernetes.Namespaces["shop"] == "" || len(s.TrustedProxies) != 2 {
		t.Errorf("%v %+v", empty, s)
	}
}

func TestTheEnvironmentGoesBeforeTheFileAndAFlagBeforeBoth(t *testing.T) {
	for variable, c := range map[string]struct{ value, key, want string }{
		"LATTICEKEEP_LISTEN":                         {"127.0.0.1:1", "listen", "127.0.0.1:1"},
		"LATTICEKEEP_PUBLIC_URL":                     {"https://other.example.org/", "publicURL", "https://other.example.org/"},
		"LATTICEKEEP_TLS_PQ_REQUIRED":                {"false", "tls.pqRequired", "false"},
		"LATTICEKEEP_OPERATIONS_LISTEN":              {"[::1]:1", "operations.listen", "[::1]:1"},
		"LATTICEKEEP_LOG_LEVEL":                      {"warn", "log.level", "warn"},
		"LATTICEKEEP_LOG_FORMAT":                     {"text", "log.format", "text"},
		"LATTICEKEEP_LOG_CLIENT_ADDRESS":             {"true", "log.clientAddress", "true"},
		"LATTICEKEEP_OPERATIONS_PROFILING":           {"false", "operations.profiling", "false"},
		"LATTICEKEEP_TRACING_ENDPOINT":               {"https://traces.example.org", "tracing.endpoint", "https://traces.example.org"},
		"LATTICEKEEP_TRACING_SAMPLE_RATIO":           {"0.5", "tracing.sampleRatio", "0.5"},
		"LATTICEKEEP_KUBERNETES_WORKERS":             {"5", "kubernetes.workers", "5"},
		"LATTICEKEEP_KUBERNETES_NAMESPACE":           {"keep", "kubernetes.namespace", "keep"},
		"LATTICEKEEP_KMS_CACHE_TTL":                  {"0s", "kms.cacheTTL", "0s"},
		"LATTICEKEEP_AUDIT_SIGNING":                  {"entry", "audit.signing", "entry"},
		"LATTICEKEEP_AUDIT_VERIFICATION":             {"0s", "audit.verification", "0s"},
		"LATTICEKEEP_AUDIT_ANCHOR_CONFIG_MAP":        {"other", "audit.anchor.configMap", "other"},
		"LATTICEKEEP_AUDIT_ANCHOR_BUCKET":            {"file:///mnt/anchors", "audit.anchor.bucket", "file:///mnt/anchors"},
		"LATTICEKEEP_AUDIT_RETENTION_KEEP":           {"48h", "audit.retention.keep", "48h0m0s"},
		"LATTICEKEEP_AUDIT_RETENTION_ARCHIVE":        {"file:///mnt/log", "audit.retention.archive", "file:///mnt/log"},
		"LATTICEKEEP_COMPLIANCE_REPORTS":             {"s3://reports", "compliance.reports", "s3://reports"},
		"LATTICEKEEP_MAIL_SMTP_PASSWORD_FILE":        {"/other", "mail.smtp.passwordFile", "/other"},
		"LATTICEKEEP_MAIL_SMTP_SECURITY":             {"starttls", "mail.smtp.security", "starttls"},
		"LATTICEKEEP_EGRESS_ALLOW":                   {"10.21.0.0/16,fd00::/8", "egress.allow", "[10.21.0.0/16 fd00::/8]"},
		"LATTICEKEEP_EGRESS_CA_FILE":                 {"/other.pem", "egress.caFile", "/other.pem"},
		"LATTICEKEEP_RATE_V1":                        {"7", "rate.v1", "7"},
		"LATTICEKEEP_TRUSTED_PROXIES":                {" 10.1.0.0/16, ::1 ", "trustedProxies", "[10.1.0.0/16 ::1]"},
		"LATTICEKEEP_REGISTRATION_CLOSED":            {"true", "registration.closed", "true"},
		"LATTICEKEEP_KUBERNETES_RESTART_WORKLOADS":   {"false", "kubernetes.restartWorkloads", "false"},
		"LATTICEKEEP_KUBERNETES_WEBHOOK":             {"true", "kubernetes.webhook", "true"},
		"LATTICEKEEP_KUBERNETES_POLICY_MIN_TTL_DAYS": {"8", "kubernetes.policy.minTTLDays", "8"},
		"LATTICEKEEP_KUBERNETES_POLICY_MAX_TTL_DAYS": {"9", "kubernetes.policy.maxTTLDays", "9"},
		"LATTICEKEEP_KUBERNETES_POLICY_TYPES":        {"a,b", "kubernetes.policy.types", "[a b]"},
		"LATTICEKEEP_KUBERNETES_POLICY_SCOPES":       {"Cluster", "kubernetes.policy.scopes", "[Cluster]"},
		"LATTICEKEEP_KUBERNETES_NAMESPACES": {"a=ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", "kubernetes.namespaces",
			"map[a:ten_aaaaaaaaaaaaaaaaaaaaaaaaaa]"},
		"LATTICEKEEP_KUBERNETES_NAMESPACES_BY_UID": {"a=ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", "kubernetes.namespacesByUID",
			"map[a:ten_aaaaaaaaaaaaaaaaaaaaaaaaaa]"},
	} {
		s, err := settings(t, whole, []string{"HOME=/root", variable + "=" + c.value}, nil)
		if err != nil {
			t.Errorf("%s: %v", variable, err)
		} else if got := shown(s, c.key); got != c.want {
			t.Errorf("%s: %s is %s, want %s", variable, c.key, got, c.want)
		}
	}
	s, err := settings(t, minimal, []string{"LATTICEKEEP_DATA_DIR=/environment"}, map[string]string{"dataDir": "/flag"})
	if err != nil || s.DataDir != "/flag" {
		t.Error(s.DataDir, err)
	}
	var bare []string // the environment may have all settings
	for _, pair := range []string{"PUBLIC_URL=https://vault.example.org", "DATA_DIR=/d", "KMS_URL=file:///k", "SYSTEM_KEY_FILE=/s", "REGISTRATION_CLOSED=true"} {
		bare = append(bare, "LATTICEKEEP_"+pair)
	}
	if _, err := settings(t, "", bare, nil); err != nil {
		t.Error(err)
	}
}

func TestTheLogHasItsLevelAndFormat(t *testing.T) {
	for _, tc := range []struct {
		log  Log
		want string // of four lines, one of each level
	}{
		{Log{}, `{"level":"INFO","msg":"2"} {"level":"WARN","msg":"3"} {"level":"ERROR","msg":"4"}`},
		{Log{Level: "debug", Format: "text"}, "level=DEBUG msg=1 level=INFO msg=2 level=WARN msg=3 level=ERROR msg=4"},
		{Log{Level: "warn"}, `{"level":"WARN","msg":"3"} {"level":"ERROR","msg":"4"}`},
		{Log{Level: "error", Format: "json"}, `{"level":"ERROR","msg":"4"}`},
	} {
		var out strings.Builder
		logger, err := tc.log.Logger(&out)
		if err != nil {
			t.Fatal(err)
		}
		for i, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
			logger.Log(t.Context(), level, strconv.Itoa(i+1))
		}
		said := regexp.MustCompile(`"?time"?[:=]\S+?[, ]`).ReplaceAllString(out.String(), "")
		if got := strings.Join(strings.Fields(said), " "); got != tc.want {
			t.Errorf("%+v writes\n%s\nwant\n%s", tc.log, got, tc.want)
		}
	}
}

func TestWhatIsUnknownIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		text, variable, says string
	}{
		"a key":               {minimal + "lisen: x", "", "line 9: there is no key lisen"},
		"a key below another": {minimal + "tls:\n  cert: x", "", "line 10: there is no key cert"},
		"a duration":          {minimal + "sealing: {keyLifetime: 5 min}", "", "line 9: `5 min` is not a duration: give one such as 30s, 5m or 24h"},
		"a key in capitals":   {minimal + "Listen: 127.0.0.1:1", "", "no key Listen"},
		"a key twice":         {minimal + "dataDir: /x", "", "already defined"},
		"a second document":   {minimal + "---\nlisten: x", "", "more than one document"},
		"no YAML":             {"{", "", "line 1: did not find expected node content"},
		"an open quote":       {minimal + "listen: \"x\na: b\n", "", "line 9: found unexpected end of stream"},
		"an unknown alias":    {minimal + "listen: *x", "", "line 9: unknown anchor"},
		"a list for a map":    {"tls: [x]", "", "line 1"},
		"a variable":          {minimal, "LATTICEKEEP_LISEN=x", "LATTICEKEEP_LISEN"},
		"a bad number":        {minimal, "LATTICEKEEP_RATE_V1=many", "rate.v1 is a whole number"},
		"a bad ratio":         {minimal, "LATTICEKEEP_TRACING_SAMPLE_RATIO=half", "tracing.sampleRatio is a number"},
		"two databases":       {minimal + "store: {url: \"postgres://vault@127.0.0.1/vault\"}\ncompliance: {reports: \"s3://reports\"}", "", "dataDir: leave it out"},
		"reports nowhere":     {minimal, "LATTICEKEEP_STORE_URL=postgres://vault@127.0.0.1/vault", "compliance.reports: name a bucket"},
		"another database":    {minimal, "LATTICEKEEP_STORE_URL=mysql://vault@127.0.0.1/vault", "store.url: give postgres://user@host/database"},
		"a KMS with RSA":      {minimal, "LATTICEKEEP_KMS_URL=azurekeyvault://vault/keys/k", "wraps with RSA, which a quantum computer opens"},
		"a path for a KMS":    {minimal, "LATTICEKEEP_KMS_URL=/etc/kms.key", "kms.url: give file:///path"},
		"a former path":       {minimal, "LATTICEKEEP_KMS_FORMER=file://kms.key", "kms.former: give the whole path"},
		"a classic recipient": {minimal, "LATTICEKEEP_BACKUP_RECIPIENTS=age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p", "backup.recipients: "},
		"a bad truth":         {minimal, "LATTICEKEEP_TLS_TERMINATED=perhaps", "tls.terminated is true or false"},
		"a bad time":          {minimal, "LATTICEKEEP_KMS_CACHE_TTL=5", "kms.cacheTTL is a time"},
		"a bad map":           {minimal, "LATTICEKEEP_KUBERNETES_NAMESPACES=a", "kubernetes.namespaces is a list"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := settings(t, c.text, []string{c.variable}, nil)
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, want %q", err, c.says)
			}
		})
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none"), nil, nil); err == nil {
		t.Error("a missing file was read")
	}
}

// Because of a Service named latticekeep every pod beside it has variables with our prefix.
func TestVariablesOfKubernetesAndOfOtherCommandsAreNoConfiguration(t *testing.T) {
	_, err := settings(t, minimal, []string{
		"LATTICEKEEP_SERVICE_HOST=10.0.0.1", "LATTICEKEEP_SERVICE_PORT=443", "LATTICEKEEP_SERVICE_PORT_HTTPS=443", "LATTICEKEEP_PORT=tcp://10.0.0.1:443",
		"LATTICEKEEP_PORT_443_TCP=tcp://10.0.0.1:443", "LATTICEKEEP_PORT_443_TCP_ADDR=10.0.0.1", "LATTICEKEEP_WEBHOOK_PORT_443_TCP_PROTO=tcp",
		"LATTICEKEEP_IDENTITY=x", "LATTICEKEEP_API_KEY=x", "LATTICEKEEP_URL=x", "LATTICEKEEP_PROFILE=x",
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range new(Config).keys() {
		if serviceLink.MatchString(k.variable) {
			t.Errorf("%s is taken for a variable of Kubernetes", k.variable)
		}
	}
}

func TestACombinationThatCannotRunIsRefusedByItsKey(t *testing.T) {
	cert := []string{"LATTICEKEEP_TLS_CERT_FILE=/c", "LATTICEKEEP_TLS_KEY_FILE=/k"}
	smtp := []string{"LATTICEKEEP_MAIL_SMTP_ADDRESS=mail.example.org:587", "LATTICEKEEP_MAIL_FROM=a@example.org"}
	for says, environ := range map[string][]string{
		"dataDir: ":       {"LATTICEKEEP_DATA_DIR="},
		"kms.url: ":       {"LATTICEKEEP_KMS_URL="},
		"kms.cacheTTL: ":  {"LATTICEKEEP_KMS_CACHE_TTL=5ns"},
		"systemKeyFile: ": {"LATTICEKEEP_SYSTEM_KEY_FILE="},
		"systemKeyFile: name the file that takes the first system key, or in systemKeySecret": {"LATTICEKEEP_SYSTEM_KEY_SECRET=latticekeep-system-key"},
		"systemKeySecret: ":                     {"LATTICEKEEP_SYSTEM_KEY_FILE=", "LATTICEKEEP_SYSTEM_KEY_SECRET=a/b"},
		"operations.listen: ":                   {"LATTICEKEEP_OPERATIONS_LISTEN=8201"},
		"operations.profiling: it needs":        {"LATTICEKEEP_OPERATIONS_PROFILING=true"},
		"operations.profiling: it needs a ":     {"LATTICEKEEP_OPERATIONS_PROFILING=true", "LATTICEKEEP_OPERATIONS_LISTEN=:8201"},
		"operations.profiling: it needs a loop": {"LATTICEKEEP_OPERATIONS_PROFILING=true", "LATTICEKEEP_OPERATIONS_LISTEN=192.0.2.1:8201"},
		"log.level: give debug, info, warn":     {"LATTICEKEEP_LOG_LEVEL=trace"},
		"log.format: give json or text":         {"LATTICEKEEP_LOG_FORMAT=logfmt"},
		"tracing.endpoint: ":                    {"LATTICEKEEP_TRACING_ENDPOINT=collector:4318"},
		"tracing.endpoint: give":                {"LATTICEKEEP_TRACING_ENDPOINT=grpc://collector:4317"},
		"tracing.endpoint: give the URL":        {"LATTICEKEEP_TRACING_ENDPOINT=http://user:secret@collector:4318"},
		"tracing.endpoint: give the URL of":     {"LATTICEKEEP_TRACING_ENDPOINT=http://collector:4318/?key=secret"},
		"tracing.sampleRatio: ":                 {"LATTICEKEEP_TRACING_SAMPLE_RATIO=0"},
		"tracing.sampleRatio: give":             {"LATTICEKEEP_TRACING_SAMPLE_RATIO=1.5"},
		"tracing.sampleRatio: give more":        {"LATTICEKEEP_TRACING_SAMPLE_RATIO=NaN"},
		"audit.signing: ":                       {"LATTICEKEEP_AUDIT_SIGNING=none"},
		"audit.verification: ":                  {"LATTICEKEEP_AUDIT_VERIFICATION=1s"},
		"audit.anchor.configMap: ":              {"LATTICEKEEP_AUDIT_ANCHOR_CONFIG_MAP=a/b"},
		"audit.anchor.bucket: ":                 {"LATTICEKEEP_AUDIT_ANCHOR_BUCKET=file://relative/folder"},
		"backup.every: give at least 1h":        {"LATTICEKEEP_BACKUP_EVERY=1m"},
		"backup.keep: give 0s":                  {"LATTICEKEEP_BACKUP_KEEP=1h"},
		"backup.bucket: give":                   {"LATTICEKEEP_BACKUP_BUCKET=/backups"},
		"backup.recipients: say who":            {"LATTICEKEEP_BACKUP_BUCKET=s3://backups"},
		"backup.scratch: it goes":               {"LATTICEKEEP_BACKUP_SCRATCH=/scratch"},
		"backup.scratch: name a folder":         {"LATTICEKEEP_DATA_DIR=", "LATTICEKEEP_STORE_URL=postgres://vault@db/vault", "LATTICEKEEP_BACKUP_BUCKET=s3://backups", "LATTICEKEEP_BACKUP_RECIPIENTS=" + anyRecipient(t)},
		"audit.retention.keep: give":            {"LATTICEKEEP_AUDIT_RETENTION_KEEP=1h", "LATTICEKEEP_AUDIT_RETENTION_ARCHIVE=s3://archive"},
		"audit.retention.maxEntries: give":      {"LATTICEKEEP_AUDIT_RETENTION_MAX_ENTRIES=9999", "LATTICEKEEP_AUDIT_RETENTION_ARCHIVE=s3://archive"},
		"audit.retention: nothing moves":        {"LATTICEKEEP_AUDIT_RETENTION_KEEP=0s", "LATTICEKEEP_AUDIT_RETENTION_MAX_ENTRIES=0", "LATTICEKEEP_AUDIT_RETENTION_ARCHIVE=s3://archive"},
		"audit.retention.archive: name the":     {"LATTICEKEEP_AUDIT_RETENTION_KEEP=48h"},
		"audit.retention.archive: name":         {"LATTICEKEEP_AUDIT_RETENTION_MAX_ENTRIES=20000"},
		"audit.retention.archive: give":         {"LATTICEKEEP_AUDIT_RETENTION_KEEP=48h", "LATTICEKEEP_AUDIT_RETENTION_ARCHIVE=s3://key:secret@archive"},
		"compliance.reports: ":                  {"LATTICEKEEP_COMPLIANCE_REPORTS=/folder"},
		"kubernetes.namespace: ":                {"LATTICEKEEP_KUBERNETES_NAMESPACE=Vault"},
		"kubernetes.workers: ":                  {"LATTICEKEEP_KUBERNETES_WORKERS=0"},
		"kubernetes.policy.minTTLDays: ":        {"LATTICEKEEP_KUBERNETES_POLICY_MIN_TTL_DAYS=-1"},
		"kubernetes.policy.maxTTLDays: ":        {"LATTICEKEEP_KUBERNETES_POLICY_MAX_TTL_DAYS=3651"},
		"kubernetes.policy.minTTLDays: it is":   {"LATTICEKEEP_KUBERNETES_POLICY_MIN_TTL_DAYS=31", "LATTICEKEEP_KUBERNETES_POLICY_MAX_TTL_DAYS=30"},
		"kubernetes.policy.scopes: \"strict\"":  {"LATTICEKEEP_KUBERNETES_POLICY_SCOPES=Cluster,strict"},
		"publicURL: ":                           {"LATTICEKEEP_PUBLIC_URL="},
		"publicURL: give":                       {"LATTICEKEEP_PUBLIC_URL=http://vault.example.org"},
		"publicURL: give where":                 {"LATTICEKEEP_PUBLIC_URL=https://vault.example.org/path"},
		"publicURL: give where users":           {"LATTICEKEEP_PUBLIC_URL=https://vault.example.org?a"},
		"publicURL: give where users reach":     {"LATTICEKEEP_PUBLIC_URL=https://u:p@vault.example.org"},
		"publicURL: give where users reach the": {"LATTICEKEEP_PUBLIC_URL=https://vault'.example.org"},
		"rate.v1: ":                             {"LATTICEKEEP_RATE_V1=0"},
		"rate.v2: ":                             {"LATTICEKEEP_RATE_V2=-1"},
		"rate.address: ":                        {"LATTICEKEEP_RATE_ADDRESS=0"},
		"rate.registrations: ":                  {"LATTICEKEEP_RATE_REGISTRATIONS=0"},
		"trustedProxies: ":                      {"LATTICEKEEP_TRUSTED_PROXIES=proxy.example.org"},
		"trustedProxies: \"0.0.0.0/0\" is":      {"LATTICEKEEP_TRUSTED_PROXIES=0.0.0.0/0"},
		"tls.terminated: name the proxy":        {"LATTICEKEEP_TLS_TERMINATED=true"},
		"publicURL: it is https":                append([]string{"LATTICEKEEP_PUBLIC_URL=http://localhost:8200"}, cert...),
		"kubernetes.namespaces: ":               {"LATTICEKEEP_KUBERNETES_NAMESPACES=a=b"},
		"listen: give host:port":                {"LATTICEKEEP_LISTEN=8200"},
		"listen: beyond a loopback address":     {"LATTICEKEEP_LISTEN=:8200"},
		"listen: beyond":                        {"LATTICEKEEP_LISTEN=0.0.0.0:8200"},
		"tls.certFile and tls.keyFile":          cert[:1],
		"tls.terminated: ":                      append([]string{"LATTICEKEEP_TLS_TERMINATED=true"}, cert...),
		"tls.terminated: it is":                 {"LATTICEKEEP_TLS_TERMINATED=true", "LATTICEKEEP_TLS_SECRET_NAME=latticekeep-tls"},
		"tls.secretName: it takes the place":    append([]string{"LATTICEKEEP_TLS_SECRET_NAME=latticekeep-tls"}, cert...),
		"tls.secretName: give the name":         {"LATTICEKEEP_TLS_SECRET_NAME=a/b"},
		"publicURL: it is https when":           {"LATTICEKEEP_TLS_SECRET_NAME=latticekeep-tls", "LATTICEKEEP_PUBLIC_URL=http://localhost:8200"},
		"tls.pqRequired: ":                      {"LATTICEKEEP_TLS_PQ_REQUIRED=true"},
		"mail.smtp.address: ":                   {"LATTICEKEEP_REGISTRATION_CLOSED=false"},
		"mail.smtp.address: name":               {"LATTICEKEEP_MAIL_SMTP_USERNAME=u"},
		"mail.smtp.username and":                append([]string{"LATTICEKEEP_MAIL_SMTP_USERNAME=u"}, smtp...),
		"mail.from: ":                           smtp[:1],
		"mail.smtp: the security":               append([]string{"LATTICEKEEP_MAIL_SMTP_SECURITY=opportunistic"}, smtp...),
		"mail.smtp: ":                           append([]string{"LATTICEKEEP_MAIL_SMTP_SECURITY=none"}, smtp...),
	} {
		if _, err := settings(t, minimal, environ, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, want %q", environ, err, says)
		}
	}
	for name, environ := range map[string][]string{
		"TLS on every address":             append([]string{"LATTICEKEEP_LISTEN=:8443", "LATTICEKEEP_TLS_PQ_REQUIRED=true"}, cert...),
		"a Secret for the system key":      {"LATTICEKEEP_SYSTEM_KEY_FILE=", "LATTICEKEEP_SYSTEM_KEY_SECRET=latticekeep-system-key"},
		"traces of a part of the requests": {"LATTICEKEEP_TRACING_ENDPOINT=https://traces.example.org", "LATTICEKEEP_TRACING_SAMPLE_RATIO=0.01"},
		"a policy with one bound":          {"LATTICEKEEP_KUBERNETES_POLICY_MIN_TTL_DAYS=31"},
		"behind a proxy":                   {"LATTICEKEEP_LISTEN=:8200", "LATTICEKEEP_TLS_TERMINATED=true", "LATTICEKEEP_TRUSTED_PROXIES=10.0.0.1"},
		"a public URL on a port":           {"LATTICEKEEP_PUBLIC_URL=http://localhost:8200/"},
		"a mail server":                    smtp,
	} {
		if _, err := settings(t, minimal, environ, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryKeyIsDocumentedWithItsVariable(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	s := Default()
	for _, k := range s.keys() {
		line := ""
		for l := range strings.Lines(string(doc)) {
			if strings.HasPrefix(l, "| `"+k.name+"` |") {
				line = l
			}
		}
		if !strings.Contains(line, "`"+k.variable+"`") {
			t.Errorf("%s: no row that names it and %s: %q", k.name, k.variable, line)
		}
		if !k.value.IsZero() {
			if want := "`" + strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(fmt.Sprint(k.value.Interface())) + "`"; !strings.Contains(line, want) {
				t.Errorf("%s: its row lacks the default %s", k.name, want)
			}
		}
	}
}
