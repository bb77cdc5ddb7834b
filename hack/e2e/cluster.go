package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A cluster is where the steps happen.
type cluster struct {
	dir, kubeconfig   string
	helm, latticekeep string // programs
	own               bool
	out               *transcript
	trouble           func() string // what the node's parts said last; nil for a cluster that is not ours
}

// do runs a command and puts it and what it printed into the transcript.
func (c *cluster) do(ctx context.Context, command ...string) (string, error) {
	out, err := c.run(ctx, "", command...)
	c.out.console(quote(command), out)
	return out, err
}

// run runs kubectl, helm or latticekeep for the cluster's administrator. What it returns is all that the command printed; an error has that as well.
func (c *cluster) run(ctx context.Context, stdin string, command ...string) (string, error) {
	program := command[0]
	switch program {
	case "helm":
		program = c.helm
	case "latticekeep":
		program = c.latticekeep
	}
	cmd := exec.CommandContext(ctx, program, command[1:]...)
	// Neither the caches nor the settings of whoever runs it are touched.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig, "HOME="+filepath.Join(c.dir, "home"), "KUBECACHEDIR="+filepath.Join(c.dir, "cache"))
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

// quote is the command as one would type it.
func quote(command []string) string {
	words := make([]string, len(command))
	for i, word := range command {
		if words[i] = word; word == "" || strings.ContainsAny(word, " {}[]$*?&|;<>()\"\\") {
			words[i] = "'" + word + "'"
		}
	}
	return strings.Join(words, " ")
}

// execute runs a command for what it prints on standard error.
func execute(ctx context.Context, args []string, program string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

// strange refuses a cluster that is in use: what this program makes there it removes afterwards, with everything in it.
func (c *cluster) strange(ctx context.Context) error {
	out, err := c.run(ctx, "", "kubectl", "get", "namespaces/"+system, "namespaces/"+shop, "crd/sealedcredentials.latticekeep.dev",
		"--ignore-not-found", "--output=name")
	if err != nil {
		return err
	}
	if out != "" {
		return fmt.Errorf("the cluster of E2E_KUBECONFIG has these already, which would be removed at the end: %s", strings.Join(strings.Fields(out), ", "))
	}
	return nil
}

// leave removes from a cluster that is not ours what the steps have made there, however far they came.
func (c *cluster) leave() error {
	ctx, cancel := context.WithTimeout(context.Background(), waitTime)
	defer cancel()
	// Without its release there is nothing to uninstall, and without the operator nobody takes off finalizers.
	_, _ = c.run(ctx, "", "helm", "uninstall", "latticekeep", "--namespace", system, "--wait")
	objects, _ := c.run(ctx, "", "kubectl", "get", "sealedcredentials", "--namespace", shop, "--output=name")
	for _, object := range strings.Fields(objects) {
		_, _ = c.run(ctx, "", "kubectl", "patch", object, "--namespace", shop, "--type=merge", `--patch={"metadata":{"finalizers":null}}`)
	}
	_, err := c.run(ctx, "", "kubectl", "delete", "namespaces/"+shop, "namespaces/"+system, "crd/sealedcredentials.latticekeep.dev", "--ignore-not-found")
	return err
}

// state is what helps to understand a failure.
func (c *cluster) state() string {
	ctx := context.Background()
	var state strings.Builder
	for _, command := range []string{
		"kubectl get pods,pvc,sealedcredentials --all-namespaces -o wide",
		"kubectl get events --all-namespaces --sort-by=.metadata.creationTimestamp",
		"kubectl logs --namespace latticekeep-system --selector app.kubernetes.io/name=latticekeep --all-containers --prefix --tail=40",
	} {
		out, _ := c.run(ctx, "", strings.Fields(command)...) // the output has the error
		fmt.Fprintf(&state, "$ %s\n%s\n", command, out)
	}
	if c.trouble != nil {
		state.WriteString(c.trouble())
	}
	return state.String()
}
