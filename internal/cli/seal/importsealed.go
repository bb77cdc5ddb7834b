package seal

import (
	"context"
	"crypto/rsa"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/sealedsecrets"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// importOptions are the flags of latticekeep import sealed-secrets.
type importOptions struct {
	keys                   []string // files of the old controller's backup
	credentialType, output string
	source                 sealOptions // source of the sealing key
}

// NewImportCommand returns the import of SealedSecrets, for the group of all imports.
func NewImportCommand() *cobra.Command {
	var o importOptions
	cmd := &cobra.Command{
		Use:   "sealed-secrets FILE...",
		Short: "Turn SealedSecret manifests into SealedCredentials",
		Long: `Sealed-secrets reads SealedSecret manifests (bitnami.com/v1alpha1), opens their values with a backup of the old
controller's keys, and writes a SealedCredential for each, sealed for the vault. The scope stays what it was: strict
becomes Strict, namespace-wide Namespace, and cluster-wide Cluster. The Secret keeps its name, type, labels and
annotations as spec.target. There is no way back.

The backup is what "kubectl get secret -n kube-system -l sealedsecrets.bitnami.com/sealed-secrets-key -o yaml" prints;
keep it off disks that others read, and destroy it after the migration. No value or key is printed or written.

Standard error names what is lost, and the exit status is 0 only if nothing is: a SealedSecret is imported with all
of its values or not at all, and templates with functions (spec.template.data), and labels and
annotations that a target may not have are left out.

A Secret that exists is taken over only when it is annotated with ` + v1beta1.AnnotationAdopt + `: NAME-OF-THE-OBJECT.

The sealing key is given as for "latticekeep seal"; ` + identityFile + ` is looked for in the folder of the first FILE.`,
		Example: `  latticekeep import sealed-secrets --keys backup.yaml --key sealing-key.json sealed-db.yaml > db.yaml
  kubectl get sealedsecrets -n shop -o yaml | latticekeep import sealed-secrets --keys backup.yaml --from-cluster --output sealed/ -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			return o.run(cmd.Context(), files, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.keys, "keys", nil, "`FILE` of the backup of the old controller's keys, - for standard input; may be repeated")
	f.StringVar(&o.credentialType, "type", "imported", "credential type of the objects, such as database")
	f.StringVar(&o.output, "output", "", "folder to write a new file for each object to, overwriting none (default: standard output)")
	o.source.keyFlags(cmd)
	_ = cmd.MarkFlagRequired("keys") // fails only for a flag that is not defined
	return cmd
}

func (o *importOptions) run(ctx context.Context, files []string, stdin io.Reader, stdout, stderr io.Writer) error {
	used := 0
	for _, path := range slices.Concat(o.keys, files) {
		if path == "-" {
			used++
		}
	}
	if used > 1 {
		return command.UsageError("standard input can be read only once: use files for the others")
	}
	keys, err := o.oldKeys(stdin)
	if err != nil {
		return err
	}
	o.source.manifest = files[0] // an identity may be pinned beside it
	doc, err := o.source.document(ctx)
	if err != nil {
		return err
	}
	if o.output != "" {
		if err := os.MkdirAll(o.output, 0o755); err != nil { //nolint:gosec // sealed manifests are for git
			return err // the error names the path
		}
	}

	im := importer{options: o, old: keys, key: doc, stdout: stdout, stderr: stderr}
	for _, path := range files {
		if err := im.file(path, stdin); err != nil {
			return err
		}
	}
	switch {
	case im.lost > 0:
		return fmt.Errorf("imported %d SealedSecrets, with %d losses that are named above", im.imported, im.lost)
	case im.imported == 0:
		return errors.New("the input has no SealedSecret")
	}
	return nil
}

// oldKeys reads the backup of the old controller's private keys.
func (o *importOptions) oldKeys(stdin io.Reader) ([]*rsa.PrivateKey, error) {
	var keys []*rsa.PrivateKey
	for _, path := range o.keys {
		b, err := readInput(path, stdin)
		if err != nil {
			return nil, err
		}
		defer clear(b)
		docs, err := documents(b)
		if err != nil {
			return nil, fmt.Errorf("reading keys from %s: %w", path, err)
		}
		for i, doc := range docs {
			defer clear(doc)
			found, err := sealedsecrets.ParseKeys(doc)
			if err != nil {
				return nil, fmt.Errorf("reading keys from %s: document %d: %w", path, i+1, err)
			}
			keys = append(keys, found...)
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("--keys names no sealing key of Sealed Secrets: give it the Secrets with the label " + sealedsecrets.KeyLabel)
	}
	return keys, nil
}

// importer converts SealedSecrets to SealedCredentials and counts the results.
type importer struct {
	options        *importOptions
	old            []*rsa.PrivateKey
	key            sealing.Document
	stdout, stderr io.Writer

	imported, lost int
}

// lose names on standard error something that is not imported. It returns an error only if writing
// fails.
func (im *importer) lose(what string, why error) error {
	im.lost++
	_, err := fmt.Fprintf(im.stderr, "not imported: %s: %v\n", what, why)
	return err
}

// file imports the SealedSecrets in one file as far as possible.
func (im *importer) file(path string, stdin io.Reader) error {
	b, err := readInput(path, stdin)
	if err != nil {
		return im.lose(path, err)
	}
	docs, err := documents(b)
	if err != nil {
		return im.lose(path, err)
	}
	for i, doc := range docs {
		where := fmt.Sprintf("%s, document %d", path, i+1)
		found, others, err := sealedsecrets.Parse(doc)
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				if err := im.lose(where, errors.New(strings.TrimSpace(line))); err != nil {
					return err
				}
			}
		}
		if others > 0 {
			if _, err := fmt.Fprintf(im.stderr, "skipped: %s: objects of other kinds: %d\n", where, others); err != nil {
				return err
			}
		}
		for _, s := range found {
			if err := im.object(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// object imports one SealedSecret, with all of its values or none.
func (im *importer) object(s *sealedsecrets.SealedSecret) error {
	if err := targetType(corev1.SecretType(s.Spec.Template.Type), "spec.template.type"); err != nil {
		return im.lose(s.Title(), err)
	}
	obj, err := im.seal(s)
	if err != nil {
		return im.lose(s.Title(), err)
	}
	target, left := targetOf(s)
	obj.Spec.Target = target
	if err := sealing.Check(obj); err != nil {
		return im.lose(s.Title(), err)
	}

	text, err := yaml.Marshal(obj)
	if err != nil {
		return fmt.Errorf("encoding manifest: %w", err)
	}
	if im.options.output != "" {
		if err := writeNew(im.options.output, obj, text); err != nil {
			return im.lose(s.Title(), err)
		}
	} else {
		if im.imported > 0 {
			text = slices.Concat([]byte("---\n"), text)
		}
		if _, err := im.stdout.Write(text); err != nil {
			return err
		}
	}
	im.imported++
	for _, why := range left {
		if err := im.lose("a part of "+s.Title(), why); err != nil {
			return err
		}
	}
	return nil
}

// seal opens the values of s and seals them again with the same scope.
func (im *importer) seal(s *sealedsecrets.SealedSecret) (*v1beta1.SealedCredential, error) {
	values, err := s.Open(im.old)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, v := range values {
			v.Zero()
		}
	}()
	return sealing.Seal(im.key.Key(), sealing.Request{
		Namespace:      s.Metadata.Namespace,
		Name:           s.Metadata.Name,
		CredentialType: im.options.credentialType,
		Scope:          s.Scope(),
		Values:         values,
	}, time.Now())
}

// writeNew writes a manifest to a new file named after its namespace and name, which Seal has
// checked.
func writeNew(folder string, obj *v1beta1.SealedCredential, text []byte) (err error) {
	name := obj.Name + ".yaml"
	if obj.Namespace != "" {
		name = obj.Namespace + "." + name
	}
	path := filepath.Join(folder, name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // as its folder
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s exists and is not overwritten: remove it, or give another --output", path)
	}
	if err != nil {
		return err // the error names the path
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// targetOf describes the Secret that the old controller made from s. left names the parts that are
// omitted.
func targetOf(s *sealedsecrets.SealedSecret) (target *v1beta1.Target, left []error) {
	template := s.Spec.Template
	if template.Metadata.Annotations[sealedsecrets.PatchSecret] == "true" {
		return nil, []error{errors.New("spec.template: its values are merged into a Secret of others, which a target never is: spec.target is left out")}
	}
	target = &v1beta1.Target{Name: s.Metadata.Name, Type: v1beta1.SecretType(template.Type)}
	if template.Metadata.Annotations[sealedsecrets.KeepSecret] == "true" {
		target.DeletionPolicy = v1beta1.DeletionRetain
	}
	var lost []error
	target.Labels, lost = allowed("spec.template.metadata", "label", template.Metadata.Labels, v1beta1.MaxLabelBytes)
	left = append(left, lost...)
	target.Annotations, lost = allowed("spec.template.metadata", "annotation", template.Metadata.Annotations, v1beta1.MaxAnnotationBytes)
	left = append(left, lost...)
	target.Immutable = template.Immutable
	for _, k := range slices.Sorted(maps.Keys(template.Data)) {
		left = append(left, fmt.Errorf("spec.template.data: the key %.100q is made by a template with functions: if its reader needs it, "+
			"write it as a key of spec.target.keys, without functions", k))
	}
	return target, left
}
