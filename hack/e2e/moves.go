package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// moves are the steps in which a whole cluster is lost and its objects come back in another one. The
// shop comes back from its manifests, and the archive by Velero's rules.
type moves struct{ restores }

const (
	backupFile      = "latticekeep.backup"
	backupIdentity  = "backup.identity"
	backupRecipient = "backup.recipient"
	recordFile      = "record.json"
	serverURL       = "https://latticekeep." + system + ".svc.cluster.local:8200"

	namespacesManifest = manifests + "namespaces.yaml"
	volumesManifest    = manifests + "volumes.yaml"
	restoreManifest    = manifests + "restore.yaml"
	samples            = "kubectl apply --kustomize " + manifests + "samples"
	installation       = "latticekeep " + chart + " --namespace " + system + " --values " + values
	withKey            = " --set kms.existingSecret=latticekeep-kms"
)

// A record is what was there before the cluster was lost.
type record struct {
	Identity, Chain string
	Objects         map[string]held // by namespace/name
}

// held is an object's entry, and a digest of what is in the Secret of its name.
type held struct{ Credential, Secret string }

// backUp takes a backup as an administrator would, and records what every object has.
func (m moves) backUp(ctx context.Context) error {
	identity, chain, err := m.fingerprints(ctx)
	if err != nil {
		return err
	}
	if err := m.save(ctx, backupRecipient, "latticekeep", "backup", "keygen", "--output", m.file(backupIdentity)); err != nil {
		return err
	}
	recipient, err := os.ReadFile(m.file(backupRecipient))
	if err != nil {
		return err
	}
	to := strings.TrimSpace(string(recipient))
	m.out.hide(to, "<recipient>")
	if err := m.all(ctx, "helm upgrade "+installation+" --set config.backup.recipients={"+to+"} --wait "+waitArg); err != nil {
		return err
	}
	for _, read := range []struct{ secret, key, file string }{{"latticekeep-tls", "ca.crt", "ca.crt"}, {"latticekeep-system-key", "system-key", "system.key"}} {
		if err := m.save(ctx, read.file, "kubectl", "get", "secret", read.secret, "--namespace", system, `--output=go-template={{index .data "`+read.key+`" | base64decode}}`); err != nil {
			return err
		}
	}
	if err := m.all(ctx,
		"SSL_CERT_FILE="+m.file("ca.crt")+" latticekeep backup --url "+serverURL+" --api-key-file "+m.file("system.key")+
			" --recipient-file "+m.file(backupRecipient)+" --identity "+identity+" --output "+m.file(backupFile),
		"latticekeep backup verify --input "+m.file(backupFile)+" --identity "+identity+" --verify-with "+m.file(backupIdentity),
	); err != nil {
		return err
	}
	if err := m.saveArchive(ctx); err != nil {
		return err
	}
	objects, err := m.objects(ctx)
	if err != nil {
		return err
	}
	kept, err := json.Marshal(record{Identity: identity, Chain: chain, Objects: objects})
	if err != nil {
		return err
	}
	return os.WriteFile(m.file(recordFile), kept, 0o600)
}

