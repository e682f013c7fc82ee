#!/usr/bin/env bash
# The conformance suite over HTTP, once for each revision of the protocol. What is expected to fail stands in
# conformance-REVISION.yml, check by check, each with its reason; anything else that fails, or passes again, is an error.
# usage: conformance.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
here=$(cd "$(dirname "$0")" && pwd)
state=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$program" --http "127.0.0.1:$port" --state-dir "$state" --threads 1 &
server=$!
trap 'kill "$server" 2>/dev/null; rm -rf "$state"' EXIT
curl -sf --retry 50 --retry-delay 1 --retry-connrefused "http://127.0.0.1:$port/health" >/dev/null || exit 1

passed=0
failed=0
for revision in 2025-11-25 2026-07-28; do
    if node node_modules/@modelcontextprotocol/conformance/dist/index.js server --url "http://127.0.0.1:$port/mcp" \
        --requirements "$revision" --expected-failures "$here/conformance-$revision.yml"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
