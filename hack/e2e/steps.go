package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
)

// A step is a heading of the transcript and the commands under it.
type step struct {
	title, text string
	do          func(context.Context) error
}

// chapters are the parts of a run. Each has a cluster of its own, which nothing survives but what a
// user saved outside of it.
var chapters = []string{"an installation", "the vault restored", "a new vault"}

// play runs all steps of a chapter on a cluster without latticekeep.
func (c *cluster) play(ctx context.Context, chapter string) error {
	back := restores{c}
	away := moves{back}
	etcd := secretsInEtcd{c}
	files := &delivery{secretsInEtcd: etcd}
	var steps []step
	switch chapter {
	case chapters[0]:
		c.out.printf("# An installation, from beginning to end\n\n%s\n", preface)
		steps = []step{
			{"Install", "The server, its operator and two replicas of the admission webhook.", c.install},
			{"Seal and apply", "The plain manifest stays where it is; what comes out of `latticekeep seal` is for git. With a `target`, the operator keeps a Secret of the same name.", c.seal},
			{"Apply the samples", "Values that are made in the vault and that nobody ever sees, also as a URL in a Secret, and those of a Secret that was there before, which is deleted once they are in the vault.", c.samples},
			{"Refuse", "What could never become Ready is refused when it is applied: a manifest that was sealed for another installation, and one that was copied to another namespace.", c.refuse},
			{"Read through the Secret", "A pod that knows nothing of latticekeep mounts the target Secret. It prints digests; they are those of the plain values.", c.readSecret},
			{"Fix drift", "Somebody deletes the target, and then changes it. The annotation `latticekeep.dev/sync` has the operator look at once, and the status says for which value of it. A label of others stays.", c.drift},
			{"Read over REST", "Another has a ServiceAccount that may `unseal` this one credential, and asks for it by name, with its projected token, over TLS 1.3 with the post-quantum key exchange.", c.readREST},
			{"Test", "`helm test` reads the log of the deployment over TLS, with the first system key, and verifies its chain and signatures.", c.test},
			{"Upgrade", "Another revision with other settings: the server's pod is replaced, the credentials stay. Before it, a job of the chart brings the definition of the resource. Here it finds one like that of a release whose API was older.", c.upgrade},
			{"Roll back", "Helm goes back to the first revision, and the definition of the resource stays as it is, even one that is newer than the release. An upgrade keeps the newer one too.", c.rollBack},
			{"Make an object again", "In a namespace of its own there are two objects whose values only the vault knows, and the sample again. The vault keeps the entry of one of them, `kept`, when the object is deleted. Made again, it goes on with that entry: its Secret has the same value. Sealed values come back with the manifest.", back.restoreObject},
			{"Go on with an entry by its id", "With another target the values would go elsewhere, so the object waits. Whoever names the entry needs the verb `adopt`, which no role of the chart has.", back.adopt},
			{"Restore a namespace from its manifests", "The namespace is deleted and made again, which is a new tenant. The object whose entry was kept waits, instead of making a new value. An administrator maps the namespace to its previous tenant, and the value is back. Of `dropped` nothing was kept: it has a new value.", back.restoreFromManifests},
			{"Restore a namespace by Velero's rules", "Secrets are put back before the objects, without status and UIDs. No Secret is overwritten: the objects wait until each Secret is handed over, and take its value into the vault. The sealed one has its values, and waits only with its target.", back.restoreLikeVelero},
			{"Lose the pod under load", "A pod of the shop writes and reads all the time. The server's pod is deleted with one second to end; every write that was acknowledged is there when it is back.", c.losePod},
			{"Uninstall", "The objects, their Secrets, the definition of the resource and the volumes stay; no finalizer and no webhook remains that would hold something up.", c.uninstall},
			{"Install again", "On the volumes that stayed, it goes on where it ended: the same credential, the same version.", c.reinstall},
		}
		// Elsewhere the volumes may be of a kind whose files kubelet gives to nobody, such as hostPath. And only our own cluster may be lost.
		if c.own {
			steps = append(steps,
				step{"Run as another user", "OpenShift chooses user and groups of a pod. Those of these pods are not the chart's, and the volumes are older than they are: kubelet gives the files to the new group, and all goes on.", c.anotherUser},
				step{"Back up", "To a recipient of the server's configuration, so the KMS key is in it too. Outside of the cluster there are now the backup, the identity that opens it, the manifests of the shop, and, as Velero would have them, the Secrets and objects of the archive.", away.backUp},
				step{"Deliver without a Secret", "The Secrets Store CSI driver runs on the node, with the audience `latticekeep` in its CSIDriver, and the chart gives it [a provider](guides/csi.md). The credential `ledger` has no target.", files.start},
				step{"Mount files", "A pod mounts two files of the credential. Its container, which is not root, prints their digests; they are those of the plain values.", files.byCSI},
				step{"Write files by an agent", "In another pod [an agent](guides/agent.md) writes the same files to memory, once before the pod begins and then as a sidecar.", files.byAgent},
				step{"Look for the values", "No Secret has a value of this credential, and no row of etcd. The Secrets that are listed are of other credentials.", files.nothingStored},
				step{"Rotate", "Another version of the credential reaches both pods without a restart. The driver keeps ids and versions in an object of its own.", files.rotate},
				step{"Deny", "The pods are made again, without their Roles. The errors that they wait with have the commands that grant the right.", files.deny},
				step{"Restart kubelet without the vault", "The vault is scaled to nothing, and kubelet begins again. The pods that run have their files. New ones wait, and begin by themselves when the vault is back.", files.withoutVault},
				step{"Restart the node without the vault", "The vault is scaled to nothing again, and the node ends: pods, containerd, kubelet and the CSI driver, with all that was in memory. The control plane runs on, as on another machine. Every pod that has files waits for the vault, and goes on by itself.", files.nodeWithoutVault},
				step{"Take the provider away", "Without it, the namespace has its profile again.", files.finish},
				step{"Encrypt the Secrets in etcd", "The cluster has Secrets, and etcd has them in plain text. [The guide](guides/kms-plugin.md) is followed on the node, with a key file. kubelet runs the plugin as a static pod. The API server of this node is a process, with the flag where kubeadm has it in a manifest. It first learns to read what the plugin encrypts, and then to write it. When every Secret has been written again, none of their values is in etcd, and it refuses plain ones.", etcd.encrypt},
				step{"Start without the vault", "The vault is scaled to nothing. Plugin and API server end, and start again from the files of the node alone.", etcd.restart},
				step{"Go back to plain Secrets", "The same steps in the other order. After them the API server needs no plugin.", etcd.decrypt})
		}
	case chapters[1]:
		steps = []step{
			{"Lose the cluster, and restore the vault into another one", "Node, volumes and control plane are gone. The other cluster has new UIDs, new certificates and empty volumes. It gets the KMS key and the database of the backup before the server starts.", away.restoreVault},
			{"Put the objects back there", "The shop from its manifests, and the archive by Velero's rules. Both namespaces are new tenants, so what the vault alone knows waits. No Secret is overwritten.", away.applyThere},
			{"Map the namespaces there", "The operator's log names the tenant beside each object that waits. Mapped, every object goes on with the entry that it had before.", away.mapThere},
		}
	case chapters[2]:
		steps = []step{
			{"Lose the vault too, and begin from manifests alone", "A third cluster with a new vault. The sealed manifest is refused: the key that it was sealed for is gone with the vault, so its values are sealed again. What was generated is generated anew, and what was imported needs its Secret again.", away.beginFromManifests},
			{"Begin from Secrets and manifests", "In the same cluster the archive comes back by Velero's rules. The objects wait with the previous values in their Secrets, and once these are handed over, the new vault has them too. The sealed object is refused here as well, and sealed again.", away.beginFromSecrets},
		}
	default:
		return fmt.Errorf("there is no chapter %q", chapter)
	}
	for _, s := range steps {
		c.out.say(s.title, s.text)
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", strings.ToLower(s.title), err)
		}
	}
	return nil
}

