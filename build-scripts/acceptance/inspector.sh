#!/usr/bin/env bash
# The Inspector's command line against a built dllm-mcp: strict listing and each tool, in both eras of the protocol.
# usage: inspector.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
passed=0
failed=0

check() { # name, expected text, arguments of the Inspector...
    local name="$era: $1" expected=$2 output
    shift 2
    if output=$(timeout 120 node_modules/.bin/mcp-inspector --cli "$program" --state-dir "$state" --threads 1 \
        --protocol-era "$era" --format json -q "$@" 2>&1) && grep -q -- "$expected" <<<"$output"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name: ${output:0:600}"
    fi
}

call() { # tool, expected text, arguments...
    local tool=$1 expected=$2 arguments=()
    shift 2
    for argument in "$@"; do arguments+=(--tool-arg "$argument"); done
    check "$tool" "$expected" --method tools/call --tool-name "$tool" "${arguments[@]}"
}

for era in legacy modern; do
    check "strict list" '"dllm_help"' --method tools/list --strict
    call dllm_generate '"text":"131"' "prompt=86 + 45 =" seed=1 max_tokens=32
    call dllm_infill '"filled":\["' "prefix=86 + " "suffix= = 131" max_tokens=2
    call dllm_batch '"accepted":1' 'items_json=[{"id":"a","prompt":"1 + 1 ="}]' wait_s=10 max_tokens=16
    call dllm_job '"jobs":\[' operation=list
    call dllm_status '"state":"unloaded"'
    call dllm_models '"id":"dllm-tiny"' operation=list
    call dllm_benchmark '"tokens_per_second":' preset=quick
    call dllm_help 'many prompts at once' topic=routing
    check resources '"dllm://config"' --method resources/list
    check "resource templates" '"dllm://jobs/{id}/results"' --method resources/templates/list
    check prompts '"synth_jsonl"' --method prompts/list
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
