package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/hack/e2e/node"
)

const (
	chart         = "charts/latticekeep"
	values        = "hack/e2e/values.yaml"
	foreignValues = "hack/e2e/another-user.yaml"
	manifests     = "hack/e2e/manifests/"
	plain         = "config/samples/database-secret.plain"

	system   = "latticekeep-system" // namespace of the product
	shop     = "shop"               // namespace of its users
	archive  = "archive"            // a namespace that is deleted and restored
	sample   = "database"           // a credential of the shop
	waitArg  = "--timeout=5m"       // a machine that also compiles is slow
	waitTime = 5 * time.Minute
)

// The images have no registry. They must be loaded where the pods run.
const (
	productImage  = "localhost/latticekeep:e2e"
	workloadImage = "localhost/latticekeep-e2e-workload:e2e"
)

// A cluster is the Kubernetes cluster in which the steps run.
type cluster struct {
	dir, kubeconfig   string
	saved             string // folder of what a user keeps outside of the cluster
	helm, latticekeep string // programs
	own               bool
	out               *transcript
	node              *node.Node // nil for an external cluster
}

// do runs a command and writes it and its output to the transcript.
func (c *cluster) do(ctx context.Context, command ...string) (string, error) {
	out, err := c.run(ctx, "", command...)
	c.out.console(quote(command), out)
	return out, err
}

// run runs kubectl, helm or latticekeep as the cluster's administrator. As in a shell, environment
// variables may stand before the program. It returns the whole output, which an error contains as
// well.
func (c *cluster) run(ctx context.Context, stdin string, command ...string) (string, error) {
	words := slices.IndexFunc(command, func(word string) bool { return !strings.Contains(word, "=") })
	environment, command := command[:words], command[words:]
	program := command[0]
	switch program {
	case "helm":
		program = c.helm
	case "latticekeep":
		program = c.latticekeep
	}
	cmd := exec.CommandContext(ctx, program, command[1:]...)
	// The user's caches and settings are left alone.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig, "HOME="+filepath.Join(c.dir, "home"), "KUBECACHEDIR="+filepath.Join(c.dir, "cache"))
	cmd.Env = append(cmd.Env, environment...)
	cmd.Stdin = strings.NewReader(stdin)
	var both, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &both, &stderr
	err := cmd.Run()
	both.Write(stderr.Bytes())
	if err != nil {
		return both.String(), fmt.Errorf("running %s: %w: %s", quote(command), err, bytes.TrimSpace(both.Bytes()))
	}
	return both.String(), nil
}

// quote returns the command as a user would type it.
func quote(command []string) string {
	words := make([]string, len(command))
	for i, word := range command {
		if words[i] = word; word == "" || strings.ContainsAny(word, " {}[]$*?&|;<>()\"\\") {
			words[i] = "'" + word + "'"
		}
	}
	return strings.Join(words, " ")
}

