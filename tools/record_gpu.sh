#!/usr/bin/env bash
# Runs all tests and benchmarks on all GPUs of this machine: all steps one after the other, or those
# given. Each ends within about LIMIT_S seconds (default 550). Benchmarks write their records to
# benchmarks/results, from which docs/generate.py makes the tables; tests and soaks end with the figures
# for docs/test_records.md.
#
#   tools/record_gpu.sh [step]...
#
# Steps: kernels p2p formats suite processes process-soak nodes soak sanitize options
# overlap grouped few-rows decode routers layer. A single GPU is shared by four processes.
# Needs jax_ep built for these GPUs and installed for PYTHON (default python3), with the extra test;
# steps kernels, p2p and few-rows need nvcc. Exits 1 if a step failed or ran out of
# time.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
limit=${LIMIT_S:-550}
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "nvidia-smi shows no GPU"; exit 2; }
# Otherwise one process takes most of each GPU, and those that a step starts find too little memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

processes=(--processes "$gpus")
[ "$gpus" -gt 1 ] || processes=(--processes 4 --one-gpu)
formats=(bf16 fp8_block128 mxfp8 mxfp4 nvfp4)

run() {
  local started=$SECONDS
  timeout --signal=INT --kill-after=10 "$((limit + 30))" "$@"
  local status=$?
  echo "== $step: ended with $status after $((SECONDS - started)) s: $*"
  [ "$status" = 0 ] || failed+=("$step")
}

failed=()
steps=("$@")
[ $# -gt 0 ] ||
  steps=(kernels p2p formats suite processes process-soak nodes soak sanitize options
    overlap grouped few-rows decode routers layer)
for step in "${steps[@]}"; do
  case $step in
    kernels)
      run "$python" -m benchmarks.calls.window_kernels --record --sms 0,24,32 \
        --tokens 1,8,32,128,512,1024,4096,8192
      ;;
    p2p) run "$python" -m benchmarks.calls.p2p --budget "$limit" ;;
    formats)
      run "$python" -m benchmarks.calls.p2p --formats "${formats[@]}" --combine-format fp8_block128 \
        --only p2p --routing uniform --tokens 4096 128 1024 1 --budget "$limit"
      ;;
    suite)
      for transport in p2p collective; do
        JAX_EP_TEST_TRANSPORT=$transport run "$python" -m pytest tests -m "not exclusive" --dist worksteal \
          -n "$((($(nproc) + 1) / 2))"
        JAX_EP_TEST_TRANSPORT=$transport run "$python" -m pytest tests -m exclusive
      done
      ;;
    processes)
      run "$python" -m tools.lockstep_run "${processes[@]}" --limit-s "$((limit / 2))"
      run "$python" -m tools.lockstep_run "${processes[@]}" --ranks-per-node 2 --transport shmem \
        --limit-s "$((limit / 2))"
      ;;
    process-soak)
      run "$python" -m benchmarks.soak.processes "${processes[@]}" --transport p2p --minutes 4
      run "$python" -m benchmarks.soak.processes "${processes[@]}" --ranks-per-node 2 \
        --transport shmem --minutes 4
      ;;
    nodes) run "$python" -m benchmarks.calls.nodes ;;
    soak) run "$python" -m benchmarks.soak.soak --calls 20000 ;;
    sanitize) LIMIT_S=$limit run tools/sanitize.sh "$python" ;;
    options) run "$python" -m benchmarks.calls.options_cost --budget "$limit" ;;
    overlap) run "$python" -m benchmarks.overlap.overlap --budget "$limit" ;;
    grouped) run "$python" -m benchmarks.layers.grouped ;;
    few-rows) run "$python" -m benchmarks.limits.few_rows ;;
    decode) run "$python" -m benchmarks.layers.decode --layer ;;
    routers) run "$python" -m benchmarks.layers.routers ;;
    layer) run "$python" -m benchmarks.layers.layer --budget "$limit" ;;
    *) echo "no step '$step'"; exit 2 ;;
  esac
done
[ "${#failed[@]}" = 0 ] || { echo "not well: ${failed[*]}"; exit 1; }
