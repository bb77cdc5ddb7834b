package inspection

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/volume"
)

// leastMemory is what a server needs for 10,000 credentials.
const leastMemory = 128 << 20

func judgeMemory(limit int64) diagnosis.Line {
	switch {
	case limit == 0:
		return diagnosis.Well("no control group limits this process")
	case limit < leastMemory:
		return diagnosis.Warn("raise the limit to 128 MiB or more", "the control group of this process allows %d MiB", limit>>20)
	}
	return diagnosis.Well("the control group of this process allows %d MiB", limit>>20)
}

// place is a setting that names a file or a folder.
type place struct{ setting, path string }

// folders returns the folders that the settings name.
func (d Deployment) folders() (all []place) {
	c := d.Config
	if c.DataDir != "" {
		all = append(all, place{"dataDir", c.DataDir})
	}
	if c.Backup.Scratch != "" {
		all = append(all, place{"backup.scratch", c.Backup.Scratch})
	}
	for _, b := range []place{{"backup.bucket", c.Backup.Bucket}, {"audit.anchor.bucket", c.Audit.Anchor.Bucket}, {"audit.retention.archive", c.Audit.Retention.Archive}, {"compliance.reports", c.Compliance.Reports}} {
		if path, ok := folder(b.path); ok {
			all = append(all, place{b.setting, path})
		}
	}
	return all
}

// The parts of a volume that should be free, as the alerts LatticekeepDiskFilling and
// LatticekeepDiskFull have them.
const sparePart, leastPart = 5, 20

// disk judges each volume once.
func (s *opened) disk(ctx context.Context) (lines []diagnosis.Line) {
	type folders struct {
		path string
		of   []string
	}
	var volumes []*folders
	known := make(map[uint64]*folders)
	for _, f := range s.folders() {
		path, device, err := existing(f.path)
		if err != nil {
			lines = append(lines, diagnosis.Fail("check the path, and that its volume is mounted", fmt.Errorf("%s: %w", f.setting, err)))
			continue
		}
		if known[device] == nil {
			known[device] = &folders{path: path}
			volumes = append(volumes, known[device])
		}
		known[device].of = append(known[device].of, f.setting)
	}
	for _, v := range volumes {
		lines = append(lines, s.judgeVolume(ctx, v.path, strings.Join(v.of, ", "), v.of[0] == "dataDir"))
	}
	if len(lines) == 0 {
		lines = append(lines, diagnosis.Skip("the settings name no folder on this machine; look at the disk of PostgreSQL"))
	}
	return lines
}

func (s *opened) judgeVolume(ctx context.Context, path, of string, hasDatabase bool) diagnosis.Line {
	total, free, keeps, err := volume.OfPath(path)
	if err != nil {
		return diagnosis.Fail("look at the disk", fmt.Errorf("%s: %w", of, err))
	}
	text := fmt.Sprintf("%s of %s free (%d %%) for %s", size(free), size(total), 100*free/max(total, 1), of)
	if hasDatabase {
		reserve := "; the database file keeps a reserve for reads and removals"
		if !keeps {
			reserve = "; this file system keeps no reserve for a file: while less than the reserve is free on the volume, changes are refused"
		}
		if s.store != nil {
			if u, err := s.store.Usage(ctx); err == nil && u.Reserved {
				return diagnosis.Fail("free space or make the volume larger; a server goes on by itself",
					fmt.Errorf("the disk is full, and only reads and removals are served from what is left of the reserve (%s): %s", size(u.Reserve), text))
			}
		}
		text += reserve
	}
	switch {
	case free < total/leastPart:
		return diagnosis.Fail("make the volume larger now, or remove from it what is not the database", errors.New(text))
	case free < total/sparePart:
		return diagnosis.Warn("make the volume larger, or let old entries move to an archive (audit.retention)", "%s", text)
	}
	return diagnosis.Well("%s", text)
}

// existing returns the path, or the folder above it that exists, and its device.
func existing(path string) (found string, device uint64, err error) {
	for {
		info, err := os.Stat(path)
		if err == nil {
			return path, uint64(info.Sys().(*syscall.Stat_t).Dev), nil //nolint:unconvert // its type depends on the system
		}
		if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(path) == path {
			return "", 0, err
		}
		path = filepath.Dir(path)
	}
}

// files judges the files that hold secrets, and the certificate. A key file of the KMS that is missing
// is judged with the KMS.
func (d Deployment) files() []diagnosis.Line {
	c := d.Config
	secrets := []place{
		{"tls.keyFile", c.TLS.KeyFile}, {"kms.tokenFile", c.KMS.TokenFile}, {"store.passwordFile", c.Store.PasswordFile},
		{"mail.smtp.passwordFile", c.Mail.SMTP.PasswordFile},
	}
	for i, text := range append([]string{c.KMS.URL}, c.KMS.Former...) {
		if path, ok := offline.KMSFile(text); ok && isFile(path) {
			secrets = append(secrets, place{[]string{"kms.url", "kms.former"}[min(i, 1)], path})
		}
	}
	if isFile(c.SystemKeyFile) {
		secrets = append(secrets, place{"systemKeyFile", c.SystemKeyFile})
	}
	var lines []diagnosis.Line
	looked := 0
	for _, f := range append(secrets, place{"tls.certFile", c.TLS.CertFile}) {
		if f.path == "" {
			continue
		}
		looked++
		mode, err := readable(f.path)
		switch {
		case err != nil:
			lines = append(lines, diagnosis.Fail("make the file, and let the user of the server read it", fmt.Errorf("%s: %w", f.setting, err)))
		case mode&0o007 != 0 && f.setting != "tls.certFile":
			lines = append(lines, diagnosis.Warn("run chmod o= on it, and replace what is in it if somebody may have read it",
				"%s: others than its owner and group can open it (mode %04o)", f.setting, mode))
		}
	}
	if looked == 0 {
		return []diagnosis.Line{diagnosis.Well("the settings name none that is there")}
	}
	if len(lines) == 0 {
		lines = append(lines, diagnosis.Well("%d with secrets or certificates: all readable, secrets by nobody else", looked))
	}
	return lines
}

