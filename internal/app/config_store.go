package app

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
)

// StoreSettings say where the data is. The zero value is the embedded database
// in dataDir.
type StoreSettings struct {
	URL          string `yaml:"url"`          // postgres://user@host/database?sslmode=verify-full; default the embedded database in dataDir
	PasswordFile string `yaml:"passwordFile"` // holds the password of url; read again for every connection
	Connections  int    `yaml:"connections"`  // to PostgreSQL, at most; default 16
}

// KMSSettings say which key wraps all others.
type KMSSettings struct {
	URL       string        `yaml:"url"`       // file:///path, awskms://…, gcpkms://… or hashivault://…
	Former    []string      `yaml:"former"`    // URLs of keys that still open what latticekeep kms rewrap has not moved yet
	TokenFile string        `yaml:"tokenFile"` // holds the token for hashivault; read again when it changes
	CacheTTL  time.Duration `yaml:"cacheTTL"`  // how long an unwrapped key is used; default 5m
}

func (s StoreSettings) check(c ComplianceSettings) error {
	if s.URL == "" {
		if s.PasswordFile != "" {
			return errors.New("store.passwordFile: it goes with store.url, which is not set")
		}
		return nil
	}
	u, err := url.Parse(s.URL)
	switch {
	case err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql": // the error would repeat a password
		return errors.New("store.url: give postgres://user@host/database, or leave it out for the embedded database")
	case s.Connections < 2:
		return errors.New("store.connections: give at least 2")
	case c.Reports == "":
		return errors.New("compliance.reports: name a bucket, or a folder that all replicas share, since a report is handed out by whichever replica is asked")
	}
	return nil
}

// kmsSchemes are those of kms.url.
var kmsSchemes = []string{"file", "awskms", "gcpkms", "hashivault"}

const kmsHint = "give file:///path of a key file, awskms://…, gcpkms://… or hashivault://…"

func (k KMSSettings) check() error {
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

// kmsFile returns the path of the key file that a URL of kms.url names, if it
// names one.
func kmsFile(text string) (path string, ok bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "file" {
		return "", false
	}
	return u.Path, true
}

// backupRecipients returns the recipients that backup.recipients names.
func (s Settings) backupRecipients() (all []backup.Recipient, err error) {
	for _, text := range s.Backup.Recipients {
		r, err := backup.ParseRecipient(text)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}
