#!/usr/bin/env bash
# Prints how many MB of the program's symbols each module has, the largest first. Tables for stack traces, which are a
# third of the program, and types belong to no module.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=$(mktemp)
trap 'rm -f "$program"' EXIT
go build -o "$program" .
{
    go list -deps -f '{{.ImportPath}} {{if .Standard}}std{{else}}{{.Module.Path}}{{end}}' .
    echo --
    go tool nm -size "$program"
} | awk '
    $1 == "--" { symbols = 1; next }
    !symbols { module[$1] = $2; next }
    NF < 4 || $3 ~ /^[UBb]$/ || $4 == "crypto/internal/fips140/drbg.memory" { next } # zeroes that are not in the file
    {
        name = $4
        for (i = 5; i <= NF; i++) name = name " " $i
        owner = "(tables and types)"
        if (name !~ /^(type:[^.]|go:string|runtime\.pclntab|gclocals)/) {
            sub(/^(type:\.(eq|hash)\.|go:itab\.)/, "", name)
            gsub(/^[*(]+/, "", name)
            gsub(/%2e/, ".", name)
            path = ""
            while (match(name, /^[A-Za-z0-9_.~-]+\//)) {
                path = path substr(name, 1, RLENGTH)
                name = substr(name, RLENGTH + 1)
            }
            # The last element may hold dots of its own, such as in gopkg.in/yaml.v3.
            n = split(name, parts, ".")
            last = ""
            for (i = 1; i <= n; i++) {
                last = last (i > 1 ? "." : "") parts[i]
                if ((path last) in module) { owner = module[path last]; break }
            }
        }
        bytes[owner] += $2
    }
    END { for (m in bytes) printf "%8.2f  %s\n", bytes[m] / 1e6, m }' | sort -rn | head -"${1:-30}"
