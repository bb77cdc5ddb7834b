package main_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/latticekeep/latticekeep"

// ours says, for every package of the module, which others it may import (not counting its tests). Imports run downward: a package stands
// below everything that may import it. A new package is entered here first. In particular:
//
//   - controllers never imports server, nor the other way round;
//   - envelope and dualsig take bytes and keys and return bytes (see pure);
//   - test/kubetest runs a control plane for tests and for hack/cluster: nothing in the product imports it, nor storetest;
//   - only main and hack/reference import internal/cli, and only internal/cli and the tests of others import internal/app.
var ours = map[string]string{
	".": "internal/cli",
	"internal/cli": "api/v1beta1 config/crd controllers internal/app internal/config internal/buildinfo internal/cli/admin internal/cli/auditlog internal/cli/command " +
		"internal/cli/importer internal/cli/kmsplugin internal/cli/login internal/cli/pods internal/cli/score internal/cli/seal internal/cli/transfer internal/cli/transit internal/cli/vault internal/dumps internal/memory internal/store/format",
	"internal/cli/admin":     "internal/cli/command internal/authz api/client api/openapi/v2",
	"internal/cli/auditlog":  "internal/cli/command internal/config internal/diagnosis api/client api/openapi api/openapi/v2 internal/doctor internal/export internal/offline internal/progress internal/audit internal/audit/guard internal/audit/reader internal/audit/verify internal/audit/writer internal/keyring internal/objects internal/state internal/store internal/fault",
	"internal/cli/importer":  "internal/cli/command api/client api/openapi/v2 internal/dotenv internal/progress",
	"internal/cli/pods":      "api/client internal/agent internal/buildinfo internal/cli/command internal/csi internal/delivery internal/dumps internal/logs internal/volume",
	"internal/cli/kmsplugin": "api/client api/openapi/v2 internal/cli/command internal/backup internal/durable internal/kmsplugin internal/kmsplugin/etcd internal/nodelog internal/dumps internal/envelope internal/logs",
	"internal/dotenv":        "internal/secret",
	"internal/cli/score":     "internal/cli/command api/client api/openapi/v2 internal/export internal/durable internal/compliance internal/audit internal/audit/verify internal/keyring internal/dualsig",
	"internal/cli/seal": "internal/cli/command api/client api/openapi/v2 api/v1alpha1 api/v1beta1 internal/config internal/durable internal/sealing internal/sealedsecrets internal/envelope " +
		"internal/secret",
	"internal/cli/transfer": "internal/cli/command api/openapi/v2 internal/offline internal/durable internal/download internal/progress internal/buildinfo internal/backup internal/backup/commits internal/backup/restore internal/backup/rollback internal/backup/schedule internal/dualsig internal/objects internal/audit internal/audit/verify " +
		"internal/keyring internal/store internal/store/bolt internal/store/commit internal/store/format internal/fault",
	"internal/cli/login":        "internal/cli/command internal/cli/profile api/client api/openapi/v2 internal/secret",
	"internal/cli/profile":      "internal/durable",
	"internal/cli/transit":      "internal/cli/command api/client api/openapi/v2",
	"internal/cli/vault":        "internal/cli/command api/client api/openapi/v2 internal/delivery internal/dotenv internal/fault internal/generate internal/secret",
	"internal/cli/command":      "internal/backup internal/cli/profile internal/secret internal/diagnosis api/openapi/v2 api/client internal/offline internal/audit internal/audit/verify internal/dualsig internal/fault",
	"internal/dumps":            "",
	"internal/canonical":        "",
	"internal/nodelog":          "internal/canonical internal/dualsig internal/durable internal/frame",
	"internal/nodelog/receiver": "internal/nodelog internal/audit internal/audit/guard internal/authz internal/dualsig internal/fault internal/store internal/vault/mac",

	"internal/app": "controllers controllers/admission controllers/cluster server server/gate internal/config internal/offline internal/buildinfo internal/vault internal/vault/pathindex internal/transit internal/names internal/names/past internal/nodelog/receiver internal/vault/mac internal/dryrun internal/identity " +
		"internal/identity/tokenreview internal/connections internal/egress internal/webhooks internal/vault/lifetime internal/mail internal/sealingkey internal/custody internal/backup internal/backup/commits internal/backup/schedule internal/keyring internal/logs internal/audit internal/audit/guard internal/audit/keeper internal/audit/reader internal/audit/verify internal/audit/writer internal/authz " +
		"internal/compliance internal/compliance/assessor internal/compliance/report internal/diagnosis internal/health internal/inspection internal/objects internal/otlp internal/clock internal/quota internal/durable " +
		"internal/sealing internal/kms internal/memory internal/metrics internal/state internal/state/watch internal/store internal/store/bolt internal/store/format internal/store/postgres internal/fault",
	"internal/config":  "api/v1beta1 controllers internal/sealing internal/mail internal/keyring internal/backup internal/audit internal/audit/writer internal/authz",
	"internal/offline": "internal/vault/compare internal/vault internal/identity internal/keyring internal/kms internal/audit internal/audit/verify internal/store internal/store/bolt internal/store/format internal/store/postgres internal/fault",
	"internal/doctor": "internal/vault/compare internal/vault internal/vault/record internal/identity internal/transit internal/keyring internal/state internal/audit internal/audit/entries internal/audit/verify internal/audit/writer internal/authz " +
		"internal/store internal/fault",
	"internal/export":    "api/client api/openapi/v2 internal/download internal/progress internal/objects internal/audit internal/audit/verify internal/authz internal/dualsig",
	"internal/download":  "",
	"internal/progress":  "",
	"internal/durable":   "",
	"internal/volume":    "",
	"internal/health":    "",
	"internal/memory":    "",
	"internal/diagnosis": "internal/buildinfo",
	"internal/inspection": "internal/diagnosis internal/config internal/doctor internal/offline internal/backup/schedule internal/mail internal/audit internal/audit/chain internal/audit/keeper internal/audit/verify internal/audit/writer " +
		"internal/keyring internal/kms internal/objects internal/state/watch internal/store internal/store/bolt internal/volume internal/store/format internal/store/postgres internal/fault",
	"internal/buildinfo": "",

	"server": "api/openapi server/dashboard server/docs server/gate server/v1 server/v2 internal/vault internal/transit internal/identity internal/sealingkey internal/custody internal/keyring " +
		"internal/compliance internal/compliance/assessor internal/backup internal/connections internal/quota internal/audit internal/authz internal/store internal/store/format internal/diagnosis internal/health internal/fault",
	"server/v1": "api/openapi api/openapi/v1 server/gate internal/transit internal/audit internal/audit/reader internal/authz internal/fault internal/secret",
	"server/v2": "api/openapi api/openapi/v2 api/v1beta1 server/gate server/v2/accessapi server/v2/credentials server/v2/webhookapi internal/webhooks internal/vault internal/transit internal/names internal/nodelog internal/nodelog/receiver internal/overview internal/diagnosis internal/dryrun internal/identity internal/identity/device internal/sealingkey internal/custody internal/sealing internal/keyring " +
		"internal/compliance internal/compliance/assessor internal/backup internal/audit internal/audit/guard internal/audit/reader internal/audit/writer internal/authz internal/buildinfo internal/fair internal/fault internal/secret",
	"server/v2/accessapi":   "api/openapi/v2 server/gate internal/authz internal/dryrun internal/fault internal/identity",
	"server/v2/webhookapi":  "api/openapi/v2 server/gate internal/webhooks",
	"server/v2/credentials": "api/openapi/v2 server/gate internal/audit internal/audit/guard internal/settings internal/vault internal/vault/bounds internal/vault/details internal/vault/kept internal/vault/listing internal/authz internal/fault internal/secret",
	"server/asset":          "",
	"server/dashboard":      "server/asset",
	"server/gate":           "internal/connections internal/fair internal/state internal/identity internal/audit internal/audit/guard internal/authz internal/quota internal/fault internal/secret",
	"server/docs":           "server/asset",
	"controllers": "api/v1beta1 controllers/cluster controllers/credential controllers/requeue controllers/restart " +
		"internal/authz internal/fault internal/identity internal/keyring internal/sealing internal/vault",
	"controllers/credential": "api/v1beta1 controllers/requeue internal/authz internal/compose internal/envelope " +
		"internal/fault internal/generate internal/identity internal/keyring internal/sealing internal/secret internal/vault",
	"controllers/cluster":   "api/v1beta1 controllers/requeue internal/fault internal/keyring internal/sealing",
	"controllers/restart":   "api/v1beta1 controllers/requeue",
	"controllers/requeue":   "",
	"controllers/admission": "internal/authz internal/connections api/v1alpha1 api/v1beta1 api/client api/openapi/v2 internal/quota internal/sealing internal/fair internal/fault",

	"api/openapi":    "",
	"api/openapi/v1": "",
	"api/openapi/v2": "",
	"api/client":     "api/openapi/v1 api/openapi/v2",
	"api/v1beta1":    "",
	"api/v1alpha1":   "api/v1beta1",
	"config/crd":     "",

	"internal/vault":                "internal/names/past internal/settings internal/vault/bounds internal/vault/details internal/vault/history internal/vault/idempotency internal/vault/kept internal/vault/lastread internal/vault/lifetime internal/vault/listing internal/vault/nameindex internal/vault/pathindex internal/vault/mac internal/vault/record internal/keyring internal/audit internal/audit/chain internal/audit/guard internal/audit/verify internal/authz internal/state internal/store internal/store/format internal/frame internal/fault internal/secret",
	"internal/settings":             "internal/vault/mac internal/vault/record internal/audit internal/audit/guard internal/authz internal/store internal/store/format internal/fault",
	"internal/vault/compare":        "internal/vault/history internal/vault/kept internal/vault/nameindex internal/vault/record internal/audit internal/audit/verify internal/authz internal/store",
	"internal/vault/bounds":         "internal/fault internal/secret",
	"internal/vault/details":        "internal/vault/mac internal/authz internal/store internal/store/format internal/fault",
	"internal/vault/history":        "internal/vault/mac internal/vault/nameindex internal/vault/record internal/audit internal/authz internal/store",
	"internal/vault/kept":           "internal/vault/mac internal/vault/record internal/audit internal/audit/guard internal/authz internal/state internal/store internal/store/format internal/fault",
	"internal/vault/lifetime":       "internal/vault/mac internal/vault/record internal/audit internal/audit/guard internal/authz internal/state internal/store internal/fault",
	"internal/vault/nameindex":      "internal/vault/mac internal/vault/record internal/authz internal/store",
	"internal/vault/pathindex":      "internal/vault/record internal/authz internal/store internal/store/format",
	"internal/vault/lastread":       "internal/authz internal/store",
	"internal/vault/listing":        "internal/vault/lastread internal/vault/details internal/vault/mac internal/vault/pathindex internal/vault/record internal/authz internal/state internal/store internal/fault",
	"internal/vault/idempotency":    "internal/vault/mac internal/vault/record internal/authz internal/store internal/frame internal/fault internal/secret",
	"internal/vault/mac":            "internal/vault/record internal/keyring internal/store internal/frame",
	"internal/vault/record":         "internal/vault/bounds internal/keyring internal/authz internal/envelope internal/dualsig internal/store internal/frame internal/fault internal/secret",
	"internal/sealingkey":           "api/v1beta1 internal/keyring internal/audit internal/audit/guard internal/audit/reader internal/authz internal/sealing internal/envelope internal/store internal/fault internal/secret",
	"internal/identity/tokenreview": "internal/identity internal/fault",
	"internal/overview":             "internal/audit internal/audit/guard internal/audit/reader internal/authz internal/compliance/assessor internal/diagnosis internal/fair internal/identity internal/transit internal/vault internal/vault/listing",
	"internal/dryrun":               "internal/names/past internal/audit internal/audit/guard internal/audit/reader internal/authz internal/identity/access internal/identity/records internal/state internal/store internal/store/overlay internal/vault/record internal/fault",
	"internal/names/past":           "internal/audit internal/audit/guard internal/settings internal/vault/mac internal/keyring internal/authz internal/state internal/store internal/fault",
	"internal/names":                "internal/names/past internal/audit internal/audit/guard internal/authz internal/identity internal/state internal/store internal/transit internal/vault/record internal/fault",
	"internal/custody":              "internal/keyring internal/kms internal/audit internal/audit/guard internal/authz internal/store internal/fault",
	"internal/transit":              "internal/keyring internal/audit internal/audit/guard internal/authz internal/envelope internal/dualsig internal/state internal/store internal/frame internal/fault internal/secret",
	"internal/identity": "internal/identity/access internal/identity/apikey internal/identity/email internal/identity/password internal/identity/records internal/identity/throttle internal/identity/tenant internal/identity/ticket internal/identity/token " +
		"internal/names/past internal/mail internal/envelope internal/keyring internal/audit internal/audit/guard internal/audit/verify internal/audit/writer internal/authz internal/state internal/store internal/store/format internal/fault internal/secret",
	"internal/identity/access":     "internal/names/past internal/identity/records internal/identity/tenant internal/audit internal/audit/guard internal/authz internal/store internal/store/format internal/fault",
	"internal/identity/apikey":     "internal/identity/records internal/identity/tenant internal/identity/token internal/audit internal/authz internal/store internal/fault",
	"internal/identity/device":     "",
	"internal/identity/email":      "internal/fault",
	"internal/identity/password":   "internal/memory internal/fault internal/secret",
	"internal/identity/records":    "internal/keyring internal/audit internal/audit/guard internal/store internal/frame internal/fault",
	"internal/identity/tenant":     "internal/identity/records internal/keyring internal/audit internal/audit/guard internal/authz internal/store internal/fault",
	"internal/identity/throttle":   "internal/identity/records internal/store",
	"internal/identity/ticket":     "internal/state internal/identity/records internal/identity/token internal/authz internal/store internal/fault",
	"internal/identity/token":      "internal/fault internal/secret",
	"internal/egress":              "internal/fault",
	"internal/outbox":              "internal/authz internal/store",
	"internal/webhooks":            "internal/egress internal/outbox internal/vault/lifetime internal/identity/records internal/keyring internal/audit internal/audit/guard internal/authz internal/envelope internal/store internal/fault internal/secret",
	"internal/mail":                "internal/outbox internal/keyring internal/authz internal/envelope internal/store internal/durable internal/fault internal/secret",
	"internal/keyring":             "internal/backup internal/frame internal/authz internal/sealing internal/envelope internal/dualsig internal/kms internal/store internal/store/format internal/fault internal/secret",
	"internal/audit":               "internal/authz internal/dualsig internal/store internal/frame internal/fault",
	"internal/audit/chain":         "internal/audit internal/audit/entries internal/authz internal/dualsig internal/store internal/fault",
	"internal/audit/entries":       "internal/audit internal/store",
	"internal/audit/writer":        "internal/audit internal/audit/chain internal/audit/entries internal/authz internal/dualsig internal/state internal/store internal/fault",
	"internal/audit/guard":         "internal/audit internal/audit/writer internal/authz internal/store internal/fault",
	"internal/audit/verify":        "internal/audit internal/audit/chain internal/audit/entries internal/audit/writer internal/authz internal/dualsig internal/memory internal/store internal/frame internal/fault",
	"internal/audit/reader":        "internal/audit internal/audit/chain internal/audit/entries internal/audit/guard internal/audit/verify internal/audit/writer internal/authz internal/dualsig internal/store internal/fault",
	"internal/audit/keeper":        "internal/store/format internal/audit internal/audit/chain internal/audit/entries internal/audit/guard internal/audit/reader internal/audit/verify internal/audit/writer internal/authz internal/dualsig internal/objects internal/store internal/fault",
	"internal/compliance":          "internal/audit internal/audit/verify internal/authz internal/buildinfo internal/fault",
	"internal/compliance/assessor": "internal/compliance internal/audit internal/audit/guard internal/audit/reader internal/audit/verify internal/authz internal/store internal/frame internal/fault",
	"internal/compliance/report":   "internal/compliance internal/audit internal/dualsig internal/authz internal/fault",
	"internal/objects":             "internal/google internal/durable internal/fault",
	"internal/otlp":                "",
	"internal/metrics":             "internal/backup/commits internal/backup/schedule internal/store/bolt internal/connections internal/audit/keeper internal/audit/verify internal/audit/writer internal/keyring internal/mail internal/sealingkey internal/store internal/store/postgres internal/fault",
	"internal/sealing":             "api/v1beta1 internal/generate internal/compose internal/envelope internal/dualsig internal/frame internal/fault internal/secret",

	"internal/backup":         "internal/dualsig internal/store internal/frame internal/fault",
	"internal/backup/commits": "internal/backup internal/audit internal/dualsig internal/frame internal/objects internal/state internal/store internal/store/bolt internal/store/commit internal/fault",
	"internal/backup/schedule": "internal/backup internal/backup/commits internal/backup/restore internal/audit internal/audit/guard internal/audit/writer internal/authz internal/keyring internal/objects internal/store " +
		"internal/store/format internal/fault",
	"internal/backup/restore": "internal/backup internal/backup/commits internal/offline internal/keyring internal/audit/verify internal/store internal/store/bolt internal/store/commit internal/store/format",
	"internal/backup/rollback": "internal/names/past internal/webhooks internal/identity internal/settings internal/vault internal/vault/kept internal/vault/record internal/sealingkey internal/compliance/assessor internal/keyring internal/state internal/audit internal/audit/entries internal/audit/guard internal/audit/reader " +
		"internal/audit/verify internal/audit/writer internal/authz internal/store internal/store/bolt internal/store/format internal/fault",
	"internal/generate":      "internal/dualsig internal/fault internal/secret",
	"internal/compose":       "internal/fault internal/secret",
	"internal/sealedsecrets": "api/v1beta1 internal/secret",

	"internal/fair":                    "",
	"internal/logs":                    "",
	"internal/connections":             "internal/authz",
	"internal/quota":                   "internal/clock internal/store internal/fault",
	"internal/clock":                   "internal/fault",
	"internal/authz":                   "",
	"internal/envelope":                "internal/frame internal/secret",
	"internal/dualsig":                 "internal/frame",
	"internal/kms":                     "internal/google internal/durable internal/frame internal/fault",
	"internal/delivery":                "api/client api/openapi/v2 internal/compose internal/dotenv internal/vault/bounds internal/fault internal/secret",
	"internal/csi":                     "api/client internal/delivery internal/fair internal/socket internal/fault internal/secret",
	"internal/agent":                   "api/client internal/delivery internal/fault internal/secret",
	"internal/kmsplugin/etcd":          "internal/durable",
	"internal/socket":                  "internal/durable",
	"internal/kmsplugin":               "internal/canonical internal/kmsplugin/etcd internal/socket internal/nodelog internal/kms internal/envelope internal/dualsig internal/durable internal/frame internal/fault internal/secret",
	"internal/google":                  "internal/fault",
	"internal/state/watch":             "internal/state internal/audit internal/audit/reader internal/audit/writer internal/authz internal/store internal/store/format internal/fault",
	"internal/state":                   "internal/audit internal/audit/entries internal/store internal/frame internal/fault",
	"internal/store":                   "",
	"internal/store/commit":            "internal/store",
	"internal/store/overlay":           "internal/store",
	"internal/store/bolt":              "internal/store internal/store/bolt/pages internal/store/bolt/wal internal/store/commit internal/store/format internal/durable internal/volume internal/fault",
	"internal/store/bolt/pages":        "internal/volume internal/fault",
	"internal/store/bolt/wal":          "internal/durable internal/store/commit internal/volume",
	"internal/store/postgres":          "internal/store internal/store/format internal/store/postgres/address internal/store/postgres/rowcache internal/fault",
	"internal/store/postgres/address":  "",
	"internal/store/postgres/rowcache": "internal/memory",
	"internal/store/format":            "internal/store internal/buildinfo internal/fault",
	"test/storetest":                   "internal/store internal/fault",
	"test/disktest":                    "",

	"internal/frame":  "",
	"internal/fault":  "",
	"internal/secret": "",

	"test/kubetest":        "",
	"test/machine":         "",
	"test/s3test":          "test/kubetest",
	"test/pgtest":          "",
	"test/story":           "internal/compliance internal/audit internal/authz",
	"test/kmstest":         "",
	"test/timing":          "",
	"test/alerts":          "",
	"test/chaos":           "",
	"test/externalsecrets": "",
	"test/audittest": "internal/audit internal/audit/chain internal/audit/entries internal/audit/guard internal/audit/reader internal/audit/verify internal/audit/writer internal/authz internal/dualsig " +
		"internal/fault internal/frame internal/objects internal/store internal/store/bolt internal/store/postgres test/pgtest test/storetest",
	"test/servertest": "internal/nodelog/receiver internal/vault/mac internal/state internal/names internal/names/past internal/dryrun api/openapi api/openapi/v2 internal/audit internal/audit/guard internal/audit/reader internal/audit/verify internal/audit/writer internal/authz internal/backup " +
		"internal/compliance internal/compliance/assessor internal/compliance/report internal/custody internal/dualsig internal/fault " +
		"internal/identity internal/keyring internal/kms internal/health internal/mail internal/objects internal/sealing " +
		"internal/sealingkey internal/secret internal/store internal/store/bolt internal/store/postgres internal/transit internal/vault internal/webhooks server " +
		"server/gate test/pgtest test/statetest test/storetest",
	"test/statetest":    "internal/state internal/store",
	"test/upgrade":      "",
	"test/upgrade/make": "api/client api/openapi/v1 api/openapi/v2 test/kubetest test/upgrade",
	"hack/bench":        "api/client api/openapi/v1 api/openapi/v2 test/pgtest test/kmstest test/kubetest internal/envelope internal/dualsig",
	"hack/cluster":      "test/kubetest",
	"hack/crd":          "",
	"hack/gotest":       "",
	"hack/memscan":      "",
	"hack/messages":     "",
	"hack/pythonclient": "api/openapi",
	"hack/reference":    "internal/cli internal/config",
	"test/logtest":      "internal/offline internal/audit internal/audit/guard internal/audit/reader internal/audit/writer internal/authz internal/store internal/store/bolt internal/dualsig",
	"test/otlptest":     "",
	"hack/e2e/image":    "",
	"hack/e2e/node":     "hack/e2e/image test/kubetest",
	"hack/e2e":          "hack/e2e/image hack/e2e/node",
	"hack/e2e/workload": "",
	"hack/schemas":      "",
}

