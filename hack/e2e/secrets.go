package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// secretsInEtcd are the steps of docs/guides/kms-plugin.md, on the node of the API server.
type secretsInEtcd struct{ *cluster }

const (
	pluginFiles  = "config/kms-plugin/"
	pluginDir    = "/etc/latticekeep/kms-plugin"
	pluginSocket = "/run/latticekeep/kms.sock"
	pluginPod    = "latticekeep-kms-plugin-node"
	staticPod    = "/etc/kubernetes/manifests/latticekeep-kms-plugin.yaml"
	setAside     = "/etc/kubernetes/latticekeep-kms-plugin.yaml"

	writeAll = "kubectl get secrets --all-namespaces -o json | kubectl replace -f -"
	scale    = "kubectl scale statefulset/latticekeep --namespace " + system + " --replicas "
)

// encrypt follows the guide from a cluster with plain Secrets to one that refuses them.
func (s secretsInEtcd) encrypt(ctx context.Context) error {
	if err := s.counted(ctx, 0); err != nil {
		return err
	}
	for _, line := range []string{
		"mkdir -m 0700 -p " + pluginDir,
		`(umask 077; printf 'latticekeep-kms-key-1:%s\n' "$(openssl rand -base64 32)" >` + pluginDir + "/kms.key)",
		"latticekeep kms-plugin init --dir " + pluginDir + " --node cp-1 --kms file://" + pluginDir + "/kms.key",
		"sed 's#latticekeep/latticekeep:0.1.0#" + productImage + "#' " + pluginFiles + "static-pod.yaml >" + staticPod,
		"kubectl wait --for=create pod/" + pluginPod + " --namespace kube-system " + waitArg,
		"kubectl wait --for=condition=Ready pod/" + pluginPod + " --namespace kube-system " + waitArg,
	} {
		if _, err := s.shell(ctx, line); err != nil {
			return err
		}
	}
	if err := s.untilLogged(ctx, "kube-system", pluginPod, "msg=serving"); err != nil { // ready is a pod that runs
		return err
	}
	for _, line := range []string{
		"kubectl logs " + pluginPod + " --namespace kube-system",
		"mkdir -p /etc/kubernetes/encryption",
		"cp " + pluginFiles + "encryption-*.yaml /etc/kubernetes/encryption/",
	} {
		if _, err := s.shell(ctx, line); err != nil {
			return err
		}
	}
	if err := s.configure(ctx, "encryption-read.yaml"); err != nil {
		return err
	}
	if err := s.counted(ctx, 0); err != nil {
		return err
	}
	if err := s.configure(ctx, "encryption-write.yaml"); err != nil {
		return err
	}
	if err := s.writesWithCurrentKey(ctx); err != nil {
		return err
	}
	if err := s.writeAll(ctx); err != nil {
		return err
	}
	if err := s.counted(ctx, 1); err != nil {
		return err
	}
	if err := s.configure(ctx, "encryption-only.yaml"); err != nil {
		return err
	}
	return s.noValueInEtcd(ctx)
}

// restart starts plugin and API server, in this order, while there is no vault and nothing else that
// the plugin could ask.
func (s secretsInEtcd) restart(ctx context.Context) error {
	before, err := s.values(ctx)
	if err != nil {
		return err
	}
	if err := s.all(ctx,
		scale+"0",
		"kubectl wait --for=delete pod/latticekeep-0 --namespace "+system+" "+waitArg,
		"mv "+staticPod+" "+setAside,
	); err != nil {
		return err
	}
	if err := s.untilSocket(ctx, false); err != nil {
		return err
	}
	s.out.printf("\nThe plugin has ended. Now the API server ends as well, and kubelet gets the manifest back while it is away.\n")
	if err := s.node.StopAPIServer(); err != nil {
		return err
	}
	if err := s.all(ctx, "mv "+setAside+" "+staticPod); err != nil {
		return err
	}
	if err := s.untilSocket(ctx, true); err != nil {
		return err
	}
	if err := s.startAPIServer(ctx, "encryption-only.yaml"); err != nil {
		return err
	}
	if err := s.all(ctx,
		"kubectl get pods --namespace "+system+" --output custom-columns=POD:.metadata.name",
		"kubectl get secrets --namespace "+shop+" --output custom-columns=NAME:.metadata.name,TYPE:.type",
	); err != nil {
		return err
	}
	after, err := s.values(ctx)
	if err != nil {
		return err
	}
	if !bytes.Equal(before, after) {
		return errors.New("the Secrets are not what they were before the restart")
	}
	if err := s.counted(ctx, 1); err != nil {
		return err
	}
	return s.all(ctx, scale+"1", "kubectl rollout status statefulset/latticekeep --namespace "+system+" "+waitArg)
}