const preface = `This is what ` + "`make e2e`" + ` printed: a real cluster, with pods that run, from ` + "`helm install`" + ` to ` + "`helm uninstall`" + ` and back. Each command is followed by what
it printed; what is different on each run stands in angle brackets. ` + "`make e2e`" + ` fails when anything here does not hold.

It uses the cluster of ` + "`E2E_KUBECONFIG`" + `, to which the command in ` + "`E2E_LOAD`" + ` brings the images (` + "`kind load image-archive`" + `, ` + "`k3d image import`" + `), and removes afterwards what it
made there. Without one, root on Linux gets a node: etcd, the control plane, CoreDNS, containerd, kubelet and kube-proxy, in namespaces of their
own that end with it. That node's network does not enforce NetworkPolicies. It is lost twice at the end, for another cluster with the vault restored and
for one with a new vault ([what to expect](guides/restore-objects.md#matrix)).`

func (c *cluster) install(ctx context.Context) error {
	commands := []string{"kubectl apply --filename " + manifests + "namespaces.yaml"}
	if c.own {
		commands = append(commands, "kubectl apply --filename "+manifests+"volumes.yaml")
	}
	return c.all(ctx, append(commands,
		"helm install latticekeep "+chart+" --namespace "+system+" --values "+values+" --wait "+waitArg,
		podsOf(system),
	)...)
}

