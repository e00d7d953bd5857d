#!/usr/bin/env bash
# Checks everything that needs an NVIDIA GPU, with the folder that scripts/gpu-build.sh has built, and
# prints a table for docs/gpu.md. Needs bash and a driver; no Rust, no toolkit. Fails where there is
# no GPU, where a check fails, and where one runs no test.
#
#   gpu-check.sh [PART...]      default: all parts, in this order
#
#   probe      the GPU, a hidden one, the device's own tests
#   kernels    kernels at odd sizes
#   contract   the contract suite in both precisions
#   models-a   whole models: every other test
#   models-b   the others, and the program
#   soak       random operations on memories
#   sanitizer  compute-sanitizer, of the CUDA toolkit, where it is found; named where it is not
#   speed      GEMV and attention next to copies
#
# Each part has BUDGET seconds (540): what has not ended then is stopped and has failed. After each part
# the table so far is in OUT/table.md. Where a check loses the device, nothing else is tried.
#
# FOLDER: what gpu-build.sh built (the folder of this script, or target/gpu-check). OUT: where logs and
# the table go (FOLDER/logs). SOAK_SECONDS: how long random operations go on (180). BACKEND: what the
# program computes with (cuda).
set -uo pipefail
all_parts=(probe kernels contract models-a models-b soak sanitizer speed)
folder=${FOLDER:-$(cd "$(dirname "$0")" && pwd)}
[ -d "$folder/bin" ] || folder=$(cd "$(dirname "$0")/.." && pwd)/target/gpu-check
if [ ! -x "$folder/bin/devices" ]; then
  echo "gpu-check: $folder has no bin/devices; build the folder with scripts/gpu-build.sh" >&2
  exit 1
fi
folder=$(cd "$folder" && pwd)
bin=$folder/bin
[ $# -gt 0 ] || set -- "${all_parts[@]}"
for part; do
  if [[ " ${all_parts[*]} " != *" $part "* ]]; then
    echo "gpu-check: there is no part '$part', but ${all_parts[*]}" >&2
    exit 2
  fi
done
out=${OUT:-$folder/logs}
budget=${BUDGET:-540}
out_of_time="out of time: the part has $budget s (BUDGET)"
export CELLAR_ROOT=$folder CELLAR_REQUIRE_GPU=1 CELLAR_SOAK_SECONDS=${SOAK_SECONDS:-180}
export NO_COLOR=1 RUST_BACKTRACE=1
mkdir -p "$out"
rm -f "$out"/*.log "$out"/*.errors "$out"/*.hidden
table='' rates='' n_failed=0 deadline=0

# The table so far.
report() {
  printf '\n%s\n\n| check | result | seconds | remark |\n| --- | --- | --- | --- |\n%s' "$about" "$table"
  [ -z "$rates" ] || printf '\n| what | rate |\n| --- | --- |\n%s\n' "$rates"
}

# A row of the table: what, verdict, seconds, remark.
row() {
  printf '%-44s %-10s %6s s  %s\n' "$1" "$2" "$3" "$4"
  table+="| $1 | $2 | $3 | $4 |"$'\n'
  [ "$2" != FAILED ] || n_failed=$((n_failed + 1))
}

# Ends here where a log says that the device is gone: whatever follows would fail for that.
stop_if_lost() {
  local lost
  lost=$(grep -ahm 1 'lost its device' "$@" 2>/dev/null) || return 0
  row 'the device' FAILED 0 "it was lost, and nothing else was tried: ${lost//|/ }"
  report | tee "$out/table.md"
  exit 1
}

# Runs a command for as long as the part has, or until it is stopped (124) or killed (137).
within_budget() {
  local left=$((deadline - SECONDS))
  [ "$left" -gt 0 ] || return 124
  timeout --kill-after 10 "$left" "$@"
}

# True for the exit status of a command that was out of time.
is_out_of_time() { [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; }

# Runs a test program: name of the row, file of the log, then the command. It passes where it exits
# with 0 and says that at least one test passed: a program that skips its tests does not.
tests() {
  local what=$1 log=$out/$2.log started=$SECONDS verdict=FAILED passed
  shift 2
  within_budget "$@" >"$log" 2>&1
  local status=$?
  passed=$(sed -n 's/.*test result: ok\. \([0-9]*\) passed.*/\1/p' "$log" | tail -n 1)
  local remark="${passed:-0} passed"
  if [ "$status" -eq 0 ] && [ "${passed:-0}" -gt 0 ]; then
    verdict=ok
  else
    remark="exit status $status; $log"
    is_out_of_time "$status" && remark="$out_of_time; $log"
    grep -aE "^test .* FAILED$|panicked at|^ERROR|ERROR SUMMARY" -A 2 "$log" | head -n 40
  fi
  row "$what" "$verdict" $((SECONDS - started)) "$remark"
  stop_if_lost "$log"
}

