#!/usr/bin/env bash
# Prints the commit of a checkout, its time, and whether files differ from it, for internal/buildinfo: HASH,TIME,true or false.
set -euo pipefail
modified=false
[[ -z $(git status --porcelain) ]] || modified=true
echo "$(TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%H,%cd),$modified"
