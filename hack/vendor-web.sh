#!/usr/bin/env bash
# Makes the dashboard's vendored files anew from the pinned packages of hack/web: static/vendor/{preact,noble,icons,yaml}.js with
# their licences, axe-core for the tests, and the manifest that a test holds them against. It needs node and npm;
# building and running Latticekeep does not.
#
#   hack/vendor-web.sh           from exactly what the lock file says
#   hack/vendor-web.sh --lock    write the lock file anew first, after a change of package.json
set -euo pipefail
cd "$(dirname "$0")/.."
vendor=server/dashboard/static/vendor
testdata=server/dashboard/testdata
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cp hack/web/{package.json,.npmrc,preact.js,noble.js,icons.js,yaml.js} "$work"
if [ "${1:-}" = --lock ]; then
	(cd "$work" && npm install --package-lock-only >&2)
	cp "$work/package-lock.json" hack/web/
fi
cp hack/web/package-lock.json "$work"
(cd "$work" && npm ci >&2)

mkdir -p "$vendor" "$testdata"
licence() { cat "$work/node_modules/$1"/LICEN[CS]E*; }
field() { node -p "require('$work/node_modules/$1/package.json').$2"; }

for bundle in preact noble icons yaml; do
	(cd "$work" && node_modules/.bin/esbuild "$bundle.js" --bundle --minify --format=esm --target=es2022 --charset=utf8 \
		--legal-comments=none --metafile="$bundle.json" --outfile="$bundle.min.js" >&2)
	cp "$work/$bundle.min.js" "$vendor/$bundle.js"
	# The packages that something of is in the bundle.
	node -e '
		const {inputs} = Object.values(JSON.parse(require("fs").readFileSync(process.argv[1])).outputs)[0];
		const used = Object.keys(inputs).filter(f => inputs[f].bytesInOutput > 0).map(f => f.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]);
		console.log([...new Set(used.filter(Boolean))].sort().join("\n"));
	' "$work/$bundle.json" >"$work/$bundle.packages"
done

{
	echo "What is in the files of this folder, and under which licences. hack/vendor-web.sh makes them."
	for bundle in preact noble icons yaml; do
		while read -r package; do
			printf '\n%s\n%s: %s %s (%s)\n%s\n\n' "$(printf '=%.0s' {1..80})" "$bundle.js" "$package" "$(field "$package" version)" "$(field "$package" license)" "$(printf '=%.0s' {1..80})"
			licence "$package"
		done <"$work/$bundle.packages"
	done
} >"$vendor/LICENSES.txt"

cp "$work/node_modules/axe-core/axe.min.js" "$testdata/axe.min.js"
{
	echo "axe.min.js: axe-core $(field axe-core version) ($(field axe-core license)), for tests only."
	echo
	licence axe-core
} >"$testdata/axe.LICENSE.txt"

# One line a file: the digest of the file, its path, and the packages that it is made of.
{
	of() { while read -r package; do printf ' %s@%s' "$package" "$(field "$package" version)"; done; }
	line() { printf '%s  %s %s\n' "$(sha256sum "$1" | cut -d' ' -f1)" "${1#server/dashboard/}" "$2"; }
	line "$vendor/preact.js" "$(of <"$work/preact.packages")"
	line "$vendor/noble.js" "$(of <"$work/noble.packages")"
	line "$vendor/icons.js" "$(of <"$work/icons.packages")"
	line "$vendor/yaml.js" "$(of <"$work/yaml.packages")"
	line "$vendor/LICENSES.txt" ""
	line "$testdata/axe.min.js" "$(echo axe-core | of)"
	line "$testdata/axe.LICENSE.txt" ""
} | sed 's/  *$//; s/   */  /g' >"$vendor/versions"
