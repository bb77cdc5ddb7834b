package app

import (
	"errors"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/latticekeep/latticekeep/internal/audit"
)

// AuditSettings say how the log is signed, proven and kept.
type AuditSettings struct {
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

// ComplianceSettings say what scores are judged by and where reports are kept.
type ComplianceSettings struct {
	Catalogues string `yaml:"catalogues"` // folder of files that replace catalogues of the program by name
	Reports    string `yaml:"reports"`    // URL of a bucket; default the folder reports in dataDir
}

// DefaultVerification is how often a deployment that configures nothing verifies
// all of its log.
const DefaultVerification = 24 * time.Hour

// DefaultAnchorConfigMap keeps the newest checkpoint in a cluster.
const DefaultAnchorConfigMap = "latticekeep-audit-anchor"

func (a AuditSettings) check() error {
	var wrong []error
	need := func(ok bool, text string) {
		if !ok {
			wrong = append(wrong, errors.New(text))
		}
	}
	need(a.Signing == string(audit.SignEntries) || a.Signing == string(audit.SignBatches), "audit.signing: give entry or batch")
	need(a.Verification == 0 || a.Verification >= time.Minute, "audit.verification: give 0s, which is never, or at least 1m, with its unit")
	need(a.Anchor.ConfigMap == "" || len(validation.IsDNS1123Subdomain(a.Anchor.ConfigMap)) == 0,
		"audit.anchor.configMap: give the name of a ConfigMap, such as latticekeep-audit-anchor, or nothing")
	need(isBucket(a.Anchor.Bucket), "audit.anchor.bucket: "+bucketHint)
	need(a.Retention.Keep == 0 || a.Retention.Keep >= 24*time.Hour, "audit.retention.keep: give 0s, which is for ever, or at least 24h, with its unit")
	need(isBucket(a.Retention.Archive), "audit.retention.archive: "+bucketHint)
	need(a.Retention.Keep > 0 || a.Retention.Archive == "",
		"audit.retention.keep: say how long entries stay in the database before they move to audit.retention.archive, such as 8760h, or leave the archive out")
	need(a.Retention.Keep == 0 || a.Retention.Archive != "", "audit.retention.archive: name the bucket that entries are moved to, since none is deleted without its copy")
	return errors.Join(wrong...)
}

func (c ComplianceSettings) check() error {
	if !isBucket(c.Reports) {
		return errors.New("compliance.reports: " + bucketHint)
	}
	return nil
}

const bucketHint = "give the URL of a bucket: s3://name?region=…, gs://name, azblob://name or file:///folder"

// isBucket reports whether text is the URL of a bucket, or empty.
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
	return slices.Contains([]string{"s3", "gs", "azblob"}, u.Scheme) && u.Host != ""
}
