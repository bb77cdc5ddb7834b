#!/usr/bin/env bash
# Installs PostgreSQL's server, where root may install Debian's packages, without a cluster: tests make their own.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "PostgreSQL is not installed (packages postgresql and procps): tests that need it will be skipped" >&2
	exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{
	apt-get update
	apt-get install --yes --no-install-recommends postgresql-common procps
	# The server's package would make a cluster and start it.
	mkdir -p /etc/postgresql-common/createcluster.d
	echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/latticekeep.conf
	apt-get install --yes --no-install-recommends postgresql
} >&2
