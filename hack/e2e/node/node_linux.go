package node

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/hack/e2e/image"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// The node lives in namespaces of its own. The process namespace makes all processes, including the
// pods', end with the first one, however that ends. The mount namespace keeps /run, /var/lib,
// /var/log and the kernel settings that kubelet tunes unchanged outside. The network namespace
// separates ports, bridges and iptables rules from the machine's. Two things outlast the first
// process, and the parent removes them: the temporary directory, and the cgroups below one folder.
//
// Inside, an orphaned process becomes a child of the first process, which does not wait for it, so
// it stays a zombie until the end.
const nodeNamespaces = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

const (
	nodeName   = "node"
	nodeIP     = "10.200.0.1"
	podCIDR    = "10.244.0.0/24"
	serviceIPs = "10.96.0.0/16"
	apiURL     = "https://" + nodeIP + ":6443"

	// startTimeout bounds the start of any part of the node. It is long because a machine that also
	// compiles is slow.
	startTimeout = 5 * time.Minute
)

// nodeFolders are fixed paths of kubelet, of the network plugins and of a guide.
var nodeFolders = []string{"/var/lib/kubelet", "/var/lib/cni", "/etc/kubernetes", "/etc/latticekeep"}

// staticPods is the folder of the pods that kubelet runs without the API server, as with kubeadm.
const staticPods = "/etc/kubernetes/manifests"

// Run runs this program again inside a node's namespaces, with more arguments, and removes the
// remains when it has ended.
func Run(ctx context.Context, args ...string) (err error) {
	dir, err := os.MkdirTemp("", "latticekeep-e2e-")
	if err != nil {
		return fmt.Errorf("making the node's directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	defer func() { err = errors.Join(err, removeCgroups(filepath.Base(dir))) }()

	// The node mounts its own folders over these.
	for _, folder := range nodeFolders {
		switch err := os.Mkdir(folder, 0o755); {
		case err == nil:
			defer func() { _ = os.Remove(folder) }()
		case !errors.Is(err, fs.ErrExist):
			return fmt.Errorf("making a folder to mount over: %w", err)
		}
	}

	cmd := exec.Command("/proc/self/exe", slices.Concat(os.Args[1:], args)...)
	cmd.Env = append(os.Environ(), Inside+"="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: nodeNamespaces, Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// The kernel sends its signal when the thread that forked ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the node's first process: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(os.Interrupt) }) // an error means that it has already ended
	defer stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("on the node: %w", err)
	}
	return nil
}

// A Node is a running one, which this process is the first one of.
type Node struct {
	Config
	processes map[string]*kubetest.Process // keyed by the name of the log
}

// Start turns this process's namespaces into a node. Nothing needs to be stopped, because the node
// ends with this process.
func Start(ctx context.Context, c Config) (_ *Node, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if c.Programs, err = filepath.Abs(c.Programs); err != nil {
		return nil, err
	}
	if c.CSI, err = filepath.Abs(c.CSI); err != nil {
		return nil, err
	}
	n := &Node{c, make(map[string]*kubetest.Process)}
	for _, step := range []func(context.Context) error{
		n.mount, n.network, n.writeFiles, n.startControlPlane,
		func(ctx context.Context) error { return n.startContainerd(ctx, c.Images) },
		n.startKubelet,
	} {
		if err := step(ctx); err != nil {
			return nil, fmt.Errorf("starting the node: %w", err)
		}
	}
	return n, nil
}

// mount mounts the node's own folders over those that the node writes to, and over the kernel
// settings that kubelet tunes.
func (n *Node) mount(context.Context) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := syscall.Mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w", err)
	}
	resolver, err := filepath.EvalSymlinks("/etc/resolv.conf") // often it is in /run
	if err != nil {
		return err
	}
	for _, folder := range append([]string{"/run", "/var/log"}, nodeFolders...) {
		own := n.path(strings.ReplaceAll(folder[1:], "/", "-"))
		if err := os.Mkdir(own, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(own, folder, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting over %s: %w", folder, err)
		}
	}
	if err := os.Mkdir(staticPods, 0o700); err != nil {
		return err
	}
	// The steps find Services by their names, as a machine in the cluster's network would.
	nameserver := []byte("nameserver " + nodeIP + "\n")
	if strings.HasPrefix(resolver, "/run/") {
		if err := errors.Join(os.MkdirAll(filepath.Dir(resolver), 0o755), os.WriteFile(resolver, nameserver, 0o644)); err != nil {
			return err
		}
	} else {
		own := n.path("resolv.conf")
		if err := os.WriteFile(own, nameserver, 0o644); err != nil {
			return err
		}
		if err := syscall.Mount(own, resolver, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting over %s: %w", resolver, err)
		}
	}
	for _, volume := range []string{"data", "kms"} { // volumes in manifests/volumes.yaml, owned by the image's user
		folder := filepath.Join("/run/volumes", volume)
		if err := errors.Join(os.MkdirAll(folder, 0o700), os.Chown(folder, image.User, image.User)); err != nil {
			return fmt.Errorf("making a volume: %w", err)
		}
	}
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"} {
		setting := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(setting)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading a kernel setting: %w", err)
		}
		own := n.path(strings.ReplaceAll(name, "/", "-"))
		if err := os.WriteFile(own, value, 0o600); err != nil {
			return err
		}
		if err := syscall.Mount(own, setting, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting over %s: %w", setting, err)
		}
	}
	return nil
}

