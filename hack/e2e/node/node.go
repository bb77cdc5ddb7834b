// Package node is a machine with a whole Kubernetes cluster, in namespaces of its own: etcd, the control plane, a
// name server, containerd and a kubelet. It needs root on Linux, and nothing of it remains.
package node

// Inside is the environment variable of the process inside the namespaces. Its value is the node's directory.
const Inside = "LATTICEKEEP_E2E_NODE"

// Config configures [Start].
type Config struct {
	Dir      string   // the value of Inside
	Programs string   // folder of kube-apiserver, kubelet and the like
	CSI      string   // folder of the Secrets Store CSI driver, the registrar and the resources of the driver
	Images   []string // archives of all images that pods use
	Sandbox  string   // name of the image whose container holds the namespaces of a pod
}
