#!/usr/bin/env bash
# The conformance suite over HTTP. Failures that are expected stand in conformance-expected.yml, each with its reason.
# usage: conformance.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
here=$(cd "$(dirname "$0")" && pwd)
port=${PORT:-10835}
state=$(mktemp -d)
"$program" --http "127.0.0.1:$port" --state-dir "$state" &
server=$!
trap 'kill "$server" 2>/dev/null; rm -rf "$state"' EXIT
for _ in $(seq 50); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    sleep 0.1
done
"${NODE:-node}" node_modules/@modelcontextprotocol/conformance/dist/index.js server --url "http://127.0.0.1:$port/mcp" \
    --requirements 2026-07-28 --expected-failures "$here/conformance-expected.yml"
code=$?
if [ "$code" -eq 0 ]; then echo "1 passed, 0 failed"; else echo "0 passed, 1 failed"; fi
exit "$code"