func podsOf(namespace string) string {
	return "kubectl get pods --namespace " + namespace + " --output custom-columns=POD:.metadata.name,PHASE:.status.phase,READY:.status.containerStatuses[*].ready,RESTARTS:.status.containerStatuses[*].restartCount"
}

func (c *cluster) test(ctx context.Context) error {
	return c.all(ctx, "helm test latticekeep --namespace "+system+" --logs "+waitArg)
}

func (c *cluster) upgrade(ctx context.Context) error {
	before, err := c.serverPod(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl annotate "+definition+" "+schema+"-",
		"kubectl patch "+definition+" --subresource=status --type=merge --patch={\"status\":{\"storedVersions\":[\"v1alpha1\",\"v1beta1\"]}}",
		"helm upgrade latticekeep "+chart+" --namespace "+system+" --values "+values+" --set config.kubernetes.restartWorkloads=true --wait "+waitArg,
		printDefinition,
		podsOf(system),
		"kubectl wait --for=condition=Ready sealedcredential/"+sample+" --namespace "+shop+" "+waitArg,
	); err != nil {
		return err
	}
	after, err := c.serverPod(ctx)
	if err != nil {
		return err
	}
	if before == after {
		return errors.New("the server's pod is still the one from before")
	}
	stored, err := c.run(ctx, "", "kubectl", "get", definition, "--output=jsonpath={.status.storedVersions}")
	if err != nil {
		return err
	}
	if stored != `["v1beta1"]` {
		return fmt.Errorf("the hook did not migrate the objects: stored versions are %s", stored)
	}
	return c.consume(ctx, "billing")
}

const (
	definition = "customresourcedefinition/sealedcredentials.latticekeep.dev"
	schema     = "latticekeep.dev/schema" // annotation with the number of its schema
	// newer is the number of a schema that no release has.
	newer           = "1000"
	printDefinition = "kubectl get " + definition + " --output custom-columns=SCHEMA:.metadata.annotations.latticekeep\\.dev/schema,STORED:.status.storedVersions"
)

// rollBack compares the resourceVersion of the definition, which any write would change.
func (c *cluster) rollBack(ctx context.Context) error {
	read := []string{"kubectl", "get", definition, "--output=jsonpath={.metadata.resourceVersion}"}
	if err := c.all(ctx, "kubectl annotate --overwrite "+definition+" "+schema+"="+newer); err != nil {
		return err
	}
	before, err := c.run(ctx, "", read...)
	if err != nil {
		return err
	}
	for _, command := range []string{
		"helm rollback latticekeep 1 --namespace " + system + " --wait " + waitArg,
		"helm upgrade latticekeep " + chart + " --namespace " + system + " --values " + values + " --wait " + waitArg,
	} {
		if err := c.all(ctx, command, printDefinition, "kubectl wait --for=condition=Ready sealedcredential/"+sample+" --namespace "+shop+" "+waitArg); err != nil {
			return err
		}
		after, err := c.run(ctx, "", read...)
		if err != nil {
			return err
		}
		if before != after {
			return errors.New("the definition of the resource was written")
		}
	}
	return c.all(ctx, "kubectl annotate "+definition+" "+schema+"-") // the installation below brings it again
}

// serverPod returns the UID of the server's pod.
func (c *cluster) serverPod(ctx context.Context) (string, error) {
	return c.run(ctx, "", "kubectl", "get", "pod", "latticekeep-0", "--namespace", system, "--output=jsonpath={.metadata.uid}")
}