// restoreVault installs the chart in another cluster, with the database and the KMS key of the
// backup.
func (m moves) restoreVault(ctx context.Context) error {
	before, err := m.record()
	if err != nil {
		return err
	}
	m.out.hide(before.Identity, "<identity>")
	m.out.hide(before.Chain, "<chain>")
	pinned := " --fingerprint " + before.Chain + " --identity " + before.Identity
	if err := m.all(ctx,
		"kubectl apply --filename "+namespacesManifest,
		"kubectl apply --filename "+volumesManifest,
		"latticekeep restore --input "+m.file(backupFile)+" --identity-file "+m.file(backupIdentity)+" --data-dir "+m.file("temporary")+pinned+" --kms-key-out "+m.file("kms.key"),
		"kubectl create secret generic latticekeep-kms --namespace "+system+" --from-file="+m.file("kms.key"),
		"kubectl create secret generic latticekeep-restore --namespace "+system+" --from-file=identity="+m.file(backupIdentity),
		"helm install "+installation+withKey+" --set replicas=0",
	); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(m.file("temporary")), os.Remove(m.file("kms.key"))); err != nil {
		return err
	}
	pod, err := os.ReadFile(restoreManifest)
	if err != nil {
		return err
	}
	applied, err := m.run(ctx, strings.NewReplacer("CHAIN", before.Chain, "IDENTITY", before.Identity).Replace(string(pod)), "kubectl", "apply", "--filename", "-")
	m.out.console("sed 's/CHAIN/"+before.Chain+"/; s/IDENTITY/"+before.Identity+"/' "+restoreManifest+" | kubectl apply --filename -", applied)
	if err != nil {
		return err
	}
	if err := m.all(ctx, "kubectl wait --for=condition=Ready pod/latticekeep-restore --namespace "+system+" "+waitArg); err != nil {
		return err
	}
	backup, err := os.ReadFile(m.file(backupFile))
	if err != nil {
		return err
	}
	attach := "kubectl attach --stdin latticekeep-restore --namespace " + system
	// What the pod prints may end before or after the connection. Its log has all of it.
	m.out.console(attach+" <"+backupFile, "")
	if _, err := m.run(ctx, string(backup), strings.Fields(attach)...); err != nil {
		return err
	}
	if err := m.all(ctx,
		"kubectl wait --for=jsonpath={.status.phase}=Succeeded pod/latticekeep-restore --namespace "+system+" "+waitArg,
		"kubectl logs latticekeep-restore --namespace "+system,
		"kubectl delete pod/latticekeep-restore secret/latticekeep-restore --namespace "+system,
		"helm upgrade "+installation+withKey+" --wait "+waitArg,
	); err != nil {
		return err
	}
	identity, chain, err := m.fingerprints(ctx)
	if err == nil && (identity != before.Identity || chain != before.Chain) {
		err = errors.New("another deployment serves")
	}
	return err
}

// applyThere puts all objects back before the namespaces are mapped.
func (m moves) applyThere(ctx context.Context) error {
	if err := m.all(ctx,
		"kubectl apply --filename "+m.file(shopManifest),
		samples,
		"kubectl create namespace "+archive,
		putBack+m.file(secretsFile),
		putBack+m.file(objectsFile),
	); err != nil {
		return err
	}
	return m.expect(ctx,
		outcome{"shop/database", "Sealed", keptValues},
		outcome{"shop/orders-database", "FormerValues", noValues},
		outcome{"shop/payment-api", "FormerValues", noValues},
		outcome{"shop/session-keys", "FormerValues", noValues},
		outcome{"archive/database", "TargetConflict", keptValues},
		outcome{"archive/deleted", "FormerValues", onlySecret},
		outcome{"archive/retained", "FormerValues", onlySecret},
	)
}

// mapThere makes both namespaces part of the tenants that they were before.
func (m moves) mapThere(ctx context.Context) error {
	upgrade := "helm upgrade " + installation + withKey
	for _, waits := range []string{"shop/session-keys", "archive/deleted"} {
		namespace, name, _ := strings.Cut(waits, "/")
		tenant, err := m.formerTenant(ctx, namespace, name)
		if err != nil {
			return err
		}
		m.out.hide(tenant, "<tenant of "+namespace+">")
		uid, err := m.run(ctx, "", "kubectl", "get", "namespace", namespace, "--output=jsonpath={.metadata.uid}")
		if err != nil {
			return err
		}
		upgrade += " --set config.kubernetes.namespacesByUID." + uid + "=" + tenant
	}
	if err := m.all(ctx, upgrade+" --wait "+waitArg); err != nil {
		return err
	}
	if err := m.expect(ctx,
		outcome{"shop/database", "Sealed", keptEntry},
		outcome{"shop/orders-database", "Sealed", keptEntry},
		outcome{"shop/payment-api", "Sealed", keptEntry},
		outcome{"shop/session-keys", "Sealed", keptEntry},
		outcome{"archive/database", "Sealed", keptEntry},
		outcome{"archive/deleted", "Sealed", keptEntry},
		outcome{"archive/retained", "Sealed", keptEntry},
	); err != nil {
		return err
	}
	if err := m.publishCA(ctx); err != nil {
		return err
	}
	return m.consume(ctx, "billing")
}

// beginFromManifests installs the chart with a new vault, and applies the shop's manifests.
func (m moves) beginFromManifests(ctx context.Context) error {
	if err := m.all(ctx,
		"kubectl apply --filename "+namespacesManifest,
		"kubectl apply --filename "+volumesManifest,
		"helm install "+installation+" --wait "+waitArg,
	); err != nil {
		return err
	}
	if err := m.refused(ctx, "", "kubectl apply --filename "+m.file(shopManifest)); err != nil {
		return err
	}
	if err := m.all(ctx, samples); err != nil {
		return err
	}
	if err := m.expect(ctx,
		outcome{"shop/orders-database", "Sealed", newValues},
		outcome{"shop/payment-api", "SourceUnavailable", noValues},
		outcome{"shop/session-keys", "Sealed", newValues},
	); err != nil {
		return err
	}
	if err := m.seal(ctx); err != nil {
		return err
	}
	return m.consume(ctx, "orders")
}

