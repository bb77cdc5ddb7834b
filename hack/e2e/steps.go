package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	chart         = "charts/latticekeep"
	values        = "hack/e2e/values.yaml"
	foreignValues = "hack/e2e/another-user.yaml"
	manifests     = "hack/e2e/manifests/"
	plain         = "config/samples/database-secret.plain"

	system   = "latticekeep-system" // namespace of the product
	shop     = "shop"               // namespace of its users
	sample   = "database"           // a credential of the shop
	waitArg  = "--timeout=5m"       // a machine that also compiles is slow
	waitTime = 5 * time.Minute
)

// A step is a heading of the transcript and the commands under it.
type step struct {
	title, text string
	do          func(context.Context) error
}

// play runs all steps on a cluster without latticekeep.
func (c *cluster) play(ctx context.Context) error {
	c.out.printf("# An installation, from beginning to end\n\n%s\n", preface)
	steps := []step{
		{"Install", "The server, its operator and two replicas of the admission webhook.", c.install},
		{"Seal and apply", "The plain manifest stays where it is; what comes out of `latticekeep seal` is for git. With a `target`, the operator keeps a Secret of the same name.", c.seal},
		{"Apply the samples", "Values that are made in the vault and that nobody ever sees, also as a URL in a Secret, and those of a Secret that was there before, which is deleted once they are in the vault.", c.samples},
		{"Refuse", "What could never become Ready is refused when it is applied: a manifest that was sealed for another installation, and one that was copied to another namespace.", c.refuse},
		{"Read through the Secret", "A pod that knows nothing of latticekeep mounts the target Secret. It prints digests; they are those of the plain values.", c.readSecret},
		{"Mend drift", "Somebody deletes the target, and then changes it. The annotation `latticekeep.dev/sync` has the operator look at once, and the status says for which value of it. A label of others stays.", c.drift},
		{"Read over REST", "Another has a ServiceAccount that may `unseal` this one credential, and asks for it by name, with its projected token, over TLS 1.3 with the post-quantum key exchange.", c.readREST},
		{"Test", "`helm test` reads the log of the deployment over TLS, with the first system key, and verifies its chain and signatures.", c.test},
		{"Upgrade", "Another revision with other settings: the server's pod is replaced, the credentials stay. Before it, a job of the chart brings the definition of the resource. Here it finds one like that of a release whose API was older.", c.upgrade},
		{"Roll back", "Helm goes back to the first revision, and the definition of the resource stays as it is, even one that is newer than the release. An upgrade keeps the newer one too.", c.rollBack},
		{"Make an object again", "In a namespace of its own there are two objects whose values only the vault knows. The vault keeps the entry of one of them when the object is deleted. Made again, that one goes on with it: its Secret has the same value.", c.restoreObject},
		{"Restore a namespace from its manifests", "The namespace is deleted and made again, which is a new tenant. The object whose entry was kept waits, instead of making a new value. An administrator maps the namespace to its previous tenant, and the value is back. Of the other object nothing was kept: it has a new value.", c.restoreFromManifests},
		{"Restore a namespace by Velero's rules", "Secrets are put back before the objects, without status and UIDs. No Secret is overwritten: the objects wait until each Secret is handed over, and take its value into the vault.", c.restoreLikeVelero},
		{"Lose the pod under load", "A pod of the shop writes and reads all the time. The server's pod is deleted with one second to end; every write that was acknowledged is there when it is back.", c.losePod},
		{"Uninstall", "The objects, their Secrets, the definition of the resource and the volumes stay; no finalizer and no webhook remains that would hold something up.", c.uninstall},
		{"Install again", "On the volumes that stayed, it goes on where it ended: the same credential, the same version.", c.reinstall},
	}
	if c.own { // elsewhere the volumes may be of a kind whose files kubelet gives to nobody, such as hostPath
		steps = append(steps, step{"Run as another user", "OpenShift chooses user and groups of a pod. Those of these pods are not the chart's, and the volumes are older than they are: kubelet gives the files to the new group, and all goes on.", c.anotherUser})
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
own that end with it. That node's network does not enforce NetworkPolicies.`

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

func (c *cluster) seal(ctx context.Context) error {
	identity, err := c.identity(ctx)
	if err != nil {
		return err
	}
	command := "latticekeep seal --filename " + plain + " --namespace " + shop + " --type database --ttl-days 30 --from-cluster --identity " + identity
	manifest, err := c.run(ctx, "", strings.Fields(command)...)
	if err != nil {
		return err
	}
	applied, err := c.run(ctx, manifest, "kubectl", "apply", "--filename", "-")
	c.out.console(command+" | kubectl apply --filename -", applied)
	if err != nil {
		return err
	}
	return c.all(ctx,
		"kubectl wait --for=condition=Ready sealedcredential/"+sample+" --namespace "+shop+" "+waitArg,
		"kubectl wait --for=condition=TargetSynced sealedcredential/"+sample+" --namespace "+shop+" "+waitArg,
		"kubectl get sealedcredential "+sample+" --namespace "+shop+" --output custom-columns=NAME:.metadata.name,READY:.status.conditions[?(@.type==\"Ready\")].status,TARGET:.status.target.name,VERSION:.status.version",
		"kubectl get secret "+sample+" --namespace "+shop+" --output custom-columns=NAME:.metadata.name,TYPE:.type,VERSION:.metadata.annotations.latticekeep\\.dev/version",
	)
}

// identity returns the fingerprint of the key that signs sealing keys. It reads the line that the
// server prints once it serves.
func (c *cluster) identity(ctx context.Context) (string, error) {
	log, err := c.run(ctx, "", "kubectl", "logs", "latticekeep-0", "--namespace", system)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(log) {
		var ready struct{ Identity, Chain string }
		if json.Unmarshal([]byte(line), &ready) == nil && ready.Identity != "" {
			c.out.hide(ready.Identity, "<identity>")
			c.out.hide(ready.Chain, "<chain>")
			return ready.Identity, nil
		}
	}
	return "", errors.New("the server has not printed its identity")
}

func (c *cluster) refuse(ctx context.Context) error {
	if err := c.refused(ctx, "", "kubectl apply --filename config/samples/sealedcredential.yaml"); err != nil {
		return err
	}
	read := "kubectl get sealedcredential " + sample + " --namespace " + shop + " --output json"
	object, err := c.run(ctx, "", strings.Fields(read)...)
	if err != nil {
		return err
	}
	copied, err := copyTo(object, "default")
	if err != nil {
		return err
	}
	return c.refused(ctx, copied, "kubectl apply --filename -", read+" | jq '{apiVersion, kind, metadata: {name: .metadata.name, namespace: \"default\"}, spec}' | ")
}

// copyTo returns the copy that an attacker could make of an object that they can read.
func copyTo(object, namespace string) (string, error) {
	var o map[string]any
	if err := json.Unmarshal([]byte(object), &o); err != nil {
		return "", fmt.Errorf("decoding the object: %w", err)
	}
	delete(o, "status")
	o["metadata"] = map[string]any{"name": sample, "namespace": namespace}
	out, err := json.Marshal(o)
	return string(out), err
}

func (c *cluster) readSecret(ctx context.Context) error { return c.consume(ctx, "orders") }

// drift deletes the target, and then changes its data and adds a label.
func (c *cluster) drift(ctx context.Context) error {
	look := func(at string) []string {
		return []string{
			"kubectl annotate --overwrite sealedcredential " + sample + " --namespace " + shop + " latticekeep.dev/sync=" + at,
			"kubectl wait --for=jsonpath={.status.target.sync}=" + at + " sealedcredential/" + sample + " --namespace " + shop + " " + waitArg,
		}
	}
	if err := c.all(ctx, append([]string{"kubectl delete secret " + sample + " --namespace " + shop}, look("deleted")...)...); err != nil {
		return err
	}
	if err := c.consume(ctx, "orders"); err != nil {
		return err
	}
	if err := c.all(ctx, append([]string{
		"kubectl label secret " + sample + " --namespace " + shop + " team=payments",
		"kubectl patch secret " + sample + " --namespace " + shop + " --type=merge --patch={\"data\":{\"password\":\"aGFja2Vk\",\"other\":\"eA==\"}}",
	}, look("changed")...)...); err != nil {
		return err
	}
	if err := c.all(ctx, "kubectl get secret "+sample+" --namespace "+shop+" --output custom-columns=NAME:.metadata.name,TEAM:.metadata.labels.team,OTHER:.data.other"); err != nil {
		return err
	}
	return c.consume(ctx, "orders")
}

func (c *cluster) readREST(ctx context.Context) error {
	if err := c.publishCA(ctx); err != nil {
		return err
	}
	if err := c.consume(ctx, "billing"); err != nil {
		return err
	}
	// Objects outside the role are refused before the API server checks whether they exist.
	if err := c.all(ctx,
		"kubectl apply --filename "+manifests+"nosy.yaml",
		"kubectl wait --for=jsonpath={.status.phase}=Failed pod/nosy --namespace "+shop+" "+waitArg,
	); err != nil {
		return err
	}
	got, err := c.do(ctx, "kubectl", "logs", "nosy", "--namespace", shop)
	if err != nil {
		return err
	}
	if got != "reading orders-database: answered 403\n" {
		return errors.New("it was not refused with 403")
	}
	return c.all(ctx, "kubectl delete pod nosy --namespace "+shop)
}

// publishCA gives the shop the CA certificate with which its pods verify the server.
func (c *cluster) publishCA(ctx context.Context) error {
	read := []string{"kubectl", "get", "secret", "latticekeep-tls", "--namespace", system, `--output=go-template={{index .data "ca.crt" | base64decode}}`}
	ca, err := c.run(ctx, "", read...)
	if err != nil {
		return err
	}
	write := "kubectl create configmap latticekeep-ca --namespace " + shop + " --from-file=ca.crt=/dev/stdin"
	made, err := c.run(ctx, ca, strings.Fields(write)...)
	c.out.console(quote(read)+" | "+write, made)
	return err
}

// consume runs the pod of a manifest to its end, and compares the digests in its output with those
// of the sample.
func (c *cluster) consume(ctx context.Context, pod string) error {
	want, err := c.digests(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl apply --filename "+manifests+pod+".yaml",
		"kubectl wait --for=jsonpath={.status.phase}=Succeeded pod/"+pod+" --namespace "+shop+" "+waitArg,
	); err != nil {
		return err
	}
	got, err := c.do(ctx, "kubectl", "logs", pod, "--namespace", shop)
	if err != nil {
		return err
	}
	if got != want && got != exchange+want {
		return fmt.Errorf("%s did not read the values of %s, which are\n%s", pod, plain, want)
	}
	return c.all(ctx, "kubectl delete pod "+pod+" --namespace "+shop)
}

// exchange is the first line that a workload prints when it reads over REST.
const exchange = "TLS 1.3, X25519MLKEM768\n"

// digests returns the digests of the plain sample in the format of the workload.
func (c *cluster) digests(ctx context.Context) (string, error) {
	out, err := c.run(ctx, "", "kubectl", "create", "--dry-run=client", "--filename", plain, "--output=jsonpath={.stringData}")
	if err != nil {
		return "", err
	}
	var values map[string]string
	if err := json.Unmarshal([]byte(out), &values); err != nil {
		return "", fmt.Errorf("decoding %s: %w", plain, err)
	}
	var digests strings.Builder
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&digests, "%s: %d bytes, SHA-256 %x\n", key, len(values[key]), sha256.Sum256([]byte(values[key])))
	}
	return digests.String(), nil
}