// network gives the node an address on a bridge with nothing attached. No route leads out of it.
func (n *Node) network(ctx context.Context) error {
	for _, args := range []string{
		"link set lo up",
		"link add node type bridge",
		"addr add " + nodeIP + "/24 dev node",
		"link set node up",
		"route add default dev node",
	} {
		if out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("running ip %s: %w: %s", args, err, out)
		}
	}
	// Without this, an answer from one pod to another on the same bridge bypasses the rules that
	// translate a Service's address back.
	const bridged = "/proc/sys/net/bridge/bridge-nf-call-iptables"
	if err := os.WriteFile(bridged, []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("setting %s: %w", bridged, err)
	}
	return nil
}

// users are the names and groups of the components.
var users = map[string]struct{ name, group string }{
	"admin":                   {"admin", "system:masters"},
	"kube-controller-manager": {"system:kube-controller-manager", ""},
	"kube-scheduler":          {"system:kube-scheduler", ""},
	"kube-proxy":              {"system:kube-proxy", ""},
	"kubelet":                 {"system:node:" + nodeName, "system:nodes"},
}

func (n *Node) writeFiles(context.Context) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	var tokens strings.Builder
	names := strings.NewReplacer("DIR", n.Dir, "CGROUP", "/"+filepath.Base(n.Dir), "SANDBOX", n.Sandbox)
	files := map[string]string{
		"tokens.key":         string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})),
		"containerd.toml":    names.Replace(containerdConfig),
		"kubelet.yaml":       names.Replace(kubeletConfig),
		"10-bridge.conflist": bridgeConfig,
		"Corefile":           names.Replace(corefile),
	}
	for component, user := range users {
		token := rand.Text()
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", token, user.name, component, user.group)
		config, err := json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Config", "current-context": "node",
			"clusters": []any{map[string]any{"name": "node", "cluster": map[string]any{"server": apiURL, "certificate-authority": n.path("apiserver.crt")}}},
			"users":    []any{map[string]any{"name": user.name, "user": map[string]any{"token": token}}},
			"contexts": []any{map[string]any{"name": "node", "context": map[string]any{"cluster": "node", "user": user.name}}},
		})
		if err != nil {
			return err
		}
		files[filepath.Base(n.Kubeconfig(component))] = string(config)
	}
	files["tokens.csv"] = tokens.String()
	for name, text := range files {
		if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) startControlPlane(ctx context.Context) error {
	client, peer := "unix://"+n.EtcdSocket(), "unix://"+n.path("peer.sock")
	if err := n.run("etcd", "--data-dir", n.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer); err != nil {
		return err
	}
	if err := n.StartAPIServer(ctx); err != nil {
		return err
	}
	if err := n.run("kube-controller-manager", "--kubeconfig", n.Kubeconfig("kube-controller-manager"), "--leader-elect=false",
		"--use-service-account-credentials", "--service-account-private-key-file", n.path("tokens.key"),
		"--root-ca-file", n.path("apiserver.crt"), "--cert-dir", n.path("controller-manager")); err != nil {
		return err
	}
	if err := n.run("kube-scheduler", "--kubeconfig", n.Kubeconfig("kube-scheduler"), "--leader-elect=false", "--cert-dir", n.path("scheduler")); err != nil {
		return err
	}
	if err := n.run("coredns", "-conf", n.path("Corefile")); err != nil {
		return err
	}
	return n.run("kube-proxy", "--kubeconfig", n.Kubeconfig("kube-proxy"), "--hostname-override", nodeName, "--proxy-mode", "iptables",
		// The node must not resize the machine's connection tracking.
		"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0",
		"--cluster-cidr", podCIDR)
}

