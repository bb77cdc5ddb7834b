package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// restores are the steps in which the objects of one namespace come back.
type restores struct{ *cluster }

const (
	archiveManifest = manifests + "archive.yaml"
	movedManifest   = manifests + "moved.yaml"
	archiveSealed   = "archive-database.yaml" // the sample, sealed for the archive
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

// reason is a condition of `kubectl wait`.
func reason(of string) string {
	return `jsonpath={.status.conditions[?(@.type=="Ready")].reason}=` + of
}

// restoreObject deletes objects and applies them again.
func (c restores) restoreObject(ctx context.Context) error {
	if err := c.all(ctx,
		"kubectl create namespace "+archive,
		"kubectl apply --filename "+archiveManifest,
	); err != nil {
		return err
	}
	if err := c.sealFor(ctx, archive, archiveSealed); err != nil {
		return err
	}
	apply := "kubectl apply --filename " + filepath.Join(c.saved, archiveSealed)
	if err := c.all(ctx, apply, inArchive("condition=TargetSynced", "kept", "dropped", sample)); err != nil {
		return err
	}
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl delete sealedcredentials kept "+sample+" --namespace "+archive,
		"kubectl apply --filename "+archiveManifest,
		apply,
		inArchive("condition=TargetSynced", "kept", sample),
		reasons,
	); err != nil {
		return err
	}
	return c.kept(ctx, before, "kept", "dropped", sample)
}

// adopt makes an object again with another target, and has it go on with the entry of a previous one
// by the entry's id.
func (c restores) adopt(ctx context.Context) error {
	if err := c.all(ctx, "kubectl apply --filename "+movedManifest, inArchive("condition=TargetSynced", "moved")); err != nil {
		return err
	}
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx, "kubectl delete sealedcredential moved --namespace "+archive); err != nil {
		return err
	}
	manifest, err := os.ReadFile(movedManifest)
	if err != nil {
		return err
	}
	applied, err := c.run(ctx, strings.Replace(string(manifest), "target: {}", "target: {name: elsewhere}", 1), "kubectl", "apply", "--filename", "-")
	c.out.console("sed 's/target: {}/target: {name: elsewhere}/' "+movedManifest+" | kubectl apply --filename -", applied)
	if err != nil {
		return err
	}
	if err := c.all(ctx, inArchive(reason("FormerValues"), "moved")); err != nil {
		return err
	}
	message, err := c.do(ctx, "kubectl", "get", "sealedcredential", "moved", "--namespace", archive, `--output=jsonpath={.status.conditions[?(@.type=="Ready")].message}`)
	if err != nil {
		return err
	}
	_, id, _ := strings.Cut(message, "(")
	id, _, _ = strings.Cut(id, ")")
	patch := "kubectl patch sealedcredential moved --namespace " + archive + ` --type=merge --patch={"spec":{"adoptFrom":{"credentialID":"` + id + `"}}} --as=jane`
	if err := c.all(ctx,
		"kubectl create role developer --namespace "+archive+" --verb=get,create,update,patch,delete --resource=sealedcredentials.latticekeep.dev",
		"kubectl create rolebinding developer --namespace "+archive+" --role=developer --user=jane",
	); err != nil {
		return err
	}
	if err := c.refused(ctx, "", patch); err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl create role latticekeep-adopt --namespace "+archive+" --verb=adopt --resource=sealedcredentials.latticekeep.dev",
		"kubectl create rolebinding adopt --namespace "+archive+" --role=latticekeep-adopt --user=jane",
		patch,
		inArchive("condition=TargetSynced", "moved"),
		reasons,
	); err != nil {
		return err
	}
	before["elsewhere"] = before["moved"]
	return c.kept(ctx, before, "elsewhere")
}

