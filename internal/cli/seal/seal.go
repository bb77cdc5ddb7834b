// Package seal provides the commands that write and check SealedCredential manifests. It edits
// manifests byte by byte, so everything except the sealed values stays as its author wrote it.
package seal

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func NewSealCommand() *cobra.Command {
	var o sealOptions
	cmd := &cobra.Command{
		Use:   "seal",
		Short: "Seal values into a SealedCredential manifest",
		Long: `Seal writes a SealedCredential manifest to standard output. Its values can be opened only by the vault, and by
default only in the object of this namespace, name and credential type; the manifest is safe to keep in git.

Values come from files (--from-file), a v1 Secret manifest (-f) or literals. A literal can be seen in the shell's
history and in the list of processes: prefer a file, or standard input (--from-file KEY=- or -f -).

With --merge-into the values are put into an existing manifest, in place of those with the same data keys or beside the
others, which need not be known. Scope, type, namespace and name are the manifest's, and it has to be sealed
for the same key: latticekeep reseal moves it to the newest one. Comments, order and everything else stay as they are.

A Secret manifest becomes an object whose target is the same Secret: its name, type, labels and annotations. The command
names and leaves out what a target cannot have. A Secret that exists is taken over only when it is annotated with
` + v1beta1.AnnotationAdopt + `: NAME-OF-THE-OBJECT. With --no-target the object has none. A manifest of several Secrets becomes several
objects.

The sealing key comes from a key file, which is trusted as it is, or is fetched from the server or the cluster and then
has to be signed by the pinned identity: that of --identity, of the environment variable ` + config.IdentityVariable + `, or of a
file ` + identityFile + ` ("identity: FINGERPRINT") in the folder of -f or --merge-into or the current folder.`,
		Example: `  latticekeep seal --name db --namespace shop --type database --from-file password=./password --key sealing-key.json
  latticekeep seal -f secret.yaml --type database --url https://vault.example.com > sealed.yaml
  latticekeep seal --merge-into sealed.yaml --from-file password=./password --url https://vault.example.com`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.beside != "" {
				return o.merge(cmd.Context(), cmd.Flags().Changed("scope"), cmd.InOrStdin(), cmd.OutOrStdout())
			}
			if o.credentialType == "" {
				return command.UsageError("--type is needed")
			}
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the object (default: the Secret manifest's)")
	f.StringVar(&o.namespace, "namespace", "", "namespace of the object (default: the Secret manifest's)")
	f.StringVar(&o.credentialType, "type", "", "credential type, such as database")
	command.Int(cmd, &o.ttlDays, "ttl-days", 1, v1beta1.MaxTTLDays, "days the vault entry lives after each rotation, 1 to 3650 (default 90)")
	f.StringVar(&o.scope, "scope", string(v1beta1.ScopeStrict), "where the values open: Strict (this object), Namespace or Cluster")
	command.Choices(cmd, "scope", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster)
	f.StringArrayVar(&o.literals, "from-literal", nil, "`KEY=VALUE`; visible in history and process lists, prefer a file")
	f.StringArrayVar(&o.files, "from-file", nil, "`[KEY=]PATH`; the key is the file's name by default, and KEY=- reads standard input")
	f.StringVarP(&o.manifest, "filename", "f", "", "v1 Secret manifest, - for standard input")
	f.StringVar(&o.beside, "merge-into", "", "file with the manifest to put the values into, instead of writing one")
	f.BoolVar(&o.noTarget, "no-target", false, "make no Secret of the values: leave out spec.target")
	o.keyFlags(cmd)
	cmd.MarkFlagsOneRequired("from-literal", "from-file", "filename")
	return cmd
}

func (o *sealOptions) run(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	all, err := o.requests(stdin)
	if err != nil {
		return err
	}
	defer func() {
		for _, r := range all {
			r.zero()
		}
	}()
	doc, err := o.document(ctx)
	if err != nil {
		return err
	}
	var manifests, notes bytes.Buffer // written together, so that a mistake in one Secret writes none
	for i, r := range all {
		obj, err := sealing.Seal(doc.Key(), r.Request, time.Now())
		if err != nil {
			return err
		}
		if obj.Spec.Target = r.target; r.target != nil && r.target.Name == r.Name {
			obj.Spec.Target.Name = "" // the default
		}
		if err := sealing.Check(obj); err != nil {
			return err
		}
		text, err := yaml.Marshal(obj)
		if err != nil {
			return fmt.Errorf("encoding manifest: %w", err)
		}
		if i > 0 {
			manifests.WriteString("---\n")
		}
		manifests.Write(text)
		for _, why := range r.left {
			fmt.Fprintf(&notes, "%s: left out of spec.target: %v\n", r.Name, why)
		}
	}
	if _, err := manifests.WriteTo(stdout); err != nil {
		return err
	}
	_, err = notes.WriteTo(stderr)
	return err
}

// request is an object to seal. left names what of its Secret manifest is left out of the target.
type request struct {
	sealing.Request
	target *v1beta1.Target
	left   []error
}

func (r request) zero() {
	for _, v := range r.Values {
		v.Zero()
	}
}

// requests collects the values to seal, of one object or, from a manifest, of several. Flags
// override the Secret manifest, but the same data key twice is an error.
func (o *sealOptions) requests(stdin io.Reader) ([]request, error) {
	secrets := []*corev1.Secret{nil}
	read := o.reader(stdin)
	if o.manifest != "" {
		b, err := read(o.manifest)
		if err != nil {
			return nil, err
		}
		if secrets, err = parseSecrets(b); err != nil {
			return nil, err
		}
	}
	if len(secrets) > 1 && (o.name != "" || len(o.files)+len(o.literals) > 0) {
		return nil, command.UsageError(fmt.Sprintf("--name, --from-file and --from-literal are for one object, and the manifest has %d Secrets", len(secrets)))
	}
	var all []request
	for _, s := range secrets {
		r, err := o.request(s, read)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// reader returns a function that reads a file, or standard input once.
func (o *sealOptions) reader(stdin io.Reader) func(path string) ([]byte, error) {
	stdinUsed := false
	return func(path string) ([]byte, error) {
		if path == "-" {
			if stdinUsed {
				return nil, command.UsageError("standard input can be read only once: use files for the other values")
			}
			stdinUsed = true
		}
		return readInput(path, stdin)
	}
}

// request collects the values of one object, from s unless it is nil, and from files and literals.
func (o *sealOptions) request(s *corev1.Secret, read func(path string) ([]byte, error)) (request, error) {
	r := request{Request: sealing.Request{
		Namespace:      o.namespace,
		Name:           o.name,
		CredentialType: o.credentialType,
		Scope:          v1beta1.Scope(o.scope),
		Values:         make(map[string]secret.Bytes),
	}}
	if o.ttlDays != nil {
		r.TTLDays = *o.ttlDays
	}
	add := func(key string, value []byte) error {
		if _, twice := r.Values[key]; twice {
			return command.UsageError(fmt.Sprintf("data key %q is given twice", key))
		}
		r.Values[key] = value
		return nil
	}
	if s != nil {
		r.Name, r.Namespace = cmp.Or(r.Name, s.Name), cmp.Or(r.Namespace, s.Namespace)
		if !o.noTarget {
			r.target, r.left = targetOfSecret(s)
		}
		for k, v := range s.Data {
			r.Values[k] = v
		}
		for k, v := range s.StringData { // stringData overrides data, as in the API server
			r.Values[k] = secret.Bytes(v)
		}
	}
	for _, spec := range o.files {
		key, path, ok := strings.Cut(spec, "=")
		if !ok {
			key, path = filepath.Base(spec), spec
		}
		if !ok && path == "-" {
			return r, command.UsageError("--from-file - needs a data key: --from-file KEY=-")
		}
		value, err := read(path)
		if err != nil {
			return r, err
		}
		if err := add(key, value); err != nil {
			return r, err
		}
	}
	for _, spec := range o.literals {
		key, value, ok := strings.Cut(spec, "=")
		if !ok {
			return r, command.UsageError("--from-literal wants KEY=VALUE") // the argument is not quoted because it may be the value
		}
		if err := add(key, []byte(value)); err != nil {
			return r, err
		}
	}
	return r, nil
}
