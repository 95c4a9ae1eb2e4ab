#!/usr/bin/env bash
# Runs compute-sanitizer over jax_ep's kernels. First it runs synccheck, racecheck and memcheck on the
# program of benchmarks/calls/window_kernels.py, without JAX, in all formats, and synccheck and memcheck
# on that of benchmarks/limits/few_rows.py. Then it runs memcheck over tests, side by side with a process
# per file. Needs the tool, GPUs and the tests' packages; ends within LIMIT_S (default 600).
#
# The programs are built, unless KERNELS, WAITING and MATMULS name them. WAITING is that of
# window_kernels built with -DJAX_EP_ARRIVE_WAITS.
#
#   tools/sanitize.sh [python]
#
# racecheck and synccheck run launches one after the other, so they get a group of one rank, which
# waits for no other rank's kernel. If warps use bar.arrive, or some wait at another barrier
# meanwhile, racecheck reports races between accesses that a barrier orders, even across a
# __syncthreads. So it gets a program whose warps wait where they need only arrive, and no formats
# with helper warps, and no matmuls, whose warps are ordered by mbarriers and __syncwarp. For those,
# tests/emulator/races.cmake looks for races without a GPU.
#
# The last lines are the summary. Exits 0 if all runs are clean.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
limit=${LIMIT_S:-600}
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$tool" ] || { echo "no compute-sanitizer on PATH or in /usr/local/cuda/bin"; exit 2; }
logs=$(mktemp -d)
present=$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)
visible=${CUDA_VISIBLE_DEVICES:-$present}
one=${visible%%,*}
two=$(cut -d, -f1-2 <<<"$visible")

# Newer versions of the tool call the filter --kernel-name, and may refuse the old name.
filter=--kernel-regex
"$tool" --help | grep -q -- '--kernel-name ' && filter=--kernel-name

# Turns graphs off: the tool cannot tell launches inside a graph apart by kernel.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer="
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_EP_TEST_TRANSPORT=p2p

# sanitized NAME SECONDS GPUS TOOL PASSED COMMAND...: the log of a good run matches PASSED.
sanitized() {
  local name=$1 seconds=$2 gpus=$3 kind=$4 passed=$5
  shift 5
  local log=$logs/$name.log
  echo "$name" >>"$logs/names"
  echo "== $name: $kind on GPUs $gpus, at most $seconds s"
  CUDA_VISIBLE_DEVICES=$gpus timeout --kill-after=10 "$seconds" "$tool" --tool "$kind" \
    "$filter" kns=jax_ep --report-api-errors no --target-processes "${processes:-application-only}" \
    --error-exitcode 7 --print-limit 20 "$@" >"$log" 2>&1
  local status=$?
  local found tests verdict=clean
  found=$(grep -hE '(ERROR|RACECHECK) SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')
  tests=$(grep -hE '[0-9]+ (passed|failed|skipped|deselected)|^checked' "$log" | tail -n 1)
  [ -n "$tests" ] || tests=$(grep -hoE "$passed" "$log" | tail -n 1)
  if grep -q 'Device not supported' "$log"; then
    verdict="NOT RUN: the tool does not support this machine's device"
  elif [ "$status" = 124 ] || [ "$status" = 137 ]; then
    verdict="OUT OF TIME after $seconds s"
  elif [ "$status" != 0 ]; then
    verdict="NOT CLEAN, exit status $status"
  elif ! grep -qE '(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log" ||
    ! grep -qE "$passed" "$log"; then
    verdict="NOT RUN: no summary or no test"
  fi
  [ "$verdict" = clean ] || { grep -E '^=====|Error|error' "$log" | head -n 40; tail -n 15 "$log"; }
  echo "$name: $verdict; ${found:-no summary}; ${tests:-no test ended}" >"$log.summary"
}
# tests NAME SECONDS GPUS EXPRESSION FILE...: runs memcheck over some tests, with a process per file, in
# the background.
tests() {
  local file
  for file in "${@:5}"; do
    sanitized "memcheck-$1-$(basename "$file" .py)" "$2" "$3" memcheck '[0-9]+ passed' \
      "$python" -m pytest -q -x -p no:cacheprovider "$file" -k "$4" &
  done
}
# kernels NAME SECONDS GPUS TOOL FORMATS [option]...: runs a tool on the kernels' program, with a process
# per format, all at once.
kernels() {
  local format
  for format in $5; do
    sanitized "$1-$format" "${@:2:3}" '^checked .*right' "$program" --kinds none \
      --experts 12 --top-k 3 --hidden 512 --format "$format" "${@:6}" &
  done
  wait
}

