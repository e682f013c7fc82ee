#!/usr/bin/env bash
# The bundle: validated, packed, unpacked again, and asked a question.
# usage: mcpb.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $name: ${output:0:600}"; fi
}
export MCPB="${NODE:-node} $PWD/node_modules/@anthropic-ai/mcpb/dist/cli/cli.js"
check bundle bash "$here/dllm-mcp/packaging/bundle.sh" "$program" "$work/dllm.mcpb"
answers() {
    mkdir "$work/unpacked" && (cd "$work/unpacked" && python3 -m zipfile -e ../dllm.mcpb .) || return 1
    chmod +x "$work/unpacked/server/dllm-mcp"
    local hello='{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}'
    echo "$hello" | "$work/unpacked/server/dllm-mcp" --state-dir "$work/state" | grep -q diffusion-llm-mcp
}
check "the packed server answers" answers
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
