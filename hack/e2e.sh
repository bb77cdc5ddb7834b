#!/usr/bin/env bash
# Makes what the end-to-end run needs and starts it: see hack/e2e/main.go. The cluster is that of E2E_KUBECONFIG, or a node of its own, for
# which this installs what Debian packages and compiles the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/bin
assets=
csi=

if [[ -z "${E2E_KUBECONFIG:-}" ]]; then
    if [[ $EUID != 0 || $(uname) != Linux ]]; then
        echo "only root on Linux can start a node: run as root, or set E2E_KUBECONFIG to the kubeconfig of a cluster that may be" >&2
        echo "changed, and E2E_LOAD to the command that brings an image's archive to it, such as 'kind load image-archive'" >&2
        exit 1
    fi
    missing=()
    for need in containerd:containerd ctr:containerd runc:runc iptables:iptables ip:iproute2 curl:curl jq:jq openssl:openssl /usr/lib/cni/bridge:containernetworking-plugins; do
        command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
    done
    if ((${#missing[@]})); then
        if ! command -v apt-get >/dev/null; then
            echo "install these, as your distribution calls them, with the network plugins in /usr/lib/cni: ${missing[*]}" >&2
            exit 1
        fi
        echo "installing ${missing[*]} (once)…" >&2
        { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"; } >&2
    fi
    assets=$(hack/control-plane.sh node)
    csi=$bin/csi # the Secrets Store CSI driver, a program that registers it, and its resources
    mkdir -p "$csi"
    CGO_ENABLED=0 go -C hack/csi build -trimpath -ldflags="-s -w" -o "$csi/" sigs.k8s.io/secrets-store-csi-driver/cmd/secrets-store-csi-driver ./registrar
    install -m 0644 "$(go -C hack/csi list -m -f '{{.Dir}}' sigs.k8s.io/secrets-store-csi-driver)"/deploy/{secrets-store.csi.x-k8s.io_,rbac-secretprovider{class,rotation,tokenrequest}}*.yaml "$csi/"
fi
command -v kubectl >/dev/null || { echo "kubectl is not on the PATH: install it first" >&2; exit 1; }

export CGO_ENABLED=0
go build -o "$bin/latticekeep" .
go -C hack/helm build -o "$bin/tools/helm" helm.sh/helm/v4/cmd/helm
go build -o "$bin/tools/workload" ./hack/e2e/workload
go build -o "$bin/tools/e2e" ./hack/e2e
exec "$bin/tools/e2e" -latticekeep "$bin/latticekeep" -workload "$bin/tools/workload" -helm "$bin/tools/helm" -assets "$assets" -csi "$csi" "$@"
