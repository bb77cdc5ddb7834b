#!/usr/bin/env bash
# Makes sure that there is a kube-apiserver and an etcd to test against, and prints the directory that holds them. With the
# argument "node", what else a node runs is there as well: kube-controller-manager, kube-scheduler, kubelet, kube-proxy and coredns.
#
# With KUBEBUILDER_ASSETS set, that directory is used as it is. Otherwise all are compiled from the Go module proxy into
# bin/k8s/<version of Kubernetes>/: about seven minutes on two cores the first time, four more for a node, nothing afterwards.
# The versions are recorded in one place each, the go.mod files of hack/k8s, hack/etcd and hack/coredns; test/kubetest
# reads the first as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs=(etcd kube-apiserver)
if [[ "${1:-}" == node ]]; then
    programs+=(kube-controller-manager kube-scheduler kubelet kube-proxy coredns)
fi

if [[ -n "${KUBEBUILDER_ASSETS:-}" ]]; then
    for name in "${programs[@]}"; do
        if [[ ! -x "$KUBEBUILDER_ASSETS/$name" ]]; then
            echo "KUBEBUILDER_ASSETS is set, but $KUBEBUILDER_ASSETS/$name cannot be run: correct it, or unset it to compile one" >&2
            exit 1
        fi
    done
    echo "$KUBEBUILDER_ASSETS"
    exit 0
fi

# version FOLDER MODULE: the version of MODULE in FOLDER/go.mod.
version() {
    go -C "$1" list -m -f '{{.Version}}' "$2"
}

# compile FOLDER PACKAGE MODULE TARGET [LDFLAGS]: builds PACKAGE unless TARGET already says, in its build information, that it comes
# from the wanted version. It is compiled under another name and renamed, so that of two makes at once each finds all or nothing.
compile() {
    local folder=$1 package=$2 module=$3 target=$4 ldflags=${5:-} wanted
    wanted=$(version "$folder" "$module")
    if [[ -x "$target" ]] && grep -qE "^[[:space:]](mod|dep)[[:space:]]+$module[[:space:]]+$wanted[[:space:]]" <<<"$(go version -m "$target")"; then
        return
    fi
    echo "compiling $(basename "$target") $wanted (once)…" >&2
    CGO_ENABLED=0 go -C "$folder" build -trimpath -ldflags "-s -w $ldflags" -o "$target.$$" "$package"
    mv -f "$target.$$" "$target"
}

kubernetes=$(version hack/k8s k8s.io/kubernetes)
bin=$PWD/bin/k8s/$kubernetes
mkdir -p "$bin"
trap 'rm -f "$bin"/*.$$' EXIT

# Without these flags the server calls itself v0.0.0, and clients complain.
IFS=. read -r major minor _ <<<"${kubernetes#v}"
stamp=k8s.io/component-base/version
for name in "${programs[@]}"; do
    case $name in
    etcd) compile hack/etcd go.etcd.io/etcd/server/v3 go.etcd.io/etcd/server/v3 "$bin/etcd" ;;
    coredns) compile hack/coredns . github.com/coredns/coredns "$bin/coredns" ;;
    *)
        compile hack/k8s "k8s.io/kubernetes/cmd/$name" k8s.io/kubernetes "$bin/$name" \
            "-X $stamp.gitVersion=$kubernetes -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"
        ;;
    esac
done
echo "$bin"