func (c *cluster) samples(ctx context.Context) error {
	if err := c.all(ctx,
		"kubectl create secret generic legacy-api --namespace "+shop+" --from-literal=token=example",
		"kubectl annotate secret legacy-api --namespace "+shop+" latticekeep.dev/import=payment-api",
		"kubectl apply --kustomize "+manifests+"samples",
		"kubectl wait --for=condition=Ready sealedcredentials --all --namespace "+shop+" "+waitArg,
		"kubectl wait --for=condition=TargetSynced sealedcredential/orders-database --namespace "+shop+" "+waitArg,
	); err != nil {
		return err
	}
	if _, err := c.do(ctx, "kubectl", "get", "secret", "orders-database", "--namespace", shop, `--output=go-template={{range $key, $value := .data}}{{$key}}{{"\n"}}{{end}}`); err != nil {
		return err
	}
	return c.nothing(ctx, "kubectl get secret legacy-api --namespace "+shop+" --ignore-not-found")
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
	if err := c.untilLogged(ctx, "load", "under load"); err != nil {
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

// untilLogged waits for a line in the log of a pod of the shop.
func (c *cluster) untilLogged(ctx context.Context, pod, line string) error {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		log, err := c.run(ctx, "", "kubectl", "logs", pod, "--namespace", shop)
		if err == nil && strings.Contains(log, line+"\n") {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for %q in the log of %s: %w: %s", line, pod, ctx.Err(), log), err)
		}
	}
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

const (
	archive         = "archive" // a namespace that is deleted and restored
	archiveManifest = manifests + "archive.yaml"
	reasons         = "kubectl get sealedcredentials --namespace " + archive + " --output custom-columns=NAME:.metadata.name," +
		"READY:.status.conditions[?(@.type==\"Ready\")].status,REASON:.status.conditions[?(@.type==\"Ready\")].reason"
)

// inArchive returns a command that waits for the condition of objects in the archive.
func inArchive(condition string, names ...string) string {
	for i, name := range names {
		names[i] = "sealedcredential/" + name
	}
	return "kubectl wait --for=" + condition + " " + strings.Join(names, " ") + " --namespace " + archive + " " + waitArg
}

const former = "jsonpath={.status.conditions[?(@.type==\"Ready\")].reason}=FormerValues"

// restoreObject deletes an object and applies it again.
func (c *cluster) restoreObject(ctx context.Context) error {
	if err := c.all(ctx,
		"kubectl create namespace "+archive,
		"kubectl apply --filename "+archiveManifest,
		inArchive("condition=TargetSynced", "kept", "dropped"),
	); err != nil {
		return err
	}
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl delete sealedcredential kept --namespace "+archive,
		"kubectl apply --filename "+archiveManifest,
		inArchive("condition=TargetSynced", "kept"),
		reasons,
	); err != nil {
		return err
	}
	return c.kept(ctx, before, "kept", "dropped")
}

// restoreFromManifests deletes the namespace and applies its manifests.
func (c *cluster) restoreFromManifests(ctx context.Context) error {
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl delete namespace "+archive+" "+waitArg,
		"kubectl create namespace "+archive,
		"kubectl apply --filename "+archiveManifest+" --selector entry=kept",
		inArchive(former, "kept"),
		reasons,
	); err != nil {
		return err
	}
	tenant, err := c.formerTenant(ctx)
	if err != nil {
		return err
	}
	uid, err := c.run(ctx, "", "kubectl", "get", "namespace", archive, "--output=jsonpath={.metadata.uid}")
	if err != nil {
		return err
	}
	c.out.hide(tenant, "<tenant>")
	if err := c.all(ctx,
		"helm upgrade latticekeep "+chart+" --namespace "+system+" --values "+values+" --set config.kubernetes.namespacesByUID."+uid+"="+tenant+" --wait "+waitArg,
		inArchive("condition=TargetSynced", "kept"),
		"kubectl apply --filename "+archiveManifest,
		inArchive("condition=TargetSynced", "kept", "dropped"),
		reasons,
	); err != nil {
		return err
	}
	return c.kept(ctx, before, "kept")
}

