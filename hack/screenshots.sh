#!/usr/bin/env bash
# Takes the pictures of every page of the dashboard, light and dark, wide and on a phone, into bin/screenshots: what a test of all pages
# sees. Those that the documentation shows go to docs/images.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v chromium >/dev/null || { echo "Chromium is not installed (package chromium): no pictures are taken" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
DASHBOARD_PICTURES=$folder go test -count=1 -timeout 15m -run '^TestEveryPageIsAccessibleEverywhere$' ./server/dashboard
most=5000000 all=$(cat "$folder"/*.png | wc -c)
if ((all > most)); then
	echo "the pictures have $all bytes: at most $most" >&2
	exit 1
fi
rm -rf bin/screenshots
mkdir -p bin/screenshots
install -m 644 "$folder"/*.png bin/screenshots/
for shown in docs/images/*-{light,dark}-{wide,phone}.png; do
	[[ ! -e "$shown" ]] || install -m 644 "$folder/${shown##*/}" "$shown"
done
echo "$(ls "$folder" | wc -l) pictures in bin/screenshots, $all bytes"
