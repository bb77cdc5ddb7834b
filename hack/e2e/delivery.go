package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// delivery are the steps that bring a credential to pods without a Secret.
type delivery struct {
	secretsInEtcd
	values []string // passwords that the credential has had
}

// ways are the ways of delivery, each with a pod.
var ways = []string{"csi", "agent"}

const (
	ledger      = "ledger"       // a credential of the shop without a target
	ledgerPlain = "ledger.plain" // its values, which a user has elsewhere
)

// start starts the CSI driver and our provider, and makes the credential.
func (d *delivery) start(ctx context.Context) error {
	d.out.hide(d.node.CSI, "deploy")
	if err := d.all(ctx, "kubectl apply --filename "+d.node.CSI,
		"kubectl wait --for=condition=Established crd/secretproviderclasses.secrets-store.csi.x-k8s.io crd/secretproviderclasspodstatuses.secrets-store.csi.x-k8s.io "+waitArg,
		"kubectl apply --filename "+manifests+"csi-driver.yaml",
	); err != nil {
		return err
	}
	token, err := d.run(ctx, "", "kubectl", "create", "token", "secrets-store-csi-driver", "--namespace", "kube-system", "--duration=24h")
	if err != nil {
		return err
	}
	if err := d.node.StartCSI(ctx, strings.TrimSpace(token)); err != nil {
		return err
	}
	if _, err := d.shell(ctx, "kubectl get secret latticekeep-tls --namespace "+system+" --output=go-template='{{index .data \"ca.crt\" | base64decode}}' | kubectl create configmap latticekeep-ca --namespace "+system+" --from-file=ca.crt=/dev/stdin"); err != nil {
		return err
	}
	d.out.printf("\nThe socket of the provider is in a folder of the node, which the profile `restricted` does not allow.\n")
	if err := d.all(ctx,
		"kubectl label --overwrite namespace "+system+" pod-security.kubernetes.io/enforce=privileged",
		"helm upgrade latticekeep "+chart+" --namespace "+system+" --values "+values+" --set csiProvider.enabled=true --wait "+waitArg,
		"kubectl rollout status daemonset/latticekeep-csi-provider --namespace "+system+" "+waitArg,
	); err != nil {
		return err
	}
	pod, err := fromGuide()
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(d.saved, agentPod), []byte(pod), 0o600); err != nil {
		return err
	}
	return d.newVersion(ctx, 1)
}

// newVersion gives the credential another password.
func (d *delivery) newVersion(ctx context.Context, version int) error {
	password := "s3cret/" + rand.Text()
	d.values = append(d.values, password)
	for line := range strings.Lines(d.files()) { // the digests differ on each run
		name, digest, _ := strings.Cut(strings.TrimSpace(line), " SHA-256 ")
		d.out.hide(digest, fmt.Sprintf("<digest of %s in version %d>", strings.SplitN(name, ":", 2)[0], version))
	}
	secret := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": %q, "namespace": %q}, "stringData": {"username": "ledger", "password": %q}}`, ledger, shop, password)
	file := filepath.Join(d.saved, ledgerPlain)
	if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
		return err
	}
	identity, _, err := d.fingerprints(ctx)
	if err != nil {
		return err
	}
	if err := d.save(ctx, "ledger.yaml", strings.Fields("latticekeep seal --filename "+file+" --type database --ttl-days 30 --no-target --from-cluster --identity "+identity)...); err != nil {
		return err
	}
	return d.all(ctx,
		"kubectl apply --filename "+filepath.Join(d.saved, "ledger.yaml"),
		fmt.Sprintf("kubectl wait --for=jsonpath={.status.version}=%d sealedcredential/%s --namespace %s %s", version, ledger, shop, waitArg),
	)
}

// agentPod is the pod of the guide in a file of the user.
const agentPod = "agent-pod.yaml"

// fromGuide returns the first manifest of docs/guides/agent.md with the names and images of this run.
func fromGuide() (string, error) {
	guide, err := os.ReadFile("docs/guides/agent.md")
	if err != nil {
		return "", err
	}
	_, block, _ := strings.Cut(string(guide), "```yaml\n")
	block, _, found := strings.Cut(block, "```")
	if !found {
		return "", errors.New("the guide of the agent has no manifest")
	}
	return strings.NewReplacer(
		"orders-database", ledger, "orders-files", "ledger-files",
		"{name: orders, namespace: shop}", "{name: ledger-agent, namespace: shop}", "serviceAccountName: orders", "serviceAccountName: ledger-agent",
		"latticekeep/latticekeep:0.1.0", productImage,
		"- name: orders\n      image: registry.example.org/orders", "- name: ledger\n      image: "+workloadImage+"\n      args: [follow, /credentials]",
		"@db/orders", "@db/ledger",
	).Replace(block), nil
}

// manifests returns the files of a pod. The last one has the pod.
func (d *delivery) manifests(by string) []string {
	if by == "agent" {
		return []string{manifests + "agent.yaml", filepath.Join(d.saved, agentPod)}
	}
	return []string{manifests + by + ".yaml"}
}