// formerTenant returns the tenant that the operator's log names.
func (c *cluster) formerTenant(ctx context.Context) (string, error) {
	log, err := c.run(ctx, "", "kubectl", "logs", "latticekeep-0", "--namespace", system)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(log) {
		var entry struct{ Msg, Tenant string }
		if json.Unmarshal([]byte(line), &entry) == nil && strings.Contains(entry.Msg, "left values of an object of this name") {
			return entry.Tenant, nil
		}
	}
	return "", errors.New("the operator's log does not name the tenant of the previous namespace")
}

// restoreLikeVelero deletes the namespace and puts Secrets back before the objects. As Velero does,
// it leaves out the status and what the API server gave to the object.
func (c *cluster) restoreLikeVelero(ctx context.Context) error {
	// A fresh beginning: both objects are ready, and the namespace has not been mapped.
	if err := c.all(ctx,
		"kubectl delete namespace "+archive+" "+waitArg,
		"kubectl create namespace "+archive,
	); err != nil {
		return err
	}
	own, err := c.run(ctx, "", "kubectl", "create", "--dry-run=client", "--filename", archiveManifest, "--output=json")
	if err != nil {
		return err
	}
	// Under other names nothing is left from the steps before.
	own = strings.NewReplacer(`"name": "kept"`, `"name": "retained"`, `"name": "dropped"`, `"name": "deleted"`).Replace(own)
	applied, err := c.run(ctx, own, "kubectl", "create", "--filename", "-")
	c.out.console("sed 's/kept/retained/; s/dropped/deleted/' "+archiveManifest+" | kubectl create --filename -", applied)
	if err != nil {
		return err
	}
	if err := c.all(ctx, inArchive("condition=TargetSynced", "retained", "deleted")); err != nil {
		return err
	}
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	saved := map[string]string{}
	for _, kind := range []string{"secrets", "sealedcredentials"} {
		command := "kubectl get " + kind + " --namespace " + archive + " --output json"
		list, err := c.run(ctx, "", strings.Fields(command)...)
		if err != nil {
			return err
		}
		c.out.console(command+" | jq 'del(.items[].status, (.items[].metadata | .uid, .resourceVersion, .generation, .creationTimestamp))' >"+kind+".json", "")
		if saved[kind], err = reset(list); err != nil {
			return err
		}
	}
	if err := c.all(ctx, "kubectl delete namespace "+archive+" "+waitArg, "kubectl create namespace "+archive); err != nil {
		return err
	}
	for _, kind := range []string{"secrets", "sealedcredentials"} {
		created, err := c.run(ctx, saved[kind], "kubectl", "create", "--filename", "-")
		c.out.console("kubectl create --filename "+kind+".json", created)
		if err != nil {
			return err
		}
	}
	if err := c.all(ctx, inArchive(former, "retained", "deleted"), reasons); err != nil {
		return err
	}
	if err := c.kept(ctx, before, "retained", "deleted"); err != nil {
		return fmt.Errorf("while the objects wait: %w", err)
	}
	for _, name := range []string{"retained", "deleted"} {
		if err := c.all(ctx,
			"kubectl annotate secret "+name+" --namespace "+archive+" latticekeep.dev/adopt="+name,
			"kubectl annotate sealedcredential "+name+" --namespace "+archive+" latticekeep.dev/sync=now",
		); err != nil {
			return err
		}
	}
	if err := c.all(ctx, inArchive("condition=TargetSynced", "retained", "deleted"), reasons); err != nil {
		return err
	}
	if err := c.kept(ctx, before, "retained", "deleted"); err != nil {
		return err
	}
	return c.all(ctx, "kubectl delete namespace "+archive+" "+waitArg)
}