share=$((limit / 34))
formats="bf16 fp8_block128 mxfp8 mxfp4 nvfp4"
program=${KERNELS:-$logs/window_kernels}
waiting=${WAITING:-$logs/window_kernels_waiting}
matmuls=${MATMULS:-$logs/few_rows}
builds=()
# build PROGRAM MODULE [option]...: in the background, unless the program is there.
build() {
  [ -x "$1" ] && return
  "$python" -m "$2" --keep "$1" "${@:3}" &
  builds+=($!)
}
build "$program" benchmarks.calls.window_kernels --nvcc=-lineinfo
build "$waiting" benchmarks.calls.window_kernels --nvcc=-lineinfo --nvcc=-DJAX_EP_ARRIVE_WAITS
build "$matmuls" benchmarks.limits.few_rows
for each in "${builds[@]}"; do wait "$each" || exit 2; done
# Calls that route in one part and in many, low latency and not, and along a known route.
kernels synccheck $((share * 3)) "$one" synccheck "$formats" --quantized --tokens 3,40,300,600
program=$waiting kernels racecheck $((share * 3)) "$one" racecheck bf16 --tokens 3,40,300,600 \
  --timeout-s 60
program=$waiting kernels racecheck-halves $((share * 3)) "$one" racecheck bf16 --halves \
  --tokens 40,300 --timeout-s 60
kernels memcheck $((share * 4)) "$two" memcheck "$formats" --quantized --tokens 3,40,300,600
kernels memcheck-halves $((share * 3)) "$two" memcheck "$formats" --quantized --halves --tokens 40,300
for kind in synccheck memcheck; do
  sanitized "$kind-matmuls" $((share * 4)) "$one" "$kind" '"different": 0' "$matmuls" --rows 16 \
    --seconds 0.001 &
done
wait

# Tests of the transport that drop rows, align and cut groups, and have the smallest and odd row sizes.
files=(tests/api/test_{dispatch,combine}.py tests/autodiff/test_vjp.py tests/transports/test_p2p.py)
# A few cases each of all kinds of matmuls.
matmul_files=(tests/layers/test_{hopper_experts,fp8_kernels}.py)
# A few tests each of formats, options and calls in halves; and tampered routes, in a process that the
# test starts and where slow calls may take longer.
more=(tests/transports/test_p2p_{formats,options,split}.py)
some='nvfp4 or shared_source or same_gradients'
corners='ranks1 or ranks2 or top32 or one_expert or alignment5 or aligned_cut or cut_aligned or
  duplicates or hidden8 or hidden2056 or float32_hidden4 or routings_cut or capacity1'
corners="($(tr -s '\n ' ' ' <<<"$corners")) and not any_routing"
if [ "$two" != "$one" ]; then
  processes=all JAX_EP_TEST_TIMEOUT_S=3 tests tampered $((share * 3)) "$two" p2p_survives \
    tests/api/test_tampered.py
  wait
fi
# Never 0, which would mean no limit.
left=$((limit - SECONDS - 20 > 30 ? limit - SECONDS - 20 : 30))
if [ "$two" != "$one" ]; then
  tests two "$left" "$two" "$corners" "${files[@]}"
  tests two "$left" "$two" "$some" "${more[@]}"
fi
# XLA's pool would hide accesses past the end of a buffer, so every buffer is an allocation of its own.
# Not on two GPUs: there, freeing one may wait for a kernel that waits for the other GPU.
XLA_PYTHON_CLIENT_ALLOCATOR=platform tests one "$left" "$one" "$corners" "${files[@]}"
XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTEST_ADDOPTS='--cases 2' \
  tests one "$left" "$one" 'not lowered' "${matmul_files[@]}"
wait

echo "== summary (logs in $logs)"
mapfile -t summary < <(while read -r name; do cat "$logs/$name.log.summary"; done <"$logs/names")
printf '%s\n' "${summary[@]}"
worst=0
for line in "${summary[@]}"; do [[ $line == *": clean;"* ]] || worst=1; done
exit "$worst"