// files returns what the workload prints of the files of the newest version.
func (d *delivery) files() string {
	password := d.values[len(d.values)-1]
	return digestLines(map[string]string{
		"password": password, "url": "postgres://ledger:" + strings.ReplaceAll(url.QueryEscape(password), "+", "%20") + "@db/ledger",
	})
}

// byCSI and byAgent run a pod that reads the credential.
func (d *delivery) byCSI(ctx context.Context) error   { return d.deliver(ctx, "csi") }
func (d *delivery) byAgent(ctx context.Context) error { return d.deliver(ctx, "agent") }

func (d *delivery) deliver(ctx context.Context, by string) error {
	if err := d.all(ctx, "kubectl apply --filename "+strings.Join(d.manifests(by), " --filename ")); err != nil {
		return err
	}
	if err := d.reads(ctx, by); err != nil {
		return err
	}
	return d.all(ctx, "kubectl logs "+ledger+"-"+by+" --container ledger --namespace "+shop)
}

// reads returns once a pod is ready and has the newest version.
func (d *delivery) reads(ctx context.Context, by string) error {
	pod := ledger + "-" + by
	if err := d.all(ctx, "kubectl wait --for=condition=Ready pod/"+pod+" --namespace "+shop+" "+waitArg); err != nil {
		return err
	}
	return d.untilLogged(ctx, shop, pod, d.files())
}

// nothingStored fails if a value that the credential has had is in a Secret, or anywhere in etcd.
func (d *delivery) nothingStored(ctx context.Context) error {
	if _, err := d.shell(ctx, "kubectl get secrets --namespace "+shop+" --output name"); err != nil {
		return err
	}
	secrets, err := d.run(ctx, "", "kubectl", "get", "secrets", "--all-namespaces", "--output=json")
	if err != nil {
		return err
	}
	all := `{"key": "` + base64.StdEncoding.EncodeToString([]byte{0}) + `", "range_end": "` + base64.StdEncoding.EncodeToString([]byte{0}) + `"}`
	stored, err := d.quietly(ctx, "curl --silent --show-error --fail --unix-socket "+d.node.EtcdSocket()+" http://etcd/v3/kv/range --data '"+all+"'")
	if err != nil {
		return err
	}
	var etcd struct{ Kvs []struct{ Key, Value []byte } }
	if err := json.Unmarshal([]byte(stored), &etcd); err != nil {
		return fmt.Errorf("decoding what etcd has: %w", err)
	}
	var found bool // the search sees what is in a Secret: that of another credential
	for _, kv := range etcd.Kvs {
		found = found || bytes.Contains(kv.Value, []byte("correct-horse-battery-staple"))
		for _, value := range d.values {
			if bytes.Contains(kv.Value, []byte(value)) || bytes.Contains(kv.Value, []byte(base64.StdEncoding.EncodeToString([]byte(value)))) {
				return fmt.Errorf("etcd has a value of %s in %s", ledger, kv.Key)
			}
		}
	}
	for _, value := range d.values {
		if strings.Contains(secrets, base64.StdEncoding.EncodeToString([]byte(value))) {
			return fmt.Errorf("a Secret has a value of %s", ledger)
		}
	}
	if !found {
		return errors.New("etcd has not even the value of the target Secret database: nothing was searched")
	}
	d.out.printf("\nNo row of etcd has a value of the credential; that of the target Secret `%s` is there.\n", sample)
	return nil
}

// rotate gives the credential another version, which reaches both pods.
func (d *delivery) rotate(ctx context.Context) error {
	if err := d.newVersion(ctx, 2); err != nil {
		return err
	}
	for _, by := range ways {
		pod := ledger + "-" + by
		if err := d.untilLogged(ctx, shop, pod, d.files()); err != nil {
			return err
		}
		if err := d.all(ctx,
			"kubectl logs "+pod+" --container ledger --namespace "+shop,
			"kubectl get pod "+pod+" --namespace "+shop+" --output custom-columns=POD:.metadata.name,RESTARTS:.status.containerStatuses[*].restartCount",
		); err != nil {
			return err
		}
	}
	if err := d.all(ctx, "kubectl get secretproviderclasspodstatuses --namespace "+shop+" --output custom-columns=POD:.status.podName,ID:.status.objects[*].id"); err != nil {
		return err
	}
	return d.nothingStored(ctx)
}

// deny takes the pods' right away, shows what new ones are told, and does what that says.
func (d *delivery) deny(ctx context.Context) error {
	for _, by := range ways {
		pod := ledger + "-" + by
		if err := d.all(ctx,
			"kubectl delete pod "+pod+" --namespace "+shop,
			"kubectl delete role,rolebinding "+pod+" --namespace "+shop,
		); err != nil {
			return err
		}
		if err := d.again(ctx, by); err != nil {
			return err
		}
		text, err := d.untilTold(ctx, lookups[by], "lacks unseal on it: ")
		if err != nil {
			return err
		}
		_, command, _ := strings.Cut(text, "lacks unseal on it: ")
		command, _, _ = strings.Cut(command, "\n")
		command = strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(command), `"`))
		d.out.printf("\nIt is done as the text says.\n")
		if _, err := d.shell(ctx, command); err != nil {
			return err
		}
		if err := d.all(ctx, "kubectl wait --for=condition=Ready pod/"+pod+" --namespace "+shop+" "+waitArg); err != nil {
			return err
		}
	}
	return nil
}

