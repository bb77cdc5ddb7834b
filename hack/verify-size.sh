#!/usr/bin/env bash
# Fails when the program, stripped and for amd64, is larger than its budget. Usage: hack/verify-size.sh PROGRAM
#
# docs/adr/0014-size.md has the reasons. It was 80 MB; 2 MB more came for the diagnosis, restores to a time and the log of
# commits, 2 MB for a vault of paths, 2 MB for the KMS v2 plugin with its gRPC server, and 1 MB for the CSI provider and the
# agent. A later change may raise the budget by at most 4 MB, up to 90 MB in all, and says in its commit what it adds.
# `make size` says what is in the program.
set -euo pipefail
budget=87000000

[[ "$(go env GOARCH)" == amd64 ]] || { echo "the size is checked on amd64 only"; exit 0; }
size=$(wc -c <"$1")
echo "$1 has $size bytes of $budget"
if ((size > budget)); then
    echo "the program is too large: look for what it gained with 'make size', and whether a client of gRPC or a template came back" >&2
    echo "(docs/adr/0014-size.md)" >&2
    exit 1
fi