# What a machine without a GPU says: a test program must not pass there.
refusal() {
  local reason
  if reason=$(CUDA_VISIBLE_DEVICES='' "$bin/devices" 2>&1); then
    row 'a hidden GPU is refused' FAILED 0 "it says: $reason"
  else
    row 'a hidden GPU is refused' ok 0 "${reason//|/ }"
  fi
}

# Tests of whole models by themselves: fixtures, texts, states, replays, encoders. Every other one, from
# the first on or from the second on.
models() {
  local names name number=$1
  names=$("$bin/models" --list --format terse | sed -n 's/: test$//p' | grep -v random_operations)
  [ -n "$names" ] || row 'whole models' FAILED 0 'bin/models lists no test'
  for name in $names; do
    number=$((number + 1))
    [ $((number % 2)) -eq 1 ] || continue
    tests "models: ${name//_/ }" "models-$name" "$bin/models" --exact "$name" --nocapture
  done
}

# The program tells a story with the model in it, and refuses a GPU that is hidden.
program() {
  local log=$out/program.log started=$SECONDS status remark
  local story=("$bin/cellar" run --backend "${BACKEND:-cuda}" --temp 0 -n 40 'Once upon a time')
  within_budget "${story[@]}" >"$log" 2>"$log.errors"
  status=$?
  if [ "$status" -eq 0 ] && [ -s "$log" ]; then
    row 'the program tells a story' ok $((SECONDS - started)) ''
  else
    remark=$log.errors
    is_out_of_time "$status" && remark="$out_of_time; $log.errors"
    tail -n 5 "$log.errors"
    row 'the program tells a story' FAILED $((SECONDS - started)) "$remark"
    stop_if_lost "$log.errors"
  fi
  CUDA_VISIBLE_DEVICES='' within_budget "${story[@]}" >"$log.hidden" 2>&1
  status=$?
  if [ "$status" -eq 0 ]; then
    row 'the program refuses a hidden GPU' FAILED 0 "$log.hidden"
  elif is_out_of_time "$status"; then
    row 'the program refuses a hidden GPU' FAILED 0 "$out_of_time; $log.hidden"
  else
    row 'the program refuses a hidden GPU' ok 0 "$(tail -n 1 "$log.hidden" | tr '|' ' ')"
  fi
}

sanitizer() {
  local tool=$1 program=$2
  shift 2
  tests "compute-sanitizer $tool, $program" "$tool-$program" "$sanitize" --tool "$tool" \
    --error-exitcode 9 "$bin/$program" --test-threads 1 "$@"
}

run_part() {
  case $1 in
    probe)
      refusal
      tests 'the device' device "$bin/device"
      ;;
    kernels) tests 'kernels at odd sizes' kernels "$bin/kernels" ;;
    contract)
      for precision in precise fast; do
        tests "contract suite, $precision" "contract-$precision" "$bin/contract" "$precision::"
      done
      ;;
    models-a) models 0 ;;
    models-b)
      models 1
      program
      ;;
    soak) tests 'random operations on memories' soak "$bin/models" --exact on_a_gpu::random_operations --nocapture ;;
    sanitizer)
      sanitize=$(PATH=$PATH:/usr/local/cuda/bin:${CUDA_HOME:-/none}/bin command -v compute-sanitizer)
      if [ -n "$sanitize" ]; then
        # Racecheck can be a hundred times slower: a few tests of each kind of kernel.
        sanitizer memcheck kernels
        sanitizer racecheck kernels attend::caps fused:: recurrent::
        sanitizer memcheck contract fast::
      else
        row 'compute-sanitizer' 'not found' 0 'install it with the CUDA toolkit'
      fi
      ;;
    speed)
      tests 'GEMV: at least 70 % of copies' bandwidth "$bin/bandwidth" --nocapture
      rates=$(sed -n 's/.*RATE \(.*\) \([0-9]* GB\/s.*\)$/| \1 | \2 |/p' "$out/bandwidth.log")
      ;;
  esac
}

if ! devices=$("$bin/devices" 2>&1); then
  echo "gpu-check: FAILED, nothing was checked: $devices" >&2
  exit 1
fi
driver=$(sed -n 's/.*Kernel Module *\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
about="$devices; driver ${driver:-unknown}; $(date -u +%F); commit $(cat "$folder/COMMIT")"
printf '%s\n\n' "$about"
for part; do
  deadline=$((SECONDS + budget))
  run_part "$part"
  report >"$out/table.md"
done
cat "$out/table.md"
if [ "$n_failed" -gt 0 ]; then
  printf '\ngpu-check: FAILED, %d of the checks\n' "$n_failed" >&2
  exit 1
fi
printf '\ngpu-check: all good, %d s\n' "$SECONDS"
