package seal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// merge adds sealed values to an existing manifest. It cannot read the values already there.
func (o *sealOptions) merge(ctx context.Context, scopeGiven bool, stdin io.Reader, stdout io.Writer) error {
	m, err := readManifests(o.beside)
	if err != nil {
		return err
	}
	all, err := o.requests(stdin)
	if err != nil {
		return err
	}
	if len(all) > 1 {
		return command.UsageError(fmt.Sprintf("--merge-into takes the values of one Secret, and the manifest has %d", len(all)))
	}
	r := all[0].Request
	defer all[0].zero()
	if !scopeGiven {
		r.Scope = ""
	}
	d, err := o.choose(m, r)
	if err != nil {
		return err
	}
	if err := contradiction(d.obj, r); err != nil {
		return fmt.Errorf("%s: %s: %w", o.beside, title(d.obj), err)
	}
	if problems := sealing.Validate(d.obj, sealing.Expect{}); len(problems) > 0 {
		return fmt.Errorf("%s: %s: %s (latticekeep validate shows all that is wrong)", o.beside, title(d.obj), problems[0])
	}
	doc, err := o.document(ctx)
	if err != nil {
		return err
	}
	if d.obj.Spec.Sealed.KeyID != doc.Key().ID() {
		return fmt.Errorf("%s: %s is sealed for another key than %s, and a manifest has one key: move it to the newest one first (latticekeep reseal)",
			o.beside, title(d.obj), doc.Key().ID())
	}
	if d.obj.Namespace != "" {
		r.Namespace = d.obj.Namespace
	}
	r.Name, r.CredentialType, r.TTLDays, r.Scope = d.obj.Name, d.obj.Spec.CredentialType, d.obj.Spec.TTLDays, scopeOf(d.obj.Spec.Sealed)
	fresh, err := sealing.Seal(doc.Key(), r, time.Now())
	if err != nil {
		return err
	}
	replaced, added, err := m.merge(d, fresh.Spec.Sealed.Values)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", o.beside, title(d.obj), err)
	}
	if problems := sealing.Validate(d.obj, sealing.Expect{Key: doc.Key()}); len(problems) > 0 {
		return fmt.Errorf("%s: %s: %s", o.beside, title(d.obj), problems[0])
	}
	if err := m.write(); err != nil {
		return err
	}
	for _, done := range []struct {
		what string
		keys []string
	}{{"replaced", replaced}, {"added", added}} {
		if len(done.keys) == 0 {
			continue
		}
		if _, err := fmt.Fprintf(stdout, "%s: %s in %s of %s\n", done.what, strings.Join(done.keys, ", "), title(d.obj), o.beside); err != nil {
			return err
		}
	}
	return nil
}

// choose returns the document that the flags name, or the only one with sealed values.
func (o *sealOptions) choose(m *manifests, r sealing.Request) (*manifest, error) {
	all := m.sealed()
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no SealedCredential with sealed values", o.beside)
	}
	if len(all) == 1 {
		return all[0], nil
	}
	named := slices.DeleteFunc(all, func(d *manifest) bool {
		return r.Name != d.obj.Name || r.Namespace != "" && d.obj.Namespace != "" && r.Namespace != d.obj.Namespace
	})
	if len(named) != 1 {
		return nil, fmt.Errorf("%s has several SealedCredentials, and %d of them are of the given name and namespace: name one with --name and --namespace", o.beside, len(named))
	}
	return named[0], nil
}

// contradiction returns an error if a flag contradicts the manifest.
func contradiction(obj *v1beta1.SealedCredential, r sealing.Request) error {
	switch {
	case r.Name != "" && r.Name != obj.Name:
		return errors.New("the manifest is for another name than the one given")
	case r.Namespace != "" && obj.Namespace != "" && r.Namespace != obj.Namespace:
		return errors.New("the manifest is for another namespace than the one given")
	case r.CredentialType != "" && r.CredentialType != obj.Spec.CredentialType:
		return errors.New("the manifest has another credential type than --type")
	case r.Scope != "" && r.Scope != scopeOf(obj.Spec.Sealed):
		return errors.New("the values of the manifest have another scope than --scope, and a scope cannot be changed: seal all of them again")
	case r.TTLDays != 0 && r.TTLDays != obj.Spec.TTLDays:
		return errors.New("the manifest has another TTL than --ttl-days: change spec.ttlDays in it")
	}
	return nil
}

// merge prepares the edits that add values to a document.
func (m *manifests) merge(d *manifest, values map[string]v1beta1.SealedValue) (replaced, added []string, err error) {
	merged := d.obj.DeepCopy()
	for _, key := range slices.Sorted(maps.Keys(values)) {
		v := values[key]
		if _, there := d.obj.Spec.Sealed.Values[key]; there {
			replaced = append(replaced, key)
			err = errors.Join(m.set(d, v.SealedAt.UTC().Format("2006-01-02T15:04:05Z"), "values", key, "sealedAt"), m.set(d, v.Data, "values", key, "data"))
		} else {
			added = append(added, key)
			err = m.add(d, key, v)
		}
		if err != nil {
			return nil, nil, err
		}
		merged.Spec.Sealed.Values[key] = v
	}
	d.obj = merged
	return replaced, added, nil
}
