#!/usr/bin/env bash
# Installs poppler-utils (pdftotext), where root may install Debian's packages.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "pdftotext is not installed (package poppler-utils): tests that read PDF will be skipped" >&2
	exit 0
fi
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends poppler-utils; } >&2
