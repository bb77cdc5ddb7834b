package seal

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// validateOptions are the flags of latticekeep validate.
type validateOptions struct {
	manifest, namespace, name, scope, keyFile string
}

func NewValidateCommand() *cobra.Command {
	var o validateOptions
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check SealedCredential manifests offline",
		Long: `Validate checks without a server that SealedCredential manifests are well-formed and, as far as flags say what they are
for, that they are for this namespace, name, scope and sealing key. Documents of other kinds are skipped. An annotation
that begins with latticekeep.dev/ and has no meaning is a warning.

Whether a value opens, and what it was bound to when it was sealed, only the vault can tell: the object's Stalled
condition says so after it has been applied.`,
		Example: `  latticekeep validate -f sealed.yaml --namespace shop --key sealing-key.json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&o.manifest, "filename", "f", "-", "manifests to check, - for standard input")
	f.StringVar(&o.namespace, "namespace", "", "namespace that the manifests are for")
	f.StringVar(&o.name, "name", "", "name that the manifest is for")
	f.StringVar(&o.scope, "scope", "", "scope that the values must have: Strict, Namespace or Cluster")
	command.Choices(cmd, "scope", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster)
	f.StringVar(&o.keyFile, "key", "", "file with the document of the sealing key that the values must be sealed for")
	return cmd
}

func (o *validateOptions) run(stdin io.Reader, stdout, stderr io.Writer) error {
	want := sealing.Expect{Namespace: o.namespace, Name: o.name, Scope: v1beta1.Scope(o.scope), Now: time.Now()}
	switch want.Scope {
	case "", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster:
	default:
		return command.UsageError("--scope is Strict, Namespace or Cluster")
	}
	if o.keyFile != "" {
		doc, err := readDocument(o.keyFile)
		if err != nil {
			return err
		}
		want.Key = doc.Key()
	}
	b, err := readInput(o.manifest, stdin)
	if err != nil {
		return err
	}
	docs, err := documents(b)
	if err != nil {
		return err
	}

	var problems []error
	found := false
	for i, doc := range docs {
		sc, err := decodeSealedCredential(doc)
		if err != nil {
			problems = append(problems, fmt.Errorf("document %d: %w", i+1, err))
			continue
		}
		if sc == nil {
			if _, err := fmt.Fprintf(stderr, "skipped: document %d is of another kind\n", i+1); err != nil {
				return err
			}
			continue
		}
		found = true
		title := sc.Name
		if sc.Namespace != "" {
			title = sc.Namespace + "/" + sc.Name
		}
		wrong := sealing.Validate(sc, want)
		for _, p := range wrong {
			problems = append(problems, fmt.Errorf("document %d (%s): %s", i+1, title, p))
		}
		for _, p := range sealing.Warnings(sc) {
			if _, err := fmt.Fprintf(stderr, "warning: document %d (%s): %s\n", i+1, title, p); err != nil {
				return err
			}
		}
		if len(wrong) > 0 {
			continue
		}
		if _, err := fmt.Fprintf(stdout, "ok: %s\n", title); err != nil {
			return err
		}
	}
	if len(problems) == 0 && !found {
		return errors.New("the input has no SealedCredential")
	}
	return errors.Join(problems...)
}
