#!/usr/bin/env bash
# Checks both contracts with Redocly and Spectral. It needs node and npm.
set -euo pipefail
cd "$(dirname "$0")/.."
export REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true
tools="$(hack/npm.sh hack/contract)/node_modules/.bin"
"$tools/redocly" lint --config hack/contract/redocly.yaml api/openapi/v1.yaml api/openapi/v2.yaml
"$tools/spectral" lint --ruleset hack/contract/.spectral.yaml --fail-severity hint api/openapi/v1.yaml api/openapi/v2.yaml
