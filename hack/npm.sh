#!/usr/bin/env bash
# Installs the npm packages that a lock file lists beside a copy of it in a folder, unless they are there, and prints the folder.
# Usage: npm.sh FOLDER-OF-THE-LOCK-FILE
set -euo pipefail
cd "$(dirname "$0")/.."
target="${BIN:-$PWD/bin}/npm/$(basename "$1")"
if ! cmp -s "$1/package-lock.json" "$target/installed.json"; then
	rm -rf "$target"
	mkdir -p "$target"
	cp "$1/package.json" "$1/package-lock.json" "$1/.npmrc" "$target"
	(cd "$target" && npm ci >&2)
	cp "$1/package-lock.json" "$target/installed.json"
fi
echo "$target"
