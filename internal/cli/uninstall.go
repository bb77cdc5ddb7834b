package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	typedappsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// uninstallOptions are the flags of latticekeep uninstall.
type uninstallOptions struct {
	kubeconfig, namespace string
	webhook               string
	statefulSet           string
	deployment            string
	timeout               time.Duration
	page                  int64 // objects at a time
}

func newUninstallCommand() *cobra.Command {
	o := uninstallOptions{page: 500}
	cmd := &cobra.Command{
		Use:   "uninstall --webhook-configuration NAME",
		Short: "Release a cluster before latticekeep is removed from it",
		Long: `Uninstall makes a cluster work without latticekeep, before it is removed: it stops the server of --stateful-set or --deployment, so that
nothing is undone, removes the webhook configuration, so that nothing waits for a webhook that is gone, and then takes the finalizer
off every SealedCredential, so that each can be deleted.

It deletes no SealedCredential, no Secret, no volume and no vault entry. But whoever deletes the custom resource
definition afterwards deletes all SealedCredentials. Their target Secrets stay.

It may be stopped anywhere and run again. It runs in a pod with its ServiceAccount, or with --kubeconfig.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cluster, err := app.ClusterConfig(o.kubeconfig)
			if err != nil {
				return err
			}
			if cluster == nil {
				return command.UsageError("say which cluster: --kubeconfig FILE")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
			defer cancel()
			return o.run(ctx, cluster, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.webhook, "webhook-configuration", "", "ValidatingWebhookConfiguration to remove")
	f.StringVar(&o.statefulSet, "stateful-set", "", "StatefulSet of the server, which is scaled to nothing first (default: you have stopped the server)")
	f.StringVar(&o.deployment, "deployment", "", "Deployment of the servers, likewise")
	f.StringVar(&o.namespace, "namespace", controllers.DefaultNamespace, "namespace of --stateful-set or --deployment")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig of the cluster (default the pod's own)")
	command.Duration(cmd, &o.timeout, "timeout", 5*time.Minute, time.Second, "how long all of it may take")
	_ = cmd.MarkFlagRequired("webhook-configuration") // cannot fail: the flag exists
	cmd.MarkFlagsMutuallyExclusive("stateful-set", "deployment")
	return cmd
}

var (
	webhookConfigurations = schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingwebhookconfigurations"}
	sealedCredentials     = v1beta1.GroupVersion.WithResource("sealedcredentials")
)

func (o uninstallOptions) run(ctx context.Context, cluster *rest.Config, stdout io.Writer) error {
	objects, err := metadata.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	if err := o.stop(ctx, cluster, stdout); err != nil {
		return err
	}
	err = objects.Resource(webhookConfigurations).Delete(ctx, o.webhook, metav1.DeleteOptions{})
	switch {
	case apierrors.IsNotFound(err):
		fmt.Fprintf(stdout, "webhook configuration %s: not found\n", o.webhook)
	case err != nil:
		return fmt.Errorf("removing the webhook configuration: %w", err)
	default:
		fmt.Fprintf(stdout, "webhook configuration %s: removed\n", o.webhook)
	}
	return o.release(ctx, objects, stdout)
}

// stopPace is the interval at which stop checks whether the server's pods have ended.
const stopPace = time.Second

// scaled is a client for the workloads of one kind.
type scaled interface {
	Patch(ctx context.Context, name string, t types.PatchType, data []byte, o metav1.PatchOptions, subresources ...string) error
	GetScale(ctx context.Context, name string, o metav1.GetOptions) (*autoscalingv1.Scale, error)
}

type statefulSets struct {
	typedappsv1.StatefulSetInterface
}

func (s statefulSets) Patch(ctx context.Context, name string, t types.PatchType, data []byte, o metav1.PatchOptions, subresources ...string) error {
	_, err := s.StatefulSetInterface.Patch(ctx, name, t, data, o, subresources...)
	return err
}

type deployments struct {
	typedappsv1.DeploymentInterface
}

func (d deployments) Patch(ctx context.Context, name string, t types.PatchType, data []byte, o metav1.PatchOptions, subresources ...string) error {
	_, err := d.DeploymentInterface.Patch(ctx, name, t, data, o, subresources...)
	return err
}

// stop scales the server to zero and waits until its pods are gone, because a running operator
// would restore finalizers.
func (o uninstallOptions) stop(ctx context.Context, cluster *rest.Config, stdout io.Writer) error {
	apps, err := typedappsv1.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	var sets scaled = statefulSets{apps.StatefulSets(o.namespace)}
	kind, name := "StatefulSet", o.statefulSet
	if o.deployment != "" {
		sets, kind, name = deployments{apps.Deployments(o.namespace)}, "Deployment", o.deployment
	}
	if name == "" {
		return nil
	}
	err = sets.Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"replicas":0}}`), metav1.PatchOptions{}, "scale")
	if apierrors.IsNotFound(err) {
		fmt.Fprintf(stdout, "%s %s: not found\n", kind, name)
		return nil
	} else if err != nil {
		return fmt.Errorf("stopping the server: %w", err)
	}
	tick := time.NewTicker(stopPace)
	defer tick.Stop()
	for {
		var scale *autoscalingv1.Scale
		scale, err = sets.GetScale(ctx, name, metav1.GetOptions{})
		if err == nil && scale.Spec.Replicas == 0 && scale.Status.Replicas == 0 || apierrors.IsNotFound(err) {
			fmt.Fprintf(stdout, "%s %s: stopped\n", kind, name)
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the server to stop: %w", errors.Join(ctx.Err(), err))
		}
	}
}