// restoreFromManifests deletes the namespace and applies its manifests.
func (c restores) restoreFromManifests(ctx context.Context) error {
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl delete namespace "+archive+" "+waitArg,
		"kubectl create namespace "+archive,
		"kubectl apply --filename "+archiveManifest+" --selector entry=kept",
		inArchive(reason("FormerValues"), "kept"),
		reasons,
	); err != nil {
		return err
	}
	tenant, err := c.formerTenant(ctx, archive, "kept")
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
		"kubectl apply --filename "+filepath.Join(c.saved, archiveSealed),
		inArchive("condition=TargetSynced", "kept", "dropped", sample),
		reasons,
	); err != nil {
		return err
	}
	return c.kept(ctx, before, "kept", sample)
}

// formerTenant returns the tenant that the operator's log names beside an object that waits.
func (c restores) formerTenant(ctx context.Context, namespace, name string) (string, error) {
	log, err := c.run(ctx, "", "kubectl", "logs", "latticekeep-0", "--namespace", system)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(log) {
		var entry struct{ Msg, Tenant, Namespace, Name string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Namespace == namespace && entry.Name == name &&
			strings.Contains(entry.Msg, "left values of an object of this name") {
			return entry.Tenant, nil
		}
	}
	return "", fmt.Errorf("the operator's log does not name the tenant that %s in namespace %s had", name, namespace)
}

// restoreLikeVelero deletes the namespace and puts Secrets back before the objects. As Velero does,
// it leaves out the status and what the API server gave to the object.
func (c restores) restoreLikeVelero(ctx context.Context) error {
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
	if err := c.all(ctx,
		"kubectl apply --filename "+filepath.Join(c.saved, archiveSealed),
		inArchive("condition=TargetSynced", "retained", "deleted", sample),
	); err != nil {
		return err
	}
	before, err := c.passwords(ctx)
	if err != nil {
		return err
	}
	if err := c.saveArchive(ctx); err != nil {
		return err
	}
	if err := c.all(ctx,
		"kubectl delete namespace "+archive+" "+waitArg,
		"kubectl create namespace "+archive,
		putBack+filepath.Join(c.saved, secretsFile),
		putBack+filepath.Join(c.saved, objectsFile),
		inArchive(reason("FormerValues"), "retained", "deleted"),
		inArchive(reason("TargetConflict"), sample),
		reasons,
	); err != nil {
		return err
	}
	if err := c.kept(ctx, before, "retained", "deleted", sample); err != nil {
		return fmt.Errorf("while the objects wait: %w", err)
	}
	if err := c.handOver(ctx, "retained", "deleted", sample); err != nil {
		return err
	}
	if err := c.all(ctx, inArchive("condition=TargetSynced", "retained", "deleted", sample), reasons); err != nil {
		return err
	}
	return c.kept(ctx, before, "retained", "deleted", sample)
}

const (
	putBack     = "kubectl create --filename "
	secretsFile = "secrets.json"
	objectsFile = "sealedcredentials.json"
)

// saveArchive saves the Secrets and the objects of the archive as Velero restores them.
func (c restores) saveArchive(ctx context.Context) error {
	for _, file := range []string{secretsFile, objectsFile} {
		kind := strings.TrimSuffix(file, ".json")
		command := "kubectl get " + kind + " --namespace " + archive + " --output json"
		list, err := c.run(ctx, "", strings.Fields(command)...)
		if err != nil {
			return err
		}
		c.out.console(command+" | jq 'del(.items[].status, (.items[].metadata | .uid, .resourceVersion, .generation, .creationTimestamp))' >"+file, "")
		if list, err = reset(list); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(c.saved, file), []byte(list), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// handOver lets objects of the archive have the Secrets of their names.
func (c restores) handOver(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := c.all(ctx,
			"kubectl annotate secret "+name+" --namespace "+archive+" latticekeep.dev/adopt="+name,
			"kubectl annotate --overwrite sealedcredential "+name+" --namespace "+archive+" latticekeep.dev/sync=handed-over",
		); err != nil {
			return err
		}
	}
	return nil
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
func (c restores) passwords(ctx context.Context) (map[string][32]byte, error) {
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
func (c restores) kept(ctx context.Context, before map[string][32]byte, names ...string) error {
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
