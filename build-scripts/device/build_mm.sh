#!/bin/bash
# Builds the matmul kernels alone as one shared library, all files at once: build_mm.sh OUT.so [nvcc flags].
set -e
here=$(cd "$(dirname "$0")/../../dllm-engine/kernels" && pwd)
out=$1; shift
tmp=$(mktemp -d)
for f in repack moe_route moe_gate_up moe_down quant_mm; do
    nvcc -c -Xcompiler -fPIC -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 "$@" -o $tmp/$f.o $here/$f.cu &
done
wait
nvcc -shared -gencode arch=compute_90,code=sm_90 -o $out $tmp/*.o
