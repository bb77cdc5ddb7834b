#!/usr/bin/env bash
# Installs strace, where root may install Debian's packages.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "strace is not installed (package strace): tests in which system calls fail will be skipped" >&2
	exit 0
fi
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends strace; } >&2
