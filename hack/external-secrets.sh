#!/usr/bin/env bash
# Makes sure that there is an External Secrets Operator to test against, and prints the directory that holds it: the program
# external-secrets and its custom resource definitions, crds.yaml.
#
# It is compiled from the Go module proxy into bin/external-secrets/<version>/: about three minutes on two cores the first
# time, nothing afterwards. hack/external-secrets/webhook-only.patch says what is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

module=github.com/external-secrets/external-secrets
# Releases from 1.0 on need modules that the proxy does not serve.
version=v0.20.4
sum=h1:HhNAjWfFEshhItphr28SGsHzf2bUP7uDAOVLg76uNAg=
patch=$PWD/hack/external-secrets/webhook-only.patch

bin=$PWD/bin/external-secrets/$version
# The patch lies beside the program that was compiled with it.
if [[ -x "$bin/external-secrets" ]] && cmp --silent "$patch" "$bin/webhook-only.patch"; then
    echo "$bin"
    exit 0
fi

mkdir -p "$bin"
work=$(mktemp -d "$bin/source.XXXXXX")
trap 'rm -rf "$work"' EXIT

if ! download=$(go mod download -json "$module@$version"); then
    echo "$download" >&2 # the error is in it
    exit 1
fi
field() {
    sed -n "s/^[[:space:]]*\"$1\": \"\(.*\)\",*\$/\1/p" <<<"$download"
}
if [[ "$(field Sum)" != "$sum" ]]; then
    echo "$module@$version has the sum $(field Sum), and hack/external-secrets.sh expects $sum: find out who changed it" >&2
    exit 1
fi
cp -R "$(field Dir)/." "$work"
chmod -R u+w "$work"
# Git would look for the files in our repository.
GIT_CEILING_DIRECTORIES=$bin git -C "$work" apply "$patch"

echo "compiling External Secrets Operator $version (once)…" >&2
CGO_ENABLED=0 go -C "$work" build -trimpath -ldflags '-s -w' -o "$bin/external-secrets.$$" .
cp "$work/deploy/crds/bundle.yaml" "$bin/crds.yaml"
cp "$patch" "$bin/webhook-only.patch"
mv -f "$bin/external-secrets.$$" "$bin/external-secrets"
echo "$bin"
