// Command e2e is `make e2e`: it installs the chart into a real cluster, where pods really run, and
// follows a platform team's day there: install, seal, consume, upgrade, lose a pod under load,
// uninstall. Each step is a command and a check of its result. The commands and their output are
// the transcript.
//
// The cluster is the one of E2E_KUBECONFIG, into which E2E_LOAD loads the images, or a node of its
// own. That node is then lost twice: each chapter has a node, and with it a cluster, that ends with
// the chapter.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/latticekeep/latticekeep/hack/e2e/image"
	"github.com/latticekeep/latticekeep/hack/e2e/node"
)

// options are the programs and files that a run needs. hack/e2e.sh creates and names them.
type options struct {
	latticekeep, workload, helm string // programs
	assets                      string // folder with the control plane's programs, for our own node
	csi                         string // folder with the Secrets Store CSI driver, likewise
	transcript                  string // written only after all steps succeed
	// Of a chapter on a node of its own:
	chapter string
	saved   string // folder that outlives the node
}

func main() {
	var o options
	flag.StringVar(&o.latticekeep, "latticekeep", "bin/latticekeep", "`path` of the product, static")
	flag.StringVar(&o.workload, "workload", "bin/tools/workload", "`path` of the workload, static")
	flag.StringVar(&o.helm, "helm", "bin/tools/helm", "`path` of helm")
	flag.StringVar(&o.assets, "assets", "", "`folder` of kube-apiserver, kubelet and the like")
	flag.StringVar(&o.csi, "csi", "", "`folder` of the Secrets Store CSI driver, the registrar and the driver's resources")
	flag.StringVar(&o.transcript, "transcript", "", "`path` of the transcript to write")
	flag.StringVar(&o.chapter, "chapter", chapters[0], "`name` of the part to play; set by this program itself")
	flag.StringVar(&o.saved, "saved", "", "`folder` that goes from chapter to chapter; set by this program itself")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	kubeconfig, dir := os.Getenv("E2E_KUBECONFIG"), os.Getenv(node.Inside)
	if kubeconfig == "" && dir == "" {
		return onOwnNodes(ctx, o)
	}
	own := kubeconfig == ""
	if !own {
		if dir, err = os.MkdirTemp("", "latticekeep-e2e-"); err != nil {
			return fmt.Errorf("making a temporary directory: %w", err)
		}
		defer os.RemoveAll(dir)
		if kubeconfig, err = filepath.Abs(kubeconfig); err != nil {
			return err
		}
		o.saved = dir
	}
	images := []string{filepath.Join(dir, "latticekeep.tar"), filepath.Join(dir, "workload.tar")}
	if err := errors.Join(
		image.Write(images[0], productImage, "latticekeep", o.latticekeep),
		image.Write(images[1], workloadImage, "workload", o.workload, "pause"),
	); err != nil {
		return err
	}
	c := &cluster{dir: dir, saved: o.saved, kubeconfig: kubeconfig, helm: o.helm, latticekeep: o.latticekeep, own: own, out: newTranscript(os.Stdout)}
	c.out.hide(o.saved+"/", "")
	c.out.hide(dir, "<folder>")
	if own {
		fmt.Fprintln(os.Stderr, "starting a node…")
		if c.node, err = node.Start(ctx, node.Config{Dir: dir, Programs: o.assets, CSI: o.csi, Images: images, Sandbox: workloadImage}); err != nil {
			return err
		}
		c.kubeconfig = c.node.Kubeconfig("admin")
	} else {
		if err := c.strange(ctx); err != nil {
			return err
		}
		if err := load(ctx, images); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, c.leave()) }()
	}
	if o.chapter != chapters[0] {
		if err := c.out.resume(o.transcript); err != nil {
			return err
		}
	}
	if err := c.play(ctx, o.chapter); err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		return fmt.Errorf("%w\n%s", err, c.state())
	}
	if o.transcript == "" {
		return nil
	}
	return c.out.write(o.transcript)
}

// onOwnNodes plays one chapter after the other, each on a new node. What a user would still have
// after losing a cluster is in one folder, with the transcript.
func onOwnNodes(ctx context.Context, o options) (err error) {
	saved, err := os.MkdirTemp("", "latticekeep-e2e-saved-")
	if err != nil {
		return fmt.Errorf("making a temporary directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(saved)) }()
	text := filepath.Join(saved, "transcript.md")
	for _, chapter := range chapters {
		if err := node.Run(ctx, "-chapter", chapter, "-saved", saved, "-transcript", text); err != nil {
			return err
		}
	}
	if o.transcript == "" {
		return nil
	}
	whole, err := os.ReadFile(text)
	if err != nil {
		return fmt.Errorf("reading the transcript: %w", err)
	}
	return os.WriteFile(o.transcript, whole, 0o644)
}

// load loads the images into an external cluster. It runs the command in E2E_LOAD with the path of
// each image as its last argument.
func load(ctx context.Context, images []string) error {
	command := strings.Fields(os.Getenv("E2E_LOAD"))
	if len(command) == 0 {
		fmt.Fprintf(os.Stderr, "E2E_LOAD is not set: the cluster must have %s and %s already\n", productImage, workloadImage)
		return nil
	}
	for _, image := range images {
		if err := execute(ctx, append(command[1:len(command):len(command)], image), command[0]); err != nil {
			return fmt.Errorf("loading an image into the cluster: %w", err)
		}
	}
	return nil
}
