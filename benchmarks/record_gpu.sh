#!/usr/bin/env bash
# What is recorded on GPUs, run again on all of this machine: one step after the other, or those
# given. Each ends within about LIMIT_S seconds (default 550) and leaves its records in
# benchmarks/results; then docs/generate.py writes the tables.
#
#   benchmarks/record_gpu.sh [step]...
#
# Steps: limits waits kernels p2p formats suite processes process-soak nodes soak sanitize options
# overlap grouped layer collective. Where there is one GPU, four processes share it. Needs jax_ep built
# for these GPUs, importable by PYTHON (default python3), with the extra test; steps limits, waits and
# kernels need nvcc. Status 1 if a step failed or ran out of time.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
limit=${LIMIT_S:-550}
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "nvidia-smi shows no GPU"; exit 2; }
# Else a process takes most of each GPU, and those that a step starts find too little.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

counts=()
for count in 4 2 1; do
  [ "$count" -gt "$gpus" ] || counts+=("$count")
done
processes=(--processes "$gpus")
[ "$gpus" -gt 1 ] || processes=(--processes 4 --one-gpu)
formats=(bf16 fp8_block128 mxfp8 mxfp4 nvfp4)

run() {
  local started=$SECONDS
  timeout --kill-after=10 "$((limit + 30))" "$@"
  local status=$?
  echo "== $step: ended with $status after $((SECONDS - started)) s: $*"
  [ "$status" = 0 ] || failed+=("$step")
}

failed=()
steps=("$@")
[ $# -gt 0 ] ||
  steps=(limits waits kernels p2p formats suite processes process-soak nodes soak sanitize options
    overlap grouped layer collective)
for step in "${steps[@]}"; do
  case $step in
    # With the litmus test of the memory order.
    limits) run "$python" benchmarks/gpu_limits.py ;;
    waits) run "$python" benchmarks/launch_waits.py ;;
    kernels)
      run "$python" benchmarks/window_kernels.py --record --sms 0,24,32 \
        --tokens 1,8,32,128,512,1024,4096,8192
      ;;
    p2p) run "$python" benchmarks/p2p.py --budget "$limit" ;;
    formats)
      run "$python" benchmarks/p2p.py --formats "${formats[@]}" --combine-format fp8_block128 \
        --only p2p --routing uniform --tokens 4096 128 1024 1 --budget "$limit"
      ;;
    suite)
      run "$python" benchmarks/record_suite.py --gpus "${counts[@]}" \
        --jobs "$((($(nproc) + 1) / 2))" --limit-s "$limit"
      ;;
    processes)
      run "$python" benchmarks/record_suite.py "${processes[@]}" --transports p2p collective \
        --limit-s "$((limit / 2))"
      run "$python" benchmarks/record_suite.py "${processes[@]}" --ranks-per-node 2 \
        --transports shmem --limit-s "$((limit / 2))"
      ;;
    process-soak)
      run "$python" benchmarks/soak_processes.py "${processes[@]}" --transport p2p --minutes 4
      run "$python" benchmarks/soak_processes.py "${processes[@]}" --ranks-per-node 2 \
        --transport shmem --minutes 4
      ;;
    nodes) run "$python" benchmarks/nodes.py ;;
    soak) run "$python" benchmarks/soak.py --calls 20000 ;;
    sanitize) LIMIT_S=$limit run benchmarks/sanitize.sh "$python" ;;
    options) run "$python" benchmarks/options_cost.py --budget "$limit" ;;
    overlap) run "$python" benchmarks/overlap.py --trace --budget "$limit" ;;
    grouped) run "$python" benchmarks/grouped.py ;;
    layer) run "$python" benchmarks/layer.py --budget "$limit" ;;
    collective) run "$python" benchmarks/collective.py ;;
    *) echo "no step '$step'"; exit 2 ;;
  esac
done
[ "${#failed[@]}" = 0 ] || { echo "not well: ${failed[*]}"; exit 1; }