// reset removes from a list of objects what Velero does not restore.
func reset(list string) (string, error) {
	var l struct {
		APIVersion string           `json:"apiVersion"`
		Kind       string           `json:"kind"`
		Items      []map[string]any `json:"items"`
	}
	if err := json.Unmarshal([]byte(list), &l); err != nil {
		return "", fmt.Errorf("decoding a list: %w", err)
	}
	for _, item := range l.Items {
		delete(item, "status")
		if metadata, ok := item["metadata"].(map[string]any); ok {
			for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "selfLink"} {
				delete(metadata, field)
			}
		}
	}
	out, err := json.Marshal(l)
	return string(out), err
}

// passwords returns a digest of the data of each Secret of the archive.
func (c *cluster) passwords(ctx context.Context) (map[string][32]byte, error) {
	out, err := c.run(ctx, "", "kubectl", "get", "secrets", "--namespace", archive, "--output=jsonpath={range .items[*]}{.metadata.name} {.data.password}{\"\\n\"}{end}")
	if err != nil {
		return nil, err
	}
	all := make(map[string][32]byte)
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			all[name] = sha256.Sum256([]byte(value))
		}
	}
	return all, nil
}

// kept fails unless the Secrets hold the values that they held before.
func (c *cluster) kept(ctx context.Context, before map[string][32]byte, names ...string) error {
	now, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		if before[name] == ([32]byte{}) || now[name] != before[name] {
			return fmt.Errorf("the Secret %s does not hold the value from before", name)
		}
	}
	return nil
}

// all runs commands without quoted words, one after the other.
func (c *cluster) all(ctx context.Context, commands ...string) error {
	for _, command := range commands {
		if _, err := c.do(ctx, strings.Fields(command)...); err != nil {
			return err
		}
	}
	return nil
}

// refused runs a command that the cluster has to refuse because of latticekeep.
func (c *cluster) refused(ctx context.Context, stdin, command string, prefix ...string) error {
	out, err := c.run(ctx, stdin, strings.Fields(command)...)
	c.out.console(strings.Join(prefix, "")+command, out)
	if err == nil {
		return fmt.Errorf("%s was not refused", command)
	}
	if !strings.Contains(out, "sealedcredentials.latticekeep.dev\" denied the request") {
		return fmt.Errorf("it was not our webhook that refused it: %w", err)
	}
	return nil
}

// nothing runs a command that must print no line.
func (c *cluster) nothing(ctx context.Context, command string) error {
	out, err := c.do(ctx, strings.Fields(command)...)
	if err == nil && strings.TrimSpace(out) != "" {
		err = fmt.Errorf("still there: %s", out)
	}
	return err
}