// decrypt follows the guide's way back.
func (s secretsInEtcd) decrypt(ctx context.Context) error {
	before, err := s.values(ctx)
	if err != nil {
		return err
	}
	for _, config := range []string{"encryption-write.yaml", "encryption-read.yaml"} {
		if err := s.configure(ctx, config); err != nil {
			return err
		}
	}
	if err := s.writeAll(ctx); err != nil {
		return err
	}
	if err := s.counted(ctx, 0); err != nil {
		return err
	}
	if err := s.configure(ctx, ""); err != nil {
		return err
	}
	if err := s.all(ctx,
		"rm "+staticPod,
		"kubectl wait --for=delete pod/"+pluginPod+" --namespace kube-system "+waitArg,
	); err != nil {
		return err
	}
	after, err := s.values(ctx)
	if err != nil {
		return err
	}
	if !bytes.Equal(before, after) {
		return errors.New("the Secrets are not what they were while they were encrypted")
	}
	return nil
}

// shell runs a line of the guide.
func (s secretsInEtcd) shell(ctx context.Context, line string) (string, error) {
	out, err := s.quietly(ctx, line)
	s.out.console(line, out)
	return out, err
}

// quietly runs a line of the guide that the transcript does not show, or not yet.
func (s secretsInEtcd) quietly(ctx context.Context, line string) (string, error) {
	path := "PATH=" + filepath.Dir(s.latticekeep) + ":" + os.Getenv("PATH")
	return s.run(ctx, "", path, "bash", "-euo", "pipefail", "-c", line)
}

// configure restarts the API server with an EncryptionConfiguration, or with none.
func (s secretsInEtcd) configure(ctx context.Context, config string) error {
	if err := s.node.StopAPIServer(); err != nil {
		return err
	}
	return s.startAPIServer(ctx, config)
}

func (s secretsInEtcd) startAPIServer(ctx context.Context, config string) error {
	var flags []string
	if config != "" {
		flags = []string{"--encryption-provider-config=/etc/kubernetes/encryption/" + config}
	}
	err := s.node.StartAPIServer(ctx, flags...)
	s.out.console("kube-apiserver … "+strings.Join(flags, ""), "")
	if err != nil || config == "" {
		return err
	}
	_, err = s.shell(ctx, "kubectl get --raw '/readyz?verbose' | grep kms")
	return err
}

