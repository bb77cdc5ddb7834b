#!/usr/bin/env bash
# Makes sure that there is the controller of External Secrets to test against, and prints the folder that holds it and its
# resources. It is compiled from the Go module proxy, once: some 1,500 packages.
#
# hack/external-secrets/providers.patch leaves only the provider webhook in its list of providers. The others bring modules that
# are large, and some that the proxy does not have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=v0.20.4
module=github.com/external-secrets/external-secrets
bin=$PWD/bin/external-secrets/$version
if [[ ! -x "$bin/external-secrets" ]] || ! cmp -s hack/external-secrets/providers.patch "$bin/providers.patch"; then
    echo "compiling external-secrets $version (once)…" >&2
    source=$(mktemp -d)
    trap 'chmod -R u+w "$source" && rm -rf "$source"' EXIT
    module_folder=$(go mod download -json "$module@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    cp -r "$module_folder/." "$source"
    chmod -R u+w "$source"
    git -C "$source" apply --unsafe-paths --directory="$source" "$PWD/hack/external-secrets/providers.patch"
    mkdir -p "$bin"
    # It has modules of its own, and flags of its own.
    CGO_ENABLED=0 GOFLAGS=-mod=mod go -C "$source" build -trimpath -ldflags="-s -w" -o "$bin/external-secrets.$$" .
    cp "$source/deploy/crds/bundle.yaml" "$bin/crds.yaml"
    cp hack/external-secrets/providers.patch "$bin/providers.patch"
    mv -f "$bin/external-secrets.$$" "$bin/external-secrets"
fi
echo "$bin"
