// Package seal provides the commands that write and check SealedCredential manifests. It edits
// manifests byte by byte, so everything except the sealed values stays as its author wrote it.
package seal

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
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
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the object (default: the Secret manifest's)")
	f.StringVar(&o.namespace, "namespace", "", "namespace of the object (default: the Secret manifest's)")
	f.StringVar(&o.credentialType, "type", "", "credential type, such as database")
	command.Int(cmd, &o.ttlDays, "ttl-days", 1, v1alpha1.MaxTTLDays, "days the vault entry lives after each rotation, 1 to 3650 (default 90)")
	f.StringVar(&o.scope, "scope", string(v1alpha1.ScopeStrict), "where the values open: Strict (this object), Namespace or Cluster")
	f.StringArrayVar(&o.literals, "from-literal", nil, "`KEY=VALUE`; visible in history and process lists, prefer a file")
	f.StringArrayVar(&o.files, "from-file", nil, "`[KEY=]PATH`; the key is the file's name by default, and KEY=- reads standard input")
	f.StringVarP(&o.manifest, "filename", "f", "", "v1 Secret manifest, - for standard input")
	f.StringVar(&o.beside, "merge-into", "", "file with the manifest to put the values into, instead of writing one")
	o.keyFlags(cmd)
	cmd.MarkFlagsOneRequired("from-literal", "from-file", "filename")
	return cmd
}

func (o *sealOptions) run(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	r, err := o.request(stdin)
	if err != nil {
		return err
	}
	defer func() {
		for _, v := range r.Values {
			v.Zero()
		}
	}()
	doc, err := o.document(ctx)
	if err != nil {
		return err
	}
	obj, err := sealing.Seal(doc.Key(), r, time.Now())
	if err != nil {
		return err
	}
	out, err := yaml.Marshal(obj)
	if err != nil {
		return fmt.Errorf("encoding manifest: %w", err)
	}
	_, err = stdout.Write(out)
	return err
}

// request collects the values to seal. Flags override the Secret manifest, but the same data key
// twice is an error.
func (o *sealOptions) request(stdin io.Reader) (sealing.Request, error) {
	r := sealing.Request{
		Namespace:      o.namespace,
		Name:           o.name,
		CredentialType: o.credentialType,
		Scope:          v1alpha1.Scope(o.scope),
		Values:         make(map[string]secret.Bytes),
	}
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

	stdinUsed := false
	read := func(path string) ([]byte, error) {
		if path == "-" {
			if stdinUsed {
				return nil, command.UsageError("standard input can be read only once: use files for the other values")
			}
			stdinUsed = true
		}
		return readInput(path, stdin)
	}
	if o.manifest != "" {
		b, err := read(o.manifest)
		if err != nil {
			return r, err
		}
		s, err := parseSecret(b)
		if err != nil {
			return r, err
		}
		if r.Name == "" {
			r.Name = s.Name
		}
		if r.Namespace == "" {
			r.Namespace = s.Namespace
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