// StartAPIServer starts the API server with more flags, and returns when it is ready.
func (n *Node) StartAPIServer(ctx context.Context, flags ...string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	// It makes its own certificate, which is then its own authority.
	if err := n.run("kube-apiserver", append([]string{
		"--etcd-servers", "unix://" + n.EtcdSocket(),
		"--bind-address", "0.0.0.0", "--secure-port", "6443", "--advertise-address", nodeIP, "--cert-dir", n.Dir,
		"--token-auth-file", n.path("tokens.csv"), "--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction",
		"--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file", n.path("tokens.key"), "--service-account-signing-key-file", n.path("tokens.key"),
		"--service-cluster-ip-range", serviceIPs, "--kubelet-preferred-address-types", "InternalIP",
	}, flags...)...); err != nil {
		return err
	}
	return n.until(ctx, "the API server", "kubectl", "get", "--raw", "/readyz")
}

// StopAPIServer kills the API server, which would wait a minute for the watches of its clients.
func (n *Node) StopAPIServer() error { return n.kill("kube-apiserver") }

func (n *Node) startContainerd(ctx context.Context, images []string) error {
	if err := n.run("containerd", "--config", n.path("containerd.toml")); err != nil {
		return err
	}
	if err := n.until(ctx, "containerd", "ctr", "version"); err != nil {
		return err
	}
	for _, image := range images {
		if out, err := exec.CommandContext(ctx, "ctr", "--namespace", "k8s.io", "images", "import", image).CombinedOutput(); err != nil {
			return fmt.Errorf("importing %s: %w: %s", filepath.Base(image), err, out)
		}
	}
	return nil
}

func (n *Node) startKubelet(ctx context.Context) error {
	for _, hierarchy := range cgroupHierarchies() {
		if err := os.Mkdir(filepath.Join(hierarchy, filepath.Base(n.Dir)), 0o755); err != nil {
			return fmt.Errorf("making the node's cgroup: %w", err)
		}
	}
	if err := n.runKubelet(); err != nil {
		return err
	}
	if err := n.until(ctx, "the node's registration", "kubectl", "get", "node", nodeName); err != nil {
		return err
	}
	if err := n.until(ctx, "the node", "kubectl", "wait", "--for=condition=Ready", "node/"+nodeName, "--timeout=10s"); err != nil {
		return err
	}
	return n.until(ctx, "the first ServiceAccount", "kubectl", "get", "serviceaccount", "default") // no pod is admitted without it
}

func (n *Node) runKubelet() error {
	return n.run("kubelet", "--config", n.path("kubelet.yaml"), "--kubeconfig", n.Kubeconfig("kubelet"),
		"--hostname-override", nodeName, "--node-ip", nodeIP)
}

// The names and paths of the CSI driver, as its chart has them.
const (
	csiDriver    = "secrets-store.csi.k8s.io"
	csiFolder    = "/var/lib/kubelet/plugins/csi-secrets-store"
	csiSocket    = csiFolder + "/csi.sock"
	registration = "/var/lib/kubelet/plugins_registry/" + csiDriver + "-reg.sock"
)

// StartCSI starts the Secrets Store CSI driver with the token of its ServiceAccount, and registers it with kubelet.
// It runs as a process of the node, which finds what a pod would find.
func (n *Node) StartCSI(ctx context.Context, token string) error {
	const account = "/run/secrets/kubernetes.io/serviceaccount"
	ca, err := os.ReadFile(n.path("apiserver.crt"))
	if err != nil {
		return err
	}
	if err := errors.Join(
		os.MkdirAll(csiFolder, 0o750), os.MkdirAll(account, 0o700),
		os.WriteFile(filepath.Join(account, "token"), []byte(token), 0o600), os.WriteFile(filepath.Join(account, "ca.crt"), ca, 0o600),
	); err != nil {
		return err
	}
	return n.runCSI(ctx)
}