// again makes the pod of a manifest again, and nothing else of it.
func (d *delivery) again(ctx context.Context, by string) error {
	_, err := d.shell(ctx, "kubectl create --dry-run=client --output json --filename "+d.manifests(by)[len(d.manifests(by))-1]+" | jq 'select(.kind == \"Pod\")' | kubectl apply --filename -")
	return err
}

// lookups are commands by which somebody learns why a pod does not start: from the event of the volume, and from the
// message of the init container.
var lookups = map[string]string{
	"csi": "kubectl get events --namespace " + shop + " --field-selector involvedObject.name=" + ledger + "-csi,reason=FailedMount --sort-by .lastTimestamp --output jsonpath='{.items[-1:].message}'",
	"agent": "kubectl get pod " + ledger + "-agent --namespace " + shop +
		" --output jsonpath='{.status.initContainerStatuses[0].lastState.terminated.message}{.status.initContainerStatuses[0].state.terminated.message}'",
}

// untilTold repeats a command until its output has a text, and returns the output.
func (d *delivery) untilTold(ctx context.Context, look, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		told, err := d.quietly(ctx, look)
		if err == nil && strings.Contains(told, text) {
			d.out.console(look, told)
			return told, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return "", errors.Join(fmt.Errorf("waiting for %q from %s: %s", text, look, told), err)
		}
	}
}

// untilAllTold returns once both pods say that the vault does not answer.
func (d *delivery) untilAllTold(ctx context.Context) error {
	if _, err := d.untilTold(ctx, lookups["csi"], "does not answer"); err != nil {
		return err
	}
	_, err := d.untilTold(ctx, "kubectl logs "+ledger+"-agent --container credentials --namespace "+shop+" --tail 1", "does not answer")
	return err
}

func (d *delivery) stopVault(ctx context.Context) error {
	return d.all(ctx, scale+"0", "kubectl wait --for=delete pod/latticekeep-0 --namespace "+system+" "+waitArg)
}

// startVault returns once the vault is back, and both pods have their files.
func (d *delivery) startVault(ctx context.Context) error {
	if err := d.all(ctx, podsOf(shop), scale+"1", "kubectl rollout status statefulset/latticekeep --namespace "+system+" "+waitArg); err != nil {
		return err
	}
	for _, by := range ways {
		if err := d.reads(ctx, by); err != nil {
			return err
		}
	}
	return d.all(ctx, podsOf(shop))
}

// withoutVault restarts kubelet while there is no vault: running pods have their files, new ones wait.
func (d *delivery) withoutVault(ctx context.Context) error {
	if err := d.stopVault(ctx); err != nil {
		return err
	}
	if err := d.node.RestartKubelet(); err != nil {
		return err
	}
	d.out.printf("\nkubelet has ended and begun again.\n")
	if err := d.all(ctx, "kubectl wait --for=condition=Ready nodes --all "+waitArg, podsOf(shop)); err != nil {
		return err
	}
	for _, by := range ways {
		pod := ledger + "-" + by
		if err := d.all(ctx, "kubectl delete pod "+pod+" --namespace "+shop); err != nil {
			return err
		}
		if err := d.again(ctx, by); err != nil {
			return err
		}
	}
	d.out.printf("\nThe pods are new. The event of the volume says what the one by CSI waits for, and the log of the init container what the agent does.\n")
	if err := d.untilAllTold(ctx); err != nil {
		return err
	}
	return d.startVault(ctx)
}

// nodeWithoutVault restarts the node while there is no vault: all pods wait, and go on when it is back.
func (d *delivery) nodeWithoutVault(ctx context.Context) error {
	if err := d.stopVault(ctx); err != nil {
		return err
	}
	// Events of before must not answer what is asked below.
	if _, err := d.quietly(ctx, "kubectl delete events --all --namespace "+shop); err != nil {
		return err
	}
	if err := d.node.Restart(ctx); err != nil {
		return err
	}
	d.out.printf("\nThe node has ended and begun again.\n")
	if err := d.untilAllTold(ctx); err != nil {
		return err
	}
	return d.startVault(ctx)
}

// finish takes the pods, the credential and the provider away again.
func (d *delivery) finish(ctx context.Context) error {
	return d.all(ctx,
		"kubectl delete pod "+ledger+"-csi "+ledger+"-agent --namespace "+shop,
		"kubectl delete sealedcredential "+ledger+" --namespace "+shop,
		"helm upgrade latticekeep "+chart+" --namespace "+system+" --values "+values+" --wait "+waitArg,
		"kubectl wait --for=delete pod --selector app.kubernetes.io/component=csi-provider --namespace "+system+" "+waitArg,
		"kubectl label --overwrite namespace "+system+" pod-security.kubernetes.io/enforce=restricted",
	)
}