// beginFromSecrets puts the archive back by Velero's rules into the cluster with the new vault.
func (m moves) beginFromSecrets(ctx context.Context) error {
	if err := m.all(ctx, "kubectl create namespace "+archive, putBack+m.file(secretsFile)); err != nil {
		return err
	}
	if err := m.refused(ctx, "", putBack+m.file(objectsFile)); err != nil { // because of the sealed one
		return err
	}
	if err := m.expect(ctx,
		outcome{"archive/deleted", "FormerValues", onlySecret},
		outcome{"archive/retained", "FormerValues", onlySecret},
	); err != nil {
		return err
	}
	if err := m.sealFor(ctx, archive, archiveSealed); err != nil {
		return err
	}
	if err := m.all(ctx, "kubectl apply --filename "+m.file(archiveSealed)); err != nil {
		return err
	}
	if err := m.handOver(ctx, "deleted", "retained", sample); err != nil {
		return err
	}
	return m.expect(ctx,
		outcome{"archive/database", "Sealed", keptValues},
		outcome{"archive/deleted", "Sealed", keptValues},
		outcome{"archive/retained", "Sealed", keptValues},
	)
}

func (m moves) file(name string) string { return filepath.Join(m.saved, name) }

func (m moves) record() (record, error) {
	var r record
	text, err := os.ReadFile(m.file(recordFile))
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err
}

// An outcome is what an object of another cluster says and has.
type outcome struct{ object, reason, values string }

const (
	keptEntry  = "kept, in the same entry"
	keptValues = "kept"
	onlySecret = "kept, in the Secret only"
	newValues  = "new"
	noValues   = "none yet"
)

// expect waits for the objects to say what they should, and compares their values with those of
// before the move.
func (m moves) expect(ctx context.Context, want ...outcome) error {
	before, err := m.record()
	if err != nil {
		return err
	}
	for _, o := range want {
		namespace, name, _ := strings.Cut(o.object, "/")
		conditions := []string{reason(o.reason)}
		if o.values == keptEntry {
			conditions = append([]string{"jsonpath={.status.credentialID}=" + before.Objects[o.object].Credential}, conditions...)
		}
		for _, condition := range conditions {
			if _, err := m.run(ctx, "", "kubectl", "wait", "--for="+condition, "sealedcredential/"+name, "--namespace", namespace, waitArg); err != nil {
				return err
			}
		}
	}
	now, err := m.objects(ctx)
	if err != nil {
		return err
	}
	m.out.printf("\n| object | status | values |\n| --- | --- | --- |\n")
	var wrong []error
	for _, o := range want {
		got := compared(before.Objects[o.object], now[o.object])
		m.out.printf("| `%s` | `%s` | %s |\n", o.object, o.reason, got)
		if got != o.values {
			wrong = append(wrong, fmt.Errorf("the values of %s are %q, want %q", o.object, got, o.values))
		}
	}
	return errors.Join(wrong...)
}

// compared says what has become of an object's values.
func compared(before, now held) string {
	sameSecret := now.Secret == before.Secret && now.Secret != ""
	switch {
	case now.Credential == "" && sameSecret:
		return onlySecret
	case now.Credential == "":
		return noValues
	case now.Credential == before.Credential && now.Secret == before.Secret:
		return keptEntry
	case sameSecret:
		return keptValues
	}
	return newValues
}

// objects returns what every object has.
func (m moves) objects(ctx context.Context) (map[string]held, error) {
	out, err := m.run(ctx, "", "kubectl", "get", "sealedcredentials,secrets", "--all-namespaces", "--output=json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Kind     string
			Metadata struct{ Namespace, Name string }
			Status   struct{ CredentialID string }
			Data     map[string]string
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("decoding a list: %w", err)
	}
	objects := make(map[string]held)
	for _, item := range list.Items {
		name := item.Metadata.Namespace + "/" + item.Metadata.Name
		h := objects[name]
		if item.Kind == "Secret" {
			data, err := json.Marshal(item.Data)
			if err != nil {
				return nil, err
			}
			h.Secret = fmt.Sprintf("%x", sha256.Sum256(data))
		} else {
			h.Credential = item.Status.CredentialID
		}
		objects[name] = h
	}
	return objects, nil
}