func (n *Node) runCSI(ctx context.Context) error {
	driver := exec.Command(filepath.Join(n.CSI, "secrets-store-csi-driver"), "--endpoint", "unix://"+csiSocket, "--nodeid", nodeName,
		"--enable-secret-rotation", "--rotation-poll-interval=2s", "--metrics-addr=127.0.0.1:8095")
	driver.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST="+nodeIP, "KUBERNETES_SERVICE_PORT=6443")
	if err := n.start("csi-driver", driver); err != nil {
		return err
	}
	if err := n.until(ctx, "the CSI driver", "test", "-S", csiSocket); err != nil {
		return err
	}
	if err := n.start("registrar", exec.Command(filepath.Join(n.CSI, "registrar"), registration, csiDriver, csiSocket)); err != nil {
		return err
	}
	return n.until(ctx, "the CSI driver's registration", "kubectl", "wait", "--for=jsonpath={.spec.drivers[*].name}="+csiDriver, "csinode/"+nodeName, "--timeout=5s")
}

// until repeats a command until it succeeds or one of the node's processes has ended.
func (n *Node) until(ctx context.Context, what, program string, args ...string) error {
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+n.Kubeconfig("admin"), "HOME="+n.Dir)
		out, err := cmd.CombinedOutput()
		if err == nil {
			return nil
		}
		if err := n.ended(); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w: %s%s", what, ctx.Err(), out, n.LogTails())
		}
	}
}

// ended returns an error once one of the node's processes has ended.
func (n *Node) ended() error {
	for _, p := range n.processes {
		select {
		case <-p.Done():
			return fmt.Errorf("a process of the node ended:%s", n.LogTails())
		default:
		}
	}
	return nil
}

// run starts a program with its output in a file of the same name.
func (n *Node) run(program string, args ...string) error {
	path := filepath.Join(n.Programs, program)
	if _, err := os.Stat(path); err != nil {
		if path, err = exec.LookPath(program); err != nil {
			return err
		}
	}
	return n.start(program, exec.Command(path, args...))
}

// kill kills processes of the node, which it then has no more.
func (n *Node) kill(names ...string) error {
	for _, name := range names {
		if err := n.processes[name].Stop(0); err != nil {
			return err
		}
		delete(n.processes, name)
	}
	return nil
}

// start starts a command with its output in a file of a name.
func (n *Node) start(name string, cmd *exec.Cmd) error {
	log, err := os.OpenFile(n.path(name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("creating a log: %w", err)
	}
	defer log.Close() // the child has its own descriptor
	cmd.Dir, cmd.Stdout, cmd.Stderr = n.Dir, log, log
	p, err := kubetest.StartProcess(cmd)
	if err == nil {
		n.processes[name] = p
	}
	return err
}

// LogTails returns the end of each process's output.
func (n *Node) LogTails() string {
	var tails strings.Builder
	logs, _ := filepath.Glob(n.path("*.log"))
	for _, log := range logs {
		if text, err := os.ReadFile(log); err == nil {
			fmt.Fprintf(&tails, "\n--- %s\n%s", filepath.Base(log), text[max(0, len(text)-2048):])
		}
	}
	return tails.String()
}

// EtcdSocket returns the path of the socket on which etcd serves clients.
func (n *Node) EtcdSocket() string { return n.path("etcd.sock") }

func (n *Node) path(name string) string { return filepath.Join(n.Dir, name) }

// Kubeconfig returns the path of the kubeconfig of a component, or of "admin".
func (n *Node) Kubeconfig(component string) string { return n.path(component + ".kubeconfig") }

// Configuration of the node's parts. DIR stands for the node's directory, CGROUP for its folder in
// each hierarchy, and SANDBOX for the image.
const (
	// Some machines do not permit lowering the score by which the kernel's out-of-memory killer
	// chooses. The plain snapshotter works on every file system.
	containerdConfig = `version = 2
root = "DIR/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "SANDBOX"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "DIR"
[plugins."io.containerd.internal.v1.opt"]
  path = "DIR/opt"
`

	kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: CGROUP
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
clusterDNS: [` + nodeIP + `]
clusterDomain: cluster.local
resolvConf: ""
staticPodPath: ` + staticPods + `
volumePluginDir: /var/lib/kubelet/volume-plugins
# The machine's disk may be nearly full, and no image can be fetched again.
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
`

	bridgeConfig = `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "pods", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "` + podCIDR + `"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`

	corefile = `cluster.local {
    bind ` + nodeIP + `
    errors
    kubernetes {
        kubeconfig DIR/admin.kubeconfig
    }
}
`
)