// vendors says which packages may import a module that is not ours: themselves and everything below them. "tests" means no package at
// all, only tests.
var vendors = map[string]string{
	"github.com/cloudflare/circl": "internal/envelope internal/dualsig",
	"github.com/gin-gonic/gin":    "server",
	"go.etcd.io/bbolt":            "internal/store/bolt",
	"github.com/jackc/pgx/v5":     "internal/store/postgres",
	"github.com/spf13/cobra":      "internal/cli hack/reference",
	"github.com/spf13/pflag":      "internal/cli",

	"github.com/prometheus/client_golang": "server internal/app internal/metrics internal/state/watch controllers",
	"github.com/prometheus/client_model":  "server internal/app",
	"go.opentelemetry.io/otel":            "server internal/app internal/otlp controllers",
	"go.opentelemetry.io/otel/sdk":        "internal/app",
	"go.opentelemetry.io/otel/exporters":  "internal/otlp",
	"go.opentelemetry.io/proto/otlp":      "internal/otlp internal/kmsplugin/etcd test/otlptest",
	"google.golang.org/protobuf":          "internal/otlp internal/kmsplugin/etcd test/otlptest",

	"sigs.k8s.io/controller-runtime":       "controllers internal/app",
	"k8s.io/client-go":                     "controllers internal/app internal/cli internal/identity/tokenreview",
	"k8s.io/api":                           "controllers internal/app internal/cli internal/identity/tokenreview",
	"k8s.io/apimachinery":                  "api/v1alpha1 api/v1beta1 controllers internal/app internal/cli internal/config internal/sealing internal/sealedsecrets internal/identity/tokenreview server/v2",
	"github.com/go-logr/logr":              "controllers",
	"k8s.io/klog/v2":                       "controllers",
	"sigs.k8s.io/secrets-store-csi-driver": "internal/csi",
	"k8s.io/kms":                           "internal/kmsplugin",
	"google.golang.org/grpc":               "internal/csi internal/kmsplugin internal/kmsplugin/etcd", // docs/adr/0041-kms-plugin.md
	"go.etcd.io/etcd/api":                  "internal/kmsplugin/etcd",
	"k8s.io/utils":                         "internal/store/bolt",
	"sigs.k8s.io/yaml":                     "internal/cli internal/sealedsecrets hack/crd hack/schemas",

	"github.com/golang-jwt/jwt/v5":    "internal/identity/token internal/identity/tokenreview",
	"golang.org/x/crypto":             "internal/identity/password",             // argon2id
	"golang.org/x/net":                "internal/identity/email internal/app",   // international domain names; a bound on connections
	"golang.org/x/term":               "internal/cli/command",                   // a password that is typed
	"golang.org/x/text":               "internal/identity/email internal/authz", // PRECIS, form C
	"golang.org/x/time":               "controllers/credential",                 // the pace of looks
	"github.com/wneessen/go-mail":     "internal/mail",
	"go.yaml.in/yaml/v3":              "internal/config internal/cli/seal internal/compliance internal/delivery hack/reference",
	"github.com/oapi-codegen/runtime": "api/openapi server",
	"github.com/getkin/kin-openapi":   "server test/servertest hack/pythonclient",

	"cloud.google.com/go/compute/metadata": "internal/google",
	"golang.org/x/oauth2":                  "internal/google",

	"github.com/aws/aws-sdk-go-v2":        "internal/kms internal/objects",
	"github.com/aws/smithy-go":            "internal/kms internal/objects",
	"github.com/hashicorp/vault/api":      "internal/kms internal/cli/importer",
	"filippo.io/age":                      "internal/backup test/servertest",
	"github.com/anishathalye/porcupine":   "tests",
	"github.com/chromedp/cdproto":         "tests",
	"github.com/chromedp/chromedp":        "tests",
	"golang.org/x/mod":                    "internal/audit internal/export server/v2 test/audittest test/servertest", // RFC 6962 trees and signed notes
	"codeberg.org/go-pdf/fpdf":            "internal/compliance/report",
	"golang.org/x/image":                  "internal/compliance/report", // the Go fonts
	"github.com/CycloneDX/cyclonedx-go":   "internal/compliance/report",
	"github.com/defenseunicorns/go-oscal": "internal/compliance/report",
	"github.com/google/uuid":              "internal/compliance/report",

	"github.com/go-json-experiment/json": "internal/audit server",
	"golang.org/x/sync":                  "internal server/gate server/v2/credentials",
	"golang.org/x/sys":                   "internal/clock internal/dumps",

	"sigs.k8s.io/structured-merge-diff/v6": "controllers/credential", // managedFields of Secrets

	"filippo.io/mldsa":                         "tests",
	"github.com/santhosh-tekuri/jsonschema/v6": "tests",
	"github.com/c2sp/wycheproof":               "tests",
	"github.com/emersion/go-smtp":              "tests",
	"github.com/emersion/go-sasl":              "tests",
	"github.com/rogpeppe/go-internal":          "tests",
}

