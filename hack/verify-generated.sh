#!/usr/bin/env bash
# Regenerates everything in a copy of the working tree and shows what differs. BIN is where the compiled tools are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/before"
# What git would commit, without files deleted since.
git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
        [[ ! -e "$file" ]] || printf '%s\0' "$file"
    done |
    tar -c --null -T - |
    tar -x -C "$copy/before"
cp -R "$copy/before" "$copy/after"
make --no-print-directory -C "$copy/after" generate BIN="$BIN"
if ! (cd "$copy" && diff -ru before after); then
    echo "generated files are out of date: run \`make generate\`" >&2
    exit 1
fi