func isFile(path string) bool {
	_, err := os.Stat(path)
	return path != "" && err == nil
}

// readable opens a file, as a server would, and returns its mode.
func readable(path string) (fs.FileMode, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe does not block it
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Mode().Perm(), nil
}

var noCertificate = diagnosis.Well("this process has none: a proxy ends TLS, or only this machine reaches it")

// near is how long before its end a certificate should have been renewed.
const near = 7 * 24 * time.Hour

// fileCertificates judges the certificate in files or in a Secret.
func (d Deployment) fileCertificates(ctx context.Context) []diagnosis.Line {
	c := d.Config.TLS
	switch {
	case c.CertFile != "":
		pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return []diagnosis.Line{diagnosis.Fail("correct tls.certFile and tls.keyFile", fmt.Errorf("reading the TLS certificate: %w", err))}
		}
		return append([]diagnosis.Line{d.judgeCertificate("the server's", &pair, nil)}, d.webhookCertificate(ctx)...)
	case c.SecretName != "" && d.Secret != nil:
		pair, err := d.Secret(ctx, c.SecretName)
		return append([]diagnosis.Line{d.judgeCertificate("the server's", pair, err)}, d.webhookCertificate(ctx)...)
	case c.SecretName != "":
		return []diagnosis.Line{diagnosis.Skip("tls.secretName: no cluster is known")}
	}
	return []diagnosis.Line{noCertificate}
}

// webhookSecret is the Secret of the webhook's certificate.
const webhookSecret = "latticekeep-webhook-tls"

// webhookCertificate judges the webhook's certificate, if the operator makes one.
func (d Deployment) webhookCertificate(ctx context.Context) []diagnosis.Line {
	if d.Secret == nil || d.Config.TLS.SecretName == "" || !d.Config.Kubernetes.Webhook {
		return nil
	}
	pair, err := d.Secret(ctx, webhookSecret)
	d.Config.PublicURL = "" // it has names of its own
	return []diagnosis.Line{d.judgeCertificate("the webhook's", pair, err)}
}

// judgeCertificate judges a certificate that fits its key.
func (d Deployment) judgeCertificate(whose string, c *tls.Certificate, err error) diagnosis.Line {
	if err != nil {
		return diagnosis.Fail("give the process its certificate", fmt.Errorf("%s: %w", whose, err))
	}
	now, leaf := time.Now(), c.Leaf
	switch {
	case now.Before(leaf.NotBefore):
		return diagnosis.Fail("wait, or set the clock right", fmt.Errorf("%s certificate is not valid before %s", whose, instant(leaf.NotBefore)))
	case now.After(leaf.NotAfter):
		return diagnosis.Fail("renew it: clients refuse to connect", fmt.Errorf("%s certificate has expired at %s", whose, instant(leaf.NotAfter)))
	}
	if err := checkChain(c, now); err != nil {
		return diagnosis.Warn("put the certificate first in the file, and after it each one that has issued the one before", "%s certificate: %s", whose, err)
	}
	if u, err := url.Parse(d.Config.PublicURL); err == nil && u.Hostname() != "" && leaf.VerifyHostname(u.Hostname()) != nil {
		return diagnosis.Warn("have the name of publicURL put into the certificate; clients that use it refuse to connect",
			"%s certificate does not name %s, the host of publicURL", whose, u.Hostname())
	}
	if leaf.NotAfter.Sub(now) < near {
		return diagnosis.Warn("see why its issuer has not renewed it", "%s certificate expires at %s, in %s", whose, instant(leaf.NotAfter), age(leaf.NotAfter.Sub(now)))
	}
	return diagnosis.Well("%s certificate is valid until %s", whose, instant(leaf.NotAfter))
}

// checkChain checks that each certificate of a chain has issued the one before.
func checkChain(c *tls.Certificate, now time.Time) error {
	below := c.Leaf
	for _, der := range c.Certificate[1:] {
		issuer, err := x509.ParseCertificate(der)
		switch {
		case err != nil:
			return fmt.Errorf("a certificate of its chain cannot be read: %w", err)
		case below.CheckSignatureFrom(issuer) != nil:
			return fmt.Errorf("%q in its chain has not issued %q, which is before it", issuer.Subject.String(), below.Subject.String())
		case now.After(issuer.NotAfter):
			return fmt.Errorf("%q in its chain has expired at %s", issuer.Subject.String(), instant(issuer.NotAfter))
		}
		below = issuer
	}
	return nil
}
