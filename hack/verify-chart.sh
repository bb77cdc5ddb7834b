#!/usr/bin/env bash
# Lints the chart, renders it with each file of charts/latticekeep/ci and config/ with kustomize, and holds every object, and the static pod, against the strict
# schema of its kind. BIN is where the compiled tools are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
schemas=$(mktemp -d)
trap 'rm -rf "$schemas"' EXIT

# The schemas are those of the Kubernetes version that the tests run.
kubernetes=$(go -C hack/k8s mod download -json k8s.io/kubernetes | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
go run ./hack/schemas -swagger "$kubernetes/api/openapi-spec/swagger.json" \
    -crd config/crd/bases/latticekeep.dev_sealedcredentials.yaml -out "$schemas"

# check NAME: holds the objects on standard input against their schemas.
check() {
    echo "kubeconform ($1)"
    "$BIN/tools/kubeconform" -strict -schema-location "$schemas/{{.ResourceKind}}_{{.Group}}_{{.ResourceAPIVersion}}.json" -
}

for values in charts/latticekeep/ci/*.yaml; do
    "$BIN/tools/helm" lint --strict --quiet --values "$values" charts/latticekeep
    "$BIN/tools/helm" template latticekeep charts/latticekeep --namespace latticekeep-system --values "$values" | check "$values"
done
for file in config/*/kustomization.yaml; do
    folder=${file%kustomization.yaml}
    kubectl kustomize "$folder" | check "$folder"
done
check config/kms-plugin/static-pod.yaml <config/kms-plugin/static-pod.yaml
