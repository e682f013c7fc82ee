#!/bin/bash
# Builds all CUDA kernels as the one shared library that the engine loads: build_kernels.sh OUT_FOLDER [nvcc flags].
set -e
here=$(cd "$(dirname "$0")/../../dllm-engine/kernels" && pwd)
out=$1; shift
tmp=$(mktemp -d)
pids=""
for f in "$here"/*.cu; do
    nvcc -c -Xcompiler -fPIC,-fvisibility=hidden -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 "$@" \
        -o "$tmp/$(basename "$f" .cu).o" "$f" &
    pids="$pids $!"
done
for p in $pids; do wait "$p"; done
nvcc -shared -gencode arch=compute_90,code=sm_90 -o "$out/libdllm_kernels.so" "$tmp"/*.o -lcublas
