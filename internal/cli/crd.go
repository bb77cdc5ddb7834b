package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/config/crd"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// schemaAnnotation numbers the schemas of the custom resource definition. A schema of a higher
// number accepts every object of one with a lower number; not the other way round.
const schemaAnnotation = "latticekeep.dev/schema"

// crdOptions are the flags of latticekeep crd apply.
type crdOptions struct {
	kubeconfig string
	timeout    time.Duration
	page       int64         // objects at a time
	settle     time.Duration // how long all API servers may need to notice a change of the definition
}

func newCRDCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "crd",
		Short: "Keep the custom resource definition of a cluster",
	}
	// The API server itself waits 5 seconds before it trusts its replicas to know a new definition.
	o := crdOptions{page: 500, settle: 5 * time.Second}
	apply := &cobra.Command{
		Use:   "apply",
		Short: "Bring the definition of SealedCredential to a cluster",
		Long: `Apply installs the CustomResourceDefinition of SealedCredential, or replaces an older one, by server-side apply as the
manager latticekeep. The chart runs it before it installs and before it upgrades.

A definition with a newer schema than that of this program is kept, and that is no failure: an older program works with it.

When the cluster may still store objects in an earlier version of the API, each is rewritten without a change, so that it
is stored in the current one. An object that cannot be rewritten is a warning and no failure, for the earlier version
is still served: the next run tries again.

It deletes nothing, may be stopped anywhere and run again. It runs in a pod with its ServiceAccount, or with --kubeconfig.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cluster, err := app.ClusterConfig(o.kubeconfig)
			if err != nil {
				return err
			}
			if cluster == nil {
				return command.UsageError("say which cluster: --kubeconfig FILE")
			}
			cluster.QPS = -1 // the API server's own priority and fairness is the limit
			ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
			defer cancel()
			ours, err := readDefinition(crd.YAML)
			if err != nil {
				return err
			}
			return o.run(ctx, cluster, ours, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := apply.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig of the cluster (default the pod's own)")
	command.Duration(apply, &o.timeout, "timeout", 4*time.Minute, time.Second, "how long all of it may take")
	cmd.AddCommand(apply)
	return cmd
}

// A definition is a CustomResourceDefinition.
type definition struct {
	*unstructured.Unstructured
	schema  int    // number of its schema; 0 for those that have none
	version string // in which objects are stored
}

func readDefinition(text []byte) (definition, error) {
	object := new(unstructured.Unstructured)
	if err := yaml.Unmarshal(text, &object.Object); err != nil {
		return definition{}, fmt.Errorf("reading the definition: %w", err)
	}
	return describe(object)
}

func describe(object *unstructured.Unstructured) (d definition, err error) {
	d.Unstructured = object
	if number, ok := object.GetAnnotations()[schemaAnnotation]; ok {
		if d.schema, err = strconv.Atoi(number); err != nil || d.schema < 0 {
			return d, fmt.Errorf("CustomResourceDefinition %s: the annotation %s is %q and no number: remove it to have the definition replaced",
				object.GetName(), schemaAnnotation, number)
		}
	}
	versions, _, err := unstructured.NestedSlice(object.Object, "spec", "versions")
	if err != nil {
		return d, fmt.Errorf("reading the versions of CustomResourceDefinition %s: %w", object.GetName(), err)
	}
	for _, v := range versions {
		if version, _ := v.(map[string]any); version["storage"] == true {
			d.version, _ = version["name"].(string)
		}
	}
	return d, nil
}

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

func (o crdOptions) run(ctx context.Context, cluster *rest.Config, ours definition, stdout, stderr io.Writer) error {
	clients, err := dynamic.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	objects, err := metadata.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	all := clients.Resource(definitions)
	now, err := apply(ctx, all, ours)
	if err != nil {
		return fmt.Errorf("applying CustomResourceDefinition %s: %w", ours.GetName(), err)
	}
	if now.schema > ours.schema {
		fmt.Fprintf(stdout, "CustomResourceDefinition %s: kept: its schema %d is newer than schema %d of this program\n", ours.GetName(), now.schema, ours.schema)
		return nil
	}
	fmt.Fprintf(stdout, "CustomResourceDefinition %s: applied, schema %d\n", ours.GetName(), ours.schema)
	m := migration{all, objects.Resource(v1beta1.GroupVersion.WithResource("sealedcredentials")), ours, o.page, stdout}
	if err := m.awaitServed(ctx); err != nil {
		return err
	}
	stored, _, err := unstructured.NestedStringSlice(now.Object, "status", "storedVersions")
	if err == nil && !slices.Equal(stored, []string{ours.version}) {
		if err = pause(ctx, o.settle); err == nil {
			err = m.run(ctx)
		}
	}
	if err != nil {
		fmt.Fprintf(stderr, "warning: %s\n", strings.ReplaceAll(err.Error(), "\n", "\nwarning: "))
		fmt.Fprintf(stderr, "warning: objects may still be stored in an earlier version, which is served as before; the next `latticekeep crd apply` or `helm upgrade` tries again\n")
	}
	return nil
}

// apply replaces the definition unless the cluster has a newer one, and returns the one that the
// cluster then has. A definition that somebody else changes meanwhile is looked at again.
func apply(ctx context.Context, all dynamic.ResourceInterface, ours definition) (now definition, err error) {
	return now, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		wanted := ours.DeepCopy()
		there, err := all.Get(ctx, ours.GetName(), metav1.GetOptions{})
		switch {
		case err == nil:
			if now, err = describe(there); err != nil || now.schema > ours.schema {
				return err
			}
			if there, err = claim(ctx, all, there); err != nil {
				return err
			}
			wanted.SetResourceVersion(there.GetResourceVersion())
		case !apierrors.IsNotFound(err):
			return err
		}
		applied, err := all.Apply(ctx, ours.GetName(), wanted, metav1.ApplyOptions{FieldManager: v1beta1.OperatorName, Force: true})
		if err != nil {
			return err
		}
		now, err = describe(applied)
		return err
	})
}

// claim makes everybody else let go of the fields of a definition's spec. A field that two managers
// have stays when only one of them stops to apply it: what a later schema no longer has could not go.
// What Helm wrote while the definition was part of its releases becomes ours, so that its labels, which
// speak of a release, go when we apply without them.
func claim(ctx context.Context, all dynamic.ResourceInterface, there *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	entries := there.GetManagedFields()
	isOurs := func(e metav1.ManagedFieldsEntry) bool {
		return e.Manager == v1beta1.OperatorName && e.Operation == metav1.ManagedFieldsOperationApply && e.Subresource == ""
	}
	claimed, known := false, slices.ContainsFunc(entries, isOurs)
	for i := range entries {
		e := &entries[i]
		var fields map[string]json.RawMessage
		if e.Subresource != "" || isOurs(*e) || e.FieldsV1 == nil || json.Unmarshal(e.FieldsV1.GetRawBytes(), &fields) != nil || fields["f:spec"] == nil {
			continue
		}
		claimed = true
		if e.Manager == "helm" && !known {
			known, e.Manager, e.Operation = true, v1beta1.OperatorName, metav1.ManagedFieldsOperationApply
			continue
		}
		delete(fields, "f:spec")
		rest, err := json.Marshal(fields)
		if err != nil {
			return nil, err
		}
		e.FieldsV1.SetRawBytes(rest)
	}
	if !claimed {
		return there, nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": there.GetResourceVersion(), "managedFields": entries}})
	if err != nil {
		return nil, err
	}
	return all.Patch(ctx, there.GetName(), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: v1beta1.OperatorName})
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A migration has every object stored in the version of a definition.
type migration struct {
	definitions dynamic.ResourceInterface
	objects     metadata.Getter
	definition  definition
	page        int64
	stdout      io.Writer
}

// servedPace is the interval at which awaitServed asks.
const servedPace = 200 * time.Millisecond

// awaitServed waits until the API server serves the current version, so that whoever needs it can
// start.
func (m migration) awaitServed(ctx context.Context) error {
	for {
		_, err := m.objects.List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil {
			return nil
		} else if !apierrors.IsNotFound(err) {
			return fmt.Errorf("listing SealedCredentials: %w", err)
		}
		if pause(ctx, servedPace) != nil {
			return fmt.Errorf("waiting until the API server serves %s: %w", v1beta1.GroupVersion, err)
		}
	}
}

// run rewrites every object, and when none is left records that no other version is stored.
func (m migration) run(ctx context.Context) error {
	var rewritten int
	var failed []error
	for page := (metav1.ListOptions{Limit: m.page}); ; {
		list, err := m.objects.List(ctx, page)
		switch {
		case apierrors.IsResourceExpired(err) && page.Continue != "": // listing took longer than the API server keeps the list
			page.Continue, rewritten, failed = "", 0, nil
			continue
		case err != nil:
			return fmt.Errorf("listing SealedCredentials: %w", err)
		}
		for _, object := range list.Items {
			err := m.rewrite(ctx, &object)
			switch {
			case ctx.Err() != nil:
				return fmt.Errorf("rewriting SealedCredentials: %w", ctx.Err())
			case err != nil:
				failed = append(failed, fmt.Errorf("rewriting SealedCredential %s/%s: %w", object.Namespace, object.Name, err))
			default:
				rewritten++
			}
		}
		if page.Continue = list.Continue; page.Continue == "" {
			break
		}
	}
	fmt.Fprintf(m.stdout, "SealedCredentials: %d rewritten in version %s, %d failed\n", rewritten, m.definition.version, len(failed))
	if len(failed) > 0 {
		return errors.Join(failed[:min(len(failed), maxFailures)]...)
	}
	return m.record(ctx)
}

// rewrite has the API server store an object again. An empty patch changes nothing in it, but the
// API server writes whatever it would now store in another form. The managers of fields are patched
// where they name an earlier version: without that version nobody could apply the object any more.
func (m migration) rewrite(ctx context.Context, object *metav1.PartialObjectMetadata) error {
	client := m.objects.Namespace(object.Namespace)
	for {
		patch := []byte("{}")
		entries, changed, err := inVersion(object.ManagedFields, v1beta1.GroupVersion.Group, m.definition.version)
		if err == nil && changed {
			patch, err = json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": object.ResourceVersion, "managedFields": entries}})
		}
		if err != nil {
			return err
		}
		_, err = client.Patch(ctx, object.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		if !apierrors.IsConflict(err) {
			return ignoreNotFound(err) // deleted meanwhile
		}
		// Read through a list with its name, which needs no further verb in the role.
		list, err := client.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + object.Name})
		if err != nil || len(list.Items) == 0 {
			return err
		}
		object = &list.Items[0]
	}
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// inVersion returns managers with their fields in a version of a group, and whether that changes
// anything. All versions have the same fields. A manager has one entry in each version and way of
// writing, so two that become the same are merged.
func inVersion(entries []metav1.ManagedFieldsEntry, group, version string) (moved []metav1.ManagedFieldsEntry, changed bool, err error) {
	for _, e := range entries {
		if gv, err := schema.ParseGroupVersion(e.APIVersion); err == nil && gv.Group == group && gv.Version != version {
			changed, e.APIVersion = true, group+"/"+version
		}
		same := slices.IndexFunc(moved, func(other metav1.ManagedFieldsEntry) bool {
			return e.Manager == other.Manager && e.Operation == other.Operation && e.Subresource == other.Subresource && e.APIVersion == other.APIVersion
		})
		if same < 0 || e.FieldsV1 == nil || moved[same].FieldsV1 == nil {
			moved = append(moved, e)
			continue
		}
		var fields, more map[string]any
		if err := errors.Join(json.Unmarshal(moved[same].FieldsV1.GetRawBytes(), &fields), json.Unmarshal(e.FieldsV1.GetRawBytes(), &more)); err != nil {
			return nil, false, fmt.Errorf("reading the fields of %s: %w", e.Manager, err)
		}
		addFields(fields, more)
		text, err := json.Marshal(fields)
		if err != nil {
			return nil, false, err
		}
		moved[same].FieldsV1 = metav1.NewFieldsV1(string(text))
	}
	return moved, changed, nil
}

// addFields adds a set of fields to another. Both are trees of names.
func addFields(fields, more map[string]any) {
	for name, below := range more {
		known, ok := fields[name].(map[string]any)
		deeper, _ := below.(map[string]any)
		if !ok {
			fields[name] = below
			continue
		}
		addFields(known, deeper)
	}
}

// record writes into the definition's status that objects are stored in its version alone, unless
// the definition has another one by now.
func (m migration) record(ctx context.Context) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		object, err := m.definitions.Get(ctx, m.definition.GetName(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		now, err := describe(object)
		if err != nil {
			return err
		}
		if now.version != m.definition.version || now.schema != m.definition.schema {
			return errors.New("somebody else has replaced the definition meanwhile")
		}
		patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":%q},"status":{"storedVersions":[%q]}}`, object.GetResourceVersion(), now.version)
		_, err = m.definitions.Patch(ctx, object.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		return err
	})
	if err != nil {
		return fmt.Errorf("recording the stored version: %w", err)
	}
	fmt.Fprintf(m.stdout, "CustomResourceDefinition %s: objects are stored in version %s alone\n", m.definition.GetName(), m.definition.version)
	return nil
}
