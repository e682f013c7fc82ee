#!/usr/bin/env bash
# The conformance suite over HTTP, once for each revision of the protocol. What is expected to fail stands in
# conformance-REVISION.yml, check by check, each with its reason; anything else that fails, or passes again, is an error.
# usage: conformance.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
here=$(cd "$(dirname "$0")" && pwd)
state=$(mktemp -d)
coproc server { exec "$program" --http 127.0.0.1:0 --state-dir "$state" --threads 1; }
trap 'kill "$server_PID" 2>/dev/null; rm -rf "$state"' EXIT
read -r line <&"${server[0]}"
url=${line#listening on }

passed=0
failed=0
for revision in 2025-11-25 2026-07-28; do
    if node node_modules/@modelcontextprotocol/conformance/dist/index.js server --url "$url" \
        --requirements "$revision" --expected-failures "$here/conformance-$revision.yml"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