// pure packages have no context, store, clock, file or network, so that vectors, fuzzers and an offline verifier use the code of the server.
// (They may import time for its type.)
var pure = []string{
	"internal/dotenv", "internal/frame", "internal/envelope", "internal/dualsig", "internal/authz", "internal/generate", "internal/compose", "internal/sealedsecrets",
}

var impure = []string{"context", "os", "net", "net/http", "log", "log/slog", "database/sql"}

// harness packages are the only ones outside tests that may import testing.
var harness = []string{"test/audittest", "test/disktest", "test/kubetest", "test/kmstest", "test/logtest", "test/machine", "test/otlptest", "test/pgtest", "test/s3test", "test/servertest", "test/statetest", "test/storetest", "test/story", "test/timing"}

func TestImportsFollowTheTable(t *testing.T) {
	tree := importsOfTree(t)
	for pkg := range ours {
		if _, ok := tree[pkg]; !ok {
			t.Errorf("the table names %s, which does not exist", pkg)
		}
	}
	for _, pkg := range slices.Sorted(maps.Keys(tree)) {
		allowed, known := ours[pkg]
		if !known {
			t.Errorf("%s is not in the table: enter it with what it may import", pkg)
			continue
		}
		for _, path := range tree[pkg] {
			if own, ok := strings.CutPrefix(path, module+"/"); ok {
				if !slices.Contains(strings.Fields(allowed), own) {
					t.Errorf("%s must not import %s", pkg, own)
				}
				continue
			}
			checkOther(t, pkg, path)
		}
	}
}