func (c *cluster) losePod(ctx context.Context) error {
	if err := c.all(ctx,
		"kubectl apply --filename "+manifests+"load.yaml",
		"kubectl wait --for=condition=Ready pod/load --namespace "+shop+" "+waitArg,
	); err != nil {
		return err
	}
	if err := c.untilLogged(ctx, shop, "load", "under load\n"); err != nil {
		return err
	}
	return c.all(ctx,
		"kubectl delete pod latticekeep-0 --now --namespace "+system,
		"kubectl wait --for=jsonpath={.status.phase}=Succeeded pod/load --namespace "+shop+" "+waitArg,
		"kubectl logs load --namespace "+shop,
		"kubectl delete pod load --namespace "+shop,
		"kubectl wait --for=condition=Ready pod/latticekeep-0 --namespace "+system+" "+waitArg,
	)
}

// kept lists commands that print the state that has to survive, without parts that differ from run
// to run.
var kept = []string{
	"kubectl get sealedcredentials --namespace " + shop + " --output custom-columns=NAME:.metadata.name,CREDENTIAL:.status.credentialID,VERSION:.status.version,FINALIZERS:.metadata.finalizers",
	"kubectl get secrets --namespace " + shop + " --output custom-columns=NAME:.metadata.name,TYPE:.type",
}

func (c *cluster) uninstall(ctx context.Context) error {
	before, err := c.facts(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx, "helm uninstall latticekeep --namespace "+system+" --wait "+waitArg); err != nil {
		return err
	}
	if err := c.all(ctx, append(kept,
		"kubectl get persistentvolumeclaims --namespace "+system+" --output custom-columns=NAME:.metadata.name,PHASE:.status.phase",
		"kubectl get crd sealedcredentials.latticekeep.dev --output name",
	)...); err != nil {
		return err
	}
	if err := c.nothing(ctx, "kubectl get validatingwebhookconfigurations,validatingadmissionpolicies,clusterroles,clusterrolebindings --selector app.kubernetes.io/name=latticekeep --output name"); err != nil {
		return err
	}
	after, err := c.facts(ctx)
	if err != nil {
		return err
	}
	if before != after {
		return fmt.Errorf("what was there:\n%s\nand what is left:\n%s", before, after)
	}
	return nil
}

// facts returns the state that must be the same before and after: credential, version, and a digest
// of the data of its Secret.
func (c *cluster) facts(ctx context.Context) (string, error) {
	version, err := c.run(ctx, "", "kubectl", "get", "sealedcredentials", "--namespace", shop,
		"--output=jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.status.credentialID} {.status.version}{\"\\n\"}{end}")
	if err != nil {
		return "", err
	}
	data, err := c.run(ctx, "", "kubectl", "get", "secrets", "--namespace", shop, "--output=jsonpath={.items[*].data}")
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%ssecrets %x", version, sha256.Sum256([]byte(data))), nil // a failure prints this, so it has no value
}

func (c *cluster) reinstall(ctx context.Context) error {
	return c.unchanged(ctx, "helm install latticekeep "+chart+" --namespace "+system+" --values "+values+" --wait "+waitArg, printDefinition)
}

// anotherUser continues as a user and with groups that neither the image nor the volumes know, and
// goes back to those of the chart.
func (c *cluster) anotherUser(ctx context.Context) error {
	upgrade := "helm upgrade latticekeep " + chart + " --namespace " + system + " --values " + values
	if err := c.unchanged(ctx,
		upgrade+" --values "+foreignValues+" --wait "+waitArg,
		"kubectl get pods --namespace "+system+" --selector app.kubernetes.io/name=latticekeep --output custom-columns=POD:.metadata.name,USER:.spec.securityContext.runAsUser,"+
			"GROUP:.spec.securityContext.runAsGroup,VOLUMES:.spec.securityContext.fsGroup,READY:.status.containerStatuses[*].ready",
		"helm test latticekeep --namespace "+system+" "+waitArg,
	); err != nil {
		return err
	}
	return c.unchanged(ctx, upgrade+" --wait "+waitArg)
}

// unchanged runs commands after which the operator and the service work, and everything is as
// before.
func (c *cluster) unchanged(ctx context.Context, commands ...string) error {
	before, err := c.facts(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx, append(commands,
		"kubectl wait --for=condition=Ready sealedcredential/"+sample+" --namespace "+shop+" "+waitArg)...); err != nil {
		return err
	}
	if err := c.consume(ctx, "billing"); err != nil {
		return err
	}
	after, err := c.facts(ctx)
	if err != nil {
		return err
	}
	if before != after {
		return fmt.Errorf("what was there:\n%s\nand what came back:\n%s", before, after)
	}
	return nil
}
