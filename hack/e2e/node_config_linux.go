package main

// What the parts of the node are configured with. DIR stands for the node's directory, CGROUP for its folder in each hierarchy.
const (
	// Lowering the score by which the kernel chooses whom to kill is not permitted everywhere, and the plain snapshotter works on every
	// file system.
	containerdConfig = `version = 2
root = "DIR/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + workloadImage + `"
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
