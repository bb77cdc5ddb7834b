package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

const shopManifest = "database.yaml" // the sealed sample, which a user would have in git

func (c *cluster) seal(ctx context.Context) error {
	if err := c.sealFor(ctx, shop, shopManifest); err != nil {
		return err
	}
	return c.all(ctx,
		"kubectl apply --filename "+filepath.Join(c.saved, shopManifest),
		"kubectl wait --for=condition=Ready sealedcredential/"+sample+" --namespace "+shop+" "+waitArg,
		"kubectl wait --for=condition=TargetSynced sealedcredential/"+sample+" --namespace "+shop+" "+waitArg,
		"kubectl get sealedcredential "+sample+" --namespace "+shop+" --output custom-columns=NAME:.metadata.name,READY:.status.conditions[?(@.type==\"Ready\")].status,TARGET:.status.target.name,VERSION:.status.version",
		"kubectl get secret "+sample+" --namespace "+shop+" --output custom-columns=NAME:.metadata.name,TYPE:.type,VERSION:.metadata.annotations.latticekeep\\.dev/version",
	)
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
	return digestLines(values), nil
}

// digestLines returns what the workload prints of values.
func digestLines(values map[string]string) string {
	var lines strings.Builder
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&lines, "%s: %d bytes, SHA-256 %x\n", key, len(values[key]), sha256.Sum256([]byte(values[key])))
	}
	return lines.String()
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
