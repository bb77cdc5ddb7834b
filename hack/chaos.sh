#!/usr/bin/env bash
# Runs the long form of tests, by the pattern of their names, one package after the other, and writes what they say to a file below the
# text on stdin.
#
# usage: hack/chaos.sh FILE PATTERN PACKAGE... <HEAD
set -euo pipefail
cd "$(dirname "$0")/.."
transcript=$(mktemp)
trap 'rm -f "$transcript"' EXIT
{
	cat
	echo
	echo "$(date +%Y-%m-%d), $(nproc) cores, Linux $(uname -r), $(go env GOVERSION)."
} >"$transcript"
CHAOS_LONG=1 CHAOS_TRANSCRIPT=$transcript go test -count=1 -p 1 -timeout 8h -run "$2" "${@:3}"
install -m 644 "$transcript" "$1"
