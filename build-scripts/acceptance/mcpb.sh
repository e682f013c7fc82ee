#!/usr/bin/env bash
# The bundle: validated and packed, unpacked again, started as its manifest says, and asked everything by a client.
# usage: mcpb.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
check() { # name, command...
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $name: ${output:0:2000}"; fi
}

# A program of a debug build packs in a minute, without its symbols in seconds.
strip -o "$work/dllm-mcp" "$program"
export MCPB="node $PWD/node_modules/@anthropic-ai/mcpb/dist/cli/cli.js"
check "validate and pack" bash "$here/../../dllm-mcp/packaging/bundle.sh" "$work/dllm-mcp" "$work/dllm.mcpb"

# What a host does: put the folders that the user chose into the manifest's command line.
command_line() {
    python3 - "$work" <<'PYTHON'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
config = json.loads((work / "unpacked/manifest.json").read_text())["server"]["mcp_config"]
folders = {"${__dirname}": work / "unpacked", "${user_config.model_dir}": work / "models", "${user_config.files_dir}": work / "files"}
for word in [config["command"], *config["args"]]:
    for name, folder in folders.items():
        word = word.replace(name, str(folder))
    print(word)
PYTHON
}
mkdir "$work/unpacked" "$work/models" "$work/files"
check unpack python3 -m zipfile -e "$work/dllm.mcpb" "$work/unpacked"
chmod +x "$work/unpacked/server/dllm-mcp" # Python's unpacking drops modes
mapfile -t words < <(command_line)
check "the packed server answers" "$PWD/venv-mcp-2.3.0/bin/python" "$here/client.py" mcp "${words[@]}"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
