package seal

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// resealOptions are the flags of latticekeep reseal.
type resealOptions struct {
	server    command.Server
	identity  string
	namespace string
}

func NewResealCommand() *cobra.Command {
	var o resealOptions
	cmd := &cobra.Command{
		Use:   "reseal FILE...",
		Short: "Move manifests to the newest sealing key",
		Long: `Reseal has a server seal the values of SealedCredential manifests for its newest sealing key, and replaces them in the
files. No value is shown: the server opens and seals them. Scope, namespace, name, credential type, data keys and times
stay as they are; an answer that differs in any of them is refused. Comments, order and other documents are not touched,
and a file is replaced as a whole or not at all.

The server's key has to be signed by the pinned identity: that of --identity, of the environment variable ` + config.IdentityVariable + `,
or of a file ` + identityFile + ` ("identity: FINGERPRINT") in the folder of the manifests or the current folder. The API
key needs the scope vault:write.`,
		Example: `  latticekeep reseal deploy/*.yaml --url https://vault.example.com --api-key-file key`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			return o.run(cmd.Context(), files, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.server.RegisterConnection(cmd)
	f := cmd.Flags()
	f.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the sealing key")
	f.StringVar(&o.namespace, "namespace", "", "namespace of manifests that name none")
	return cmd
}

func (o *resealOptions) run(ctx context.Context, files []string, stdout, stderr io.Writer) error {
	c, err := o.server.Client()
	if err != nil {
		return err
	}
	var failed []error
	for _, file := range files {
		if err := o.file(ctx, c, file, stdout, stderr); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// file reseals one file for the newest sealing key. On an error the file stays unchanged.
func (o *resealOptions) file(ctx context.Context, c *client.V2, file string, stdout, stderr io.Writer) error {
	m, err := readManifests(file)
	if err != nil {
		return err
	}
	sealed := m.sealed()
	if len(sealed) == 0 {
		_, err := fmt.Fprintf(stderr, "skipped: %s has no sealed values\n", file)
		return err
	}
	from := sealOptions{keySource: keySource{server: o.server, identity: o.identity}, beside: file}
	doc, err := from.document(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var notes []string
	for _, d := range sealed {
		if d.obj.Spec.Sealed.KeyID == doc.Key().ID() {
			notes = append(notes, fmt.Sprintf("unchanged: %s in %s is sealed for the newest key", title(d.obj), file))
			continue
		}
		before := d.obj.Spec.Sealed.KeyID
		if err := o.document(ctx, c, m, d, doc.Key()); err != nil {
			return fmt.Errorf("%s: %s: %w", file, title(d.obj), err)
		}
		notes = append(notes, fmt.Sprintf("resealed: %s in %s, values %d, key %.8s -> %.8s", title(d.obj), file, len(d.obj.Spec.Sealed.Values), before, doc.Key().ID()))
	}
	if err := m.write(); err != nil {
		return err
	}
	for _, note := range notes {
		if _, err := fmt.Fprintln(stdout, note); err != nil {
			return err
		}
	}
	return nil
}

// document asks the server to reseal the values of one document for the key to, and prepares the
// edits.
func (o *resealOptions) document(ctx context.Context, c *client.V2, m *manifests, d *manifest, to *envelope.SealingPublicKey) error {
	if problems := sealing.Validate(d.obj, sealing.Expect{}); len(problems) > 0 {
		return fmt.Errorf("%s (latticekeep validate shows all that is wrong)", problems[0])
	}
	request := resealRequest(d.obj)
	if request.Namespace == nil && o.namespace != "" {
		request.Namespace = &o.namespace
	}
	answer, err := c.ResealManifest(ctx, request)
	if err != nil {
		return err
	}
	again, err := resealed(d.obj, answer.Sealed, to)
	if err != nil {
		return err
	}
	if err := errors.Join(m.set(d, string(again.Spec.Sealed.Suite), "suite"), m.set(d, again.Spec.Sealed.KeyID, "keyID")); err != nil {
		return err
	}
	for key, v := range again.Spec.Sealed.Values {
		if err := m.set(d, v.Data, "values", key, "data"); err != nil {
			return err
		}
	}
	d.obj = again
	return nil
}

func resealRequest(obj *v1beta1.SealedCredential) v2.ResealRequest {
	sealed := obj.Spec.Sealed
	scope := v2.SealedValuesScope(scopeOf(sealed))
	r := v2.ResealRequest{Name: obj.Name, CredentialType: obj.Spec.CredentialType, Sealed: v2.SealedValues{
		Version: v2.SealedValuesVersion(sealed.Version), Suite: string(sealed.Suite), KeyId: sealed.KeyID, Scope: &scope,
		Values: make(map[string]v2.SealedValue, len(sealed.Values)),
	}}
	if obj.Namespace != "" {
		r.Namespace = &obj.Namespace
	}
	for key, v := range sealed.Values {
		r.Sealed.Values[key] = v2.SealedValue{SealedAt: v.SealedAt.UTC(), Data: v.Data}
	}
	return r
}

// errAnswer means that the server did something other than the request.
var errAnswer = errors.New("the server's answer is not for the same scope, data keys and times and the key that the pinned identity signed: " +
	"nothing is changed; find out what answers at --url before you use it again")

// resealed returns obj with the values of an answer. It first checks that they are for the key to
// and that everything else is unchanged.
func resealed(obj *v1beta1.SealedCredential, answer v2.SealedValues, to *envelope.SealingPublicKey) (*v1beta1.SealedCredential, error) {
	was := obj.Spec.Sealed
	scope := v1beta1.ScopeStrict
	if answer.Scope != nil {
		scope = v1beta1.Scope(*answer.Scope)
	}
	if answer.KeyId != to.ID() || answer.Suite != string(to.Suite()) || int32(answer.Version) != was.Version || scope != scopeOf(was) ||
		len(answer.Values) != len(was.Values) {
		return nil, errAnswer
	}
	again := obj.DeepCopy()
	again.Spec.Sealed.KeyID, again.Spec.Sealed.Suite = answer.KeyId, v1beta1.Suite(answer.Suite)
	for key, before := range was.Values {
		v, ok := answer.Values[key]
		if !ok || !v.SealedAt.Equal(before.SealedAt.Time) {
			return nil, errAnswer
		}
		again.Spec.Sealed.Values[key] = v1beta1.SealedValue{SealedAt: metav1.Time{Time: before.SealedAt.Time}, Data: v.Data}
	}
	if len(sealing.Validate(again, sealing.Expect{Key: to})) > 0 {
		return nil, errAnswer
	}
	return again, nil
}