// maxFailures is the number of failures that are printed one by one.
const maxFailures = 20

// release removes the finalizer from every SealedCredential.
func (o uninstallOptions) release(ctx context.Context, objects metadata.Interface, stdout io.Writer) error {
	var seen, released int
	var failed []error
	told := func() {
		fmt.Fprintf(stdout, "SealedCredentials: %d seen, %d released, %d failed\n", seen, released, len(failed))
	}
	page := metav1.ListOptions{Limit: o.page}
	for {
		list, err := objects.Resource(sealedCredentials).List(ctx, page)
		switch {
		case apierrors.IsNotFound(err): // the CRD is gone, and every object with it
			told()
			return nil
		case apierrors.IsResourceExpired(err) && page.Continue != "": // listing took longer than the API server keeps the list
			page.Continue, seen, failed = "", 0, nil
			continue
		case err != nil:
			told()
			return fmt.Errorf("listing SealedCredentials: %w", err)
		}
		for i := range list.Items {
			seen++
			done, err := letGo(ctx, objects, &list.Items[i])
			if ctx.Err() != nil {
				told()
				return fmt.Errorf("releasing SealedCredentials (run it again to go on): %w", err)
			}
			if err != nil {
				failed = append(failed, fmt.Errorf("releasing SealedCredential %s/%s: %w", list.Items[i].Namespace, list.Items[i].Name, err))
			}
			if done {
				released++
			}
		}
		if page.Continue = list.Continue; page.Continue == "" {
			told()
			return errors.Join(failed[:min(len(failed), maxFailures)]...)
		}
	}
}

// letGo removes our finalizer from one object and reports whether it was there. The patch tests the
// object's UID and its previous finalizers, so that no other controller's finalizer is lost.
func letGo(ctx context.Context, objects metadata.Interface, o *metav1.PartialObjectMetadata) (bool, error) {
	client := objects.Resource(sealedCredentials).Namespace(o.Namespace)
	for {
		i := slices.Index(o.Finalizers, v1beta1.Finalizer)
		if i < 0 {
			return false, nil
		}
		patch, err := json.Marshal([]map[string]any{
			{"op": "test", "path": "/metadata/uid", "value": o.UID},
			{"op": "test", "path": "/metadata/finalizers", "value": o.Finalizers},
			{"op": "remove", "path": fmt.Sprintf("/metadata/finalizers/%d", i)},
		})
		if err != nil {
			return false, err
		}
		_, err = client.Patch(ctx, o.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
		switch {
		case err == nil:
			return true, nil
		case apierrors.IsNotFound(err):
			return false, nil
		case !apierrors.IsInvalid(err) && !apierrors.IsConflict(err):
			return false, err
		}
		// The patch's test failed because the object changed since it was listed. It is read
		// through a list with its name, which needs no further verb in the role.
		list, again := client.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + o.Name})
		if again != nil {
			return false, again
		}
		if len(list.Items) == 0 || list.Items[0].UID != o.UID {
			return false, nil
		}
		if slices.Equal(list.Items[0].Finalizers, o.Finalizers) {
			return false, err // refused for another reason
		}
		o = &list.Items[0]
	}
}
