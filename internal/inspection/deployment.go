package inspection

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// Deployment is a configuration on its machine.
type Deployment struct {
	Config  config.Config
	Faults  []error // settings that do not go together or cannot be used
	Version string  // version of this program
	Memory  int64   // bytes that the control groups of this process allow; 0: no limit
	// ConfigMap returns the place of checkpoints in the cluster, and Secret reads a certificate from it.
	// Nil: there is no cluster.
	ConfigMap func(chainID string) (keeper.Anchor, error)
	Secret    func(ctx context.Context, name string) (*tls.Certificate, error)
}

// opened is a deployment whose parts are open, as far as they could be opened.
type opened struct {
	Deployment
	store    store.Database // nil: it is not open
	absent   diagnosis.Line // about the store, when it is not open
	why      string         // the same for the parts that need it
	made     bool           // the store has a deployment
	fresh    bool           // there is none: the next start makes one
	postgres *postgres.Store
	chain    *chain.Chain                             // nil: the store has no log, or a server looks
	oldest   func(context.Context) (time.Time, error) // time of the oldest entry; nil: unknown
}

// skip returns the line of a part that needs the store when it is not open.
func (s *opened) skip() diagnosis.Line { return diagnosis.Skip(s.why) }

// folder returns the folder of a bucket's URL.
func folder(bucket string) (path string, ok bool) {
	u, err := url.Parse(bucket)
	if err != nil || u.Scheme != "file" {
		return "", false
	}
	return u.Path, true
}

// size writes a number of bytes for people.
func size(n int64) string {
	for _, unit := range []struct {
		bytes float64
		name  string
	}{{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} {
		if v := float64(n) / unit.bytes; v >= 1 {
			return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + " " + unit.name
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// age writes a time that has passed, or is still to come, for people.
func age(d time.Duration) string {
	switch d = d.Abs(); {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%d days", d/(24*time.Hour))
	case d >= 2*time.Hour:
		return fmt.Sprintf("%d hours", d/time.Hour)
	case d >= 2*time.Minute:
		return fmt.Sprintf("%d minutes", d/time.Minute)
	}
	return fmt.Sprintf("%d seconds", d/time.Second)
}

func instant(at time.Time) string { return at.UTC().Format(time.RFC3339) }

// reach asks a bucket for an object that is not there. A folder that a start makes may be missing as
// long as there is no deployment.
func (s *opened) reach(ctx context.Context, setting, address string) error {
	b, err := objects.OpenExisting(ctx, address)
	if err == nil {
		defer b.Close()
		_, err = b.Exists(ctx, "audit/never-there")
	}
	if errors.Is(err, fault.NotFound) && s.fresh {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", setting, err)
	}
	return nil
}
