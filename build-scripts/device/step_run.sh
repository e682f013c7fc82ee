#!/bin/bash
# Builds the kernels of a step, checks and times them, runs the sanitizers on small sizes and profiles the large ones.
# usage: step_run.sh OUT [sections] [sections for the sanitizers]     (on a machine with a GPU, nvcc and torch; from the repository root)
OUT=$1; SECTIONS=${2:-}; SANITIZE=${3:-$SECTIONS}
KERNELS=dllm-engine/kernels
FILES=""
for f in position_stats likeliest soft_embed norms router rope_kv attention; do
  [ -f $KERNELS/$f.cu ] && FILES="$FILES $KERNELS/$f.cu"
done
LIB=/tmp/libdllm_step.so
mkdir -p /tmp/step_obj
pids=""
for f in $FILES; do
  nvcc -c -Xcompiler -fPIC -O3 -lineinfo -std=c++17 -gencode arch=compute_90,code=sm_90 $f \
    -o /tmp/step_obj/$(basename $f .cu).o &
  pids="$pids $!"
done
SMALL=/tmp/libdllm_small.so  # the attention variant for chips with little shared memory
nvcc -shared -DDLLM_SMALL_SHARED -Xcompiler -fPIC -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 \
  $KERNELS/attention.cu -o $SMALL &
for p in $pids $!; do wait $p || echo "COMPILE FAILED"; done
nvcc -shared -o $LIB /tmp/step_obj/*.o || exit 1
T=build-scripts/device/test_step.py
export PYTHONUNBUFFERED=1
ONLY=${SECTIONS:+--only $SECTIONS}
timeout 200 python3 $T $LIB $ONLY > $OUT/step.txt 2> $OUT/step.err
timeout 60 python3 $T $SMALL --only attention --no-time > $OUT/small.txt 2>> $OUT/step.err
sed -n '/=== failures/,$p' $OUT/step.txt
echo "small variant of attention:"; sed -n '/=== failures/,/=== times/p' $OUT/small.txt | grep -v ===
[ -s $OUT/step.err ] && tail -5 $OUT/step.err
PROFILE=${PROFILE:-scan|join_|likeliest|soft_kernel|layer_out|product_kernel|pick_kernel|attend}
METRICS=gpu__time_duration.sum,dram__bytes_read.sum,lts__t_bytes.sum,launch__registers_per_thread
METRICS=$METRICS,sm__warps_active.avg.pct_of_peak_sustained_active,smsp__issue_active.avg.pct_of_peak_sustained_active
METRICS=$METRICS,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active
METRICS=$METRICS,sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active
for s in long_scoreboard short_scoreboard barrier math_pipe_throttle mio_throttle lg_throttle wait membar; do
  METRICS=$METRICS,smsp__average_warps_issue_stalled_${s}_per_issue_active.ratio
done
timeout 60 ncu --clock-control none -k "regex:$PROFILE" --metrics $METRICS --csv --page raw \
  python3 $T $LIB --only profile --child /dev/null > $OUT/ncu.csv 2> $OUT/ncu.err
grep -c '^"' $OUT/ncu.csv
sanitize() {  # tool, library, sections
  timeout 110 compute-sanitizer --tool $1 python3 $T $2 --small $3 > $OUT/$1_$(basename $2 .so).txt 2>&1
  grep -v ' ok$' $OUT/$1_$(basename $2 .so).txt | tail -6
}
pids=""
for tool in memcheck racecheck; do
  sanitize $tool $LIB "${SANITIZE:+--only $SANITIZE}" & pids="$pids $!"
  sanitize $tool $SMALL "--only attention" & pids="$pids $!"
done
for p in $pids; do wait $p; done
