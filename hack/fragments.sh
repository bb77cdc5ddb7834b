#!/usr/bin/env bash
# Counts comments behind code that are half a sentence, such as "// of it" or "// which is held": they begin with a word
# that needs one before it, and a reader has to guess which. Lists them when there are more than the first argument, and
# fails. Tests and generated code do not count.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
limit=$1
found=$(git ls-files --cached --others --exclude-standard '*.go' | grep -vE '_test\.go$|\.gen\.go$|/zz_generated' |
    while IFS= read -r file; do [[ ! -e "$file" ]] || printf '%s\0' "$file"; done |
    xargs -0 grep -nHE '^\s*[^/[:space:]].*\s// (of|which|that|from|by|who|whose|whom|whoever|where|to|with)\b' || true)
count=$(grep -c . <<<"$found" || true)
echo "$count fragment comments, at most $limit"
if ((count > limit)); then
    echo "$found" >&2
    exit 1
fi
