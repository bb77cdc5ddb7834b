#!/usr/bin/env bash
# Checks the documentation and the messages of the program against the rules of docs/contributing/style.md. BIN is where
# the compiled tools are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$(cd "$BIN" && pwd -P)
config=$PWD/hack/vale/vale.ini
if ! command -v "${CC:-cc}" >/dev/null; then
    echo "prose was not checked: Vale needs a C compiler, and there is none" >&2
    exit 0
fi
# Its parsers of programming languages, which nothing here uses, take minutes to optimise.
CGO_ENABLED=1 CGO_CFLAGS='-O0 -w' CGO_CXXFLAGS='-O0 -w' go -C hack/vale build -o "$bin/tools/" tool
"$bin/tools/vale" --config "$config" --output line README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs charts/latticekeep/README.md clients/typescript/README.md clients/python/README.md
messages=$(mktemp -d)
trap 'rm -rf "$messages"' EXIT
go run -trimpath ./hack/messages "$messages" api/client controllers internal server
cd "$messages"
"$bin/tools/vale" --config "$config" --output line .
