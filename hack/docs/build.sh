#!/usr/bin/env bash
# Builds the site of docs/ into bin/site and checks its links and anchors. BIN is where the compiled tools are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$BIN"
bin=$(cd "$BIN" && pwd -P)
proxy=$(go env GOPROXY)
# The theme is a module without Go code: hack/docs/site/go.sum pins it, and Hugo fetches it as go fetches the rest.
HUGO_MODULE_PROXY=$proxy HUGO_MODULE_NOPROXY=none HUGO_CACHEDIR=$bin/hugo GOFLAGS='' \
    "$bin/tools/hugo" --source hack/docs/site --destination "$bin/site" --cleanDestinationDir --quiet
cd "$bin/.."
"$bin/tools/htmltest" --conf "$OLDPWD/hack/docs/htmltest.yaml" "$bin/site"