// execute runs a command. Its error contains the output on standard error.
func execute(ctx context.Context, args []string, program string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

// strange refuses a cluster that is in use, because this program removes its namespaces afterwards
// with everything in them.
func (c *cluster) strange(ctx context.Context) error {
	out, err := c.run(ctx, "", "kubectl", "get", "namespaces/"+system, "namespaces/"+shop, "namespaces/"+archive, "crd/sealedcredentials.latticekeep.dev",
		"--ignore-not-found", "--output=name")
	if err != nil {
		return err
	}
	if out != "" {
		return fmt.Errorf("the cluster of E2E_KUBECONFIG has these already, which would be removed at the end: %s", strings.Join(strings.Fields(out), ", "))
	}
	return nil
}

// leave removes everything that the steps created in an external cluster, however far they came.
//
//nolint:contextcheck // it runs after an interruption too
func (c *cluster) leave() error {
	ctx, cancel := context.WithTimeout(context.Background(), waitTime)
	defer cancel()
	// Without the release there is nothing to uninstall. Without the operator nothing removes the
	// finalizers.
	_, _ = c.run(ctx, "", "helm", "uninstall", "latticekeep", "--namespace", system, "--wait")
	for _, namespace := range []string{shop, archive} {
		objects, _ := c.run(ctx, "", "kubectl", "get", "sealedcredentials", "--namespace", namespace, "--output=name")
		for _, object := range strings.Fields(objects) {
			_, _ = c.run(ctx, "", "kubectl", "patch", object, "--namespace", namespace, "--type=merge", `--patch={"metadata":{"finalizers":null}}`)
		}
	}
	_, err := c.run(ctx, "", "kubectl", "delete", "namespaces/"+shop, "namespaces/"+archive, "namespaces/"+system, "crd/sealedcredentials.latticekeep.dev", "--ignore-not-found")
	return err
}

// state returns information that helps to understand a failure.
//
//nolint:contextcheck // the steps may have used up their time
func (c *cluster) state() string {
	ctx := context.Background()
	var state strings.Builder
	for _, command := range []string{
		"kubectl get pods,pvc,sealedcredentials --all-namespaces -o wide",
		"kubectl get events --all-namespaces --sort-by=.metadata.creationTimestamp",
		"kubectl logs --namespace latticekeep-system --selector app.kubernetes.io/name=latticekeep --all-containers --prefix --tail=40",
	} {
		out, _ := c.run(ctx, "", strings.Fields(command)...) // the output contains the error
		fmt.Fprintf(&state, "$ %s\n%s\n", command, out)
	}
	if c.own {
		state.WriteString(c.node.LogTails())
	}
	return state.String()
}

// fingerprints returns those of the key that signs sealing keys, and of the log. It reads the line
// that the server prints once it serves.
func (c *cluster) fingerprints(ctx context.Context) (identity, chain string, err error) {
	log, err := c.run(ctx, "", "kubectl", "logs", "latticekeep-0", "--namespace", system)
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(log) {
		var ready struct{ Identity, Chain string }
		if json.Unmarshal([]byte(line), &ready) == nil && ready.Identity != "" {
			c.out.hide(ready.Identity, "<identity>")
			c.out.hide(ready.Chain, "<chain>")
			return ready.Identity, ready.Chain, nil
		}
	}
	return "", "", errors.New("the server has not printed its identity")
}

// save runs a command and keeps its output in a file outside of the cluster.
func (c *cluster) save(ctx context.Context, file string, command ...string) error {
	out, err := c.run(ctx, "", command...)
	c.out.console(quote(command)+" >"+file, "")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.saved, file), []byte(out), 0o600)
}

// sealFor seals the plain sample for a namespace into a file.
func (c *cluster) sealFor(ctx context.Context, namespace, file string) error {
	identity, _, err := c.fingerprints(ctx)
	if err != nil {
		return err
	}
	return c.save(ctx, file, strings.Fields("latticekeep seal --filename "+plain+" --namespace "+namespace+" --type database --ttl-days 30 --from-cluster --identity "+identity)...)
}

// all runs commands without quoted words, one after the other.
func (c *cluster) all(ctx context.Context, commands ...string) error {
	for _, command := range commands {
		if _, err := c.do(ctx, strings.Fields(command)...); err != nil {
			return err
		}
		if strings.HasPrefix(command, "helm ") && strings.Contains(command, " --wait ") {
			if err := c.awaitWebhook(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// awaitWebhook returns once an object reaches the webhook, and the webhook the vault. helm waits for ready
// pods, and the node's proxy notices a moment later that they are.
func (c *cluster) awaitWebhook(ctx context.Context) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := c.run(ctx, "", "kubectl", "apply", "--dry-run=server", "--filename", "config/samples/generate.yaml")
		if !strings.Contains(out, "failed calling webhook") && !strings.Contains(out, "the vault could not be reached") {
			return nil // the steps find out what else is wrong
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}

// untilLogged waits until the log of a pod contains text.
func (c *cluster) untilLogged(ctx context.Context, namespace, pod, text string) error {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		log, err := c.run(ctx, "", "kubectl", "logs", pod, "--namespace", namespace)
		if err == nil && strings.Contains(log, text) {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for %q in the log of %s: %w: %s", text, pod, ctx.Err(), log), err)
		}
	}
}

// refused runs a command that the cluster has to refuse because of latticekeep.
func (c *cluster) refused(ctx context.Context, stdin, command string, prefix ...string) error {
	words := strings.Fields(command)
	out, err := c.run(ctx, stdin, words...)
	c.out.console(strings.Join(prefix, "")+quote(words), out)
	if err == nil {
		return fmt.Errorf("%s was not refused", command)
	}
	if !strings.Contains(out, "sealedcredentials.latticekeep.dev\" denied the request") && !strings.Contains(out, "'latticekeep-adopt' with binding 'latticekeep-adopt' denied request") {
		return fmt.Errorf("it was neither our webhook nor our policy that refused it: %w", err)
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
