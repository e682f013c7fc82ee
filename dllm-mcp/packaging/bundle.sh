#!/usr/bin/env bash
# Packs a built dllm-mcp as an MCPB bundle.
# usage: MCPB="npx @anthropic-ai/mcpb" bundle.sh PROGRAM OUTPUT.mcpb
set -euo pipefail
program=$1
output=$2
here=$(cd "$(dirname "$0")" && pwd)
read -ra mcpb <<<"${MCPB:-mcpb}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/server"
case $program in
*.exe) name=dllm-mcp.exe ;;
*) name=dllm-mcp ;;
esac
cp "$program" "$work/server/$name"
cp "$here/manifest.json" "$here/llms.txt" "$work/"
# The entry point is checked for; a bundle for Windows has the other name.
if [ "$name" = dllm-mcp.exe ]; then sed -i 's|"entry_point": "server/dllm-mcp"|"entry_point": "server/dllm-mcp.exe"|' "$work/manifest.json"; fi
"${mcpb[@]}" validate "$work/manifest.json"
"${mcpb[@]}" pack "$work" "$output"