func checkOther(t *testing.T, pkg, path string) {
	t.Helper()
	if isStandard(path) {
		if path == "testing" && !slices.Contains(harness, pkg) {
			t.Errorf("%s must not import testing: only tests and %v do", pkg, harness)
		}
		if slices.Contains(pure, pkg) && slices.Contains(impure, path) {
			t.Errorf("%s must not import %s: it is pure", pkg, path)
		}
		return
	}
	for vendor, allowed := range vendors {
		if !within(path, vendor) {
			continue
		}
		if !slices.ContainsFunc(strings.Fields(allowed), func(a string) bool { return within(pkg, a) }) {
			t.Errorf("%s must not import %s: only %s may", pkg, path, allowed)
		}
		return
	}
	t.Errorf("%s imports %s, whose module is not in the table of vendors: enter it with who may", pkg, path)
}

// insideOfLog is what the packages of the log export for each other. Others could sign with it, undo a halt, or accept a rollback without a
// record of a refusal.
var insideOfLog = regexp.MustCompile(`\.(Chain|Detector)\.[A-Z]|\.Sign(Checkpoint|Base|Verified)\(|\.OnAcceptance\b|\b([lL]og|[aA]udit)\.AcceptRollback\(`)

func TestImportsDoNotReachIntoTheLog(t *testing.T) {
	inside := 0
	for _, path := range productFiles(t) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		switch found := insideOfLog.Find(text); {
		case found == nil:
		case strings.HasPrefix(path, "internal/audit/"):
			inside++
		default:
			t.Errorf("%s uses %s: call a method of the log, its guard, its reader or its keepers", path, found)
		}
	}
	if inside == 0 {
		t.Error("nobody reaches into the log: delete this test")
	}
}

// importsOfTree is what each package imports, its tests not counted.
func importsOfTree(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,GoFiles", "./...").Output()
	if err != nil {
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			t.Logf("%s", exit.Stderr)
		}
		t.Fatalf("go list: %v", err)
	}
	tree := map[string][]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath       string
			Imports, GoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("reading the output of go list: %v", err)
		}
		if len(p.GoFiles) == 0 {
			continue // tests only
		}
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		if name == "" {
			name = "."
		}
		tree[name] = p.Imports
	}
	if len(tree) == 0 {
		t.Fatal("go list names no package")
	}
	return tree
}

// isStandard says whether an import path is of the standard library: only others begin with a domain name.
func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// within says whether a path is root or below it.
func within(path, root string) bool {
	return path == root || strings.HasPrefix(path, root+"/")
}
