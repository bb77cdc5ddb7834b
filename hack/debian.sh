#!/usr/bin/env bash
# Installs a package of Debian, where root may, unless its command is there.
# Usage: debian.sh COMMAND PACKAGE CONSEQUENCE
set -euo pipefail
if command -v "$1" >/dev/null; then
	exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "$1 is not installed (package $2): $3" >&2
	exit 0
fi
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$2"; } >&2