// writeAll writes the Secrets again until that ends without an error: others may change one meanwhile.
func (s secretsInEtcd) writeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	for {
		_, err := s.shell(ctx, writeAll)
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

// writesWithCurrentKey fails unless the API server uses the key that the key set names as current.
func (s secretsInEtcd) writesWithCurrentKey(ctx context.Context) error {
	compute := "latticekeep kms-plugin show --dir " + pluginDir + ` --output json | jq -j '.generations[] | select(.state == "current").key_id' | sha256sum | cut -d ' ' -f 1`
	out, err := s.quietly(ctx, compute)
	if err != nil {
		return err
	}
	hash := strings.TrimSpace(out)
	s.out.hide(hash, "HASH")
	s.out.console(compute, out)
	for _, line := range []string{
		"kubectl --namespace kube-system create secret generic key-id-check",
		"kubectl --namespace kube-system delete secret key-id-check",
		"kubectl get --raw /metrics | grep 'apiserver_envelope_encryption_key_id_hash_total.*" + hash + ".*to_storage'",
	} {
		if _, err := s.shell(ctx, line); err != nil {
			return err
		}
	}
	return nil
}

// counted reads etcd, without the API server, and fails unless a share of the Secrets, 0 or 1, is
// encrypted.
func (s secretsInEtcd) counted(ctx context.Context, share int) error {
	out, err := s.shell(ctx, s.readEtcd()+` | jq --compact-output '[.kvs[].value | startswith("`+base64.StdEncoding.EncodeToString([]byte("k8s:enc:kms:v2:latticekeep:"))+`")] | {encrypted: map(select(.)) | length, plain: map(select(not)) | length}'`)
	if err != nil {
		return err
	}
	var count struct{ Encrypted, Plain int }
	if err := json.Unmarshal([]byte(out), &count); err != nil {
		return fmt.Errorf("decoding the counts: %w", err)
	}
	if all := count.Encrypted + count.Plain; all == 0 || count.Encrypted != share*all {
		return fmt.Errorf("of %d Secrets, %d are encrypted", all, count.Encrypted)
	}
	return nil
}

// readEtcd returns a command that prints all Secrets as they are in etcd.
func (s secretsInEtcd) readEtcd() string {
	encode := func(key string) string { return base64.StdEncoding.EncodeToString([]byte(key)) }
	return "curl --silent --show-error --fail --unix-socket " + s.node.EtcdSocket() + " http://etcd/v3/kv/range" +
		` --data '{"key": "` + encode("/registry/secrets/") + `", "range_end": "` + encode("/registry/secrets0") + `"}'`
}

// noValueInEtcd fails if a value of any Secret is in etcd, as it is or as base64.
func (s secretsInEtcd) noValueInEtcd(ctx context.Context) error {
	stored, err := s.quietly(ctx, s.readEtcd())
	if err != nil {
		return err
	}
	var etcd struct{ Kvs []struct{ Value []byte } }
	if err := json.Unmarshal([]byte(stored), &etcd); err != nil {
		return fmt.Errorf("decoding what etcd has: %w", err)
	}
	list, err := s.run(ctx, "", "kubectl", "get", "secrets", "--all-namespaces", "--output=json")
	if err != nil {
		return err
	}
	var secrets struct {
		Items []struct {
			Metadata struct{ Name string }
			Data     map[string][]byte
		}
	}
	if err := json.Unmarshal([]byte(list), &secrets); err != nil {
		return fmt.Errorf("decoding the Secrets: %w", err)
	}
	values := 0
	for _, secret := range secrets.Items {
		for key, value := range secret.Data {
			if len(value) < 8 { // it may be somewhere by chance
				continue
			}
			values++
			for _, kv := range etcd.Kvs {
				if bytes.Contains(kv.Value, value) || bytes.Contains(kv.Value, []byte(base64.StdEncoding.EncodeToString(value))) {
					return fmt.Errorf("etcd has the value of %s in the Secret %s", key, secret.Metadata.Name)
				}
			}
		}
	}
	if values == 0 || len(etcd.Kvs) != len(secrets.Items) {
		return fmt.Errorf("%d values of %d Secrets were compared with %d in etcd", values, len(secrets.Items), len(etcd.Kvs))
	}
	return nil
}

// values returns a digest of the data of the Secrets of the shop.
func (s secretsInEtcd) values(ctx context.Context) ([]byte, error) {
	out, err := s.run(ctx, "", "kubectl", "get", "secrets", "--namespace", shop, "--output=jsonpath={.items[*].data}")
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256([]byte(out))
	return digest[:], nil
}

// untilSocket waits until the plugin serves, or has ended.
func (s secretsInEtcd) untilSocket(ctx context.Context, there bool) error {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		_, err := os.Lstat(pluginSocket)
		if there == (err == nil) && (err == nil || errors.Is(err, fs.ErrNotExist)) {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the socket of the plugin: %w", ctx.Err())
		}
	}
}
