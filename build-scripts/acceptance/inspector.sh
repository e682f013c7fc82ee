#!/usr/bin/env bash
# The Inspector's command line against a built dllm-mcp: strict listing in both eras, and each tool called once.
# usage: inspector.sh PROGRAM   (in a folder where the packages are installed)
set -uo pipefail
program=$1
node=${NODE:-node}
inspector=(env "PATH=$(dirname "$(command -v "$node")"):$PATH" node_modules/.bin/mcp-inspector --cli)
state=$(mktemp -d)
passed=0
failed=0

check() { # name, expected text, command...
    local name=$1 expected=$2 output
    shift 2
    if output=$(timeout 60 "$@" 2>&1) && grep -q -- "$expected" <<<"$output"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name: ${output:0:600}"
    fi
}

for era in legacy modern; do
    check "strict list, $era" dllm_help "${inspector[@]}" "$program" --state-dir "$state" --method tools/list --strict --protocol-era "$era"
done
call() { # tool, expected, arguments...
    local tool=$1 expected=$2
    shift 2
    check "$tool" "$expected" "${inspector[@]}" "$program" --state-dir "$state" --method tools/call --tool-name "$tool" "$@"
}
call dllm_generate 131 --tool-arg "prompt=86 + 45 =" --tool-arg seed=1 --tool-arg max_tokens=32
call dllm_infill filled --tool-arg "prefix=86 + " --tool-arg "suffix= = 131" --tool-arg max_tokens=2
call dllm_batch accepted --tool-arg 'items_json=[{"id":"a","prompt":"1 + 1 ="}]' --tool-arg wait_s=10 --tool-arg max_tokens=16
call dllm_job jobs --tool-arg operation=list
call dllm_status unloaded
call dllm_models dllm-tiny --tool-arg operation=list
call dllm_benchmark tokens_per_second --tool-arg preset=quick
call dllm_help routing --tool-arg topic=routing
check resources config "${inspector[@]}" "$program" --state-dir "$state" --method resources/list
check prompts synth_jsonl "${inspector[@]}" "$program" --state-dir "$state" --method prompts/list

rm -rf "$state"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
