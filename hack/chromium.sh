#!/usr/bin/env bash
# Installs Chromium, where root may install Debian's packages.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "Chromium is not installed (package chromium): tests of the dashboard in a browser will be skipped" >&2
	exit 0
fi
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium; } >&2
