#!/usr/bin/env bash
# Checks everything that needs an NVIDIA GPU, with the folder that scripts/gpu-build.sh has built, and
# prints a table for docs/gpu.md. Needs bash and a driver; no Rust, no toolkit. Fails where there is
# no GPU, where a check fails, and where one runs no test.
#
#   gpu-check.sh [FOLDER]      default: the folder of this script, or target/gpu-check
#
# SOAK_SECONDS: how long random operations on memories go on (180). Logs are in FOLDER/logs.
# compute-sanitizer, of the CUDA toolkit, is used where it is found, and named where it is not.
set -uo pipefail
folder=${1:-$(cd "$(dirname "$0")" && pwd)}
[ -d "$folder/bin" ] || folder=$(cd "$(dirname "$0")/.." && pwd)/target/gpu-check
if [ ! -x "$folder/bin/devices" ]; then
  echo "gpu-check: $folder has no bin/devices; build the folder with scripts/gpu-build.sh" >&2
  exit 1
fi
folder=$(cd "$folder" && pwd)
bin=$folder/bin
export CELLAR_ROOT=$folder CELLAR_REQUIRE_GPU=1 CELLAR_SOAK_SECONDS=${SOAK_SECONDS:-180}
export NO_COLOR=1 RUST_BACKTRACE=1
rm -rf "$folder/logs"
mkdir "$folder/logs"
table='' n_failed=0

# A row of the table: what, verdict, seconds, remark.
row() {
  printf '%-44s %-10s %6s s  %s\n' "$1" "$2" "$3" "$4"
  table+="| $1 | $2 | $3 | $4 |"$'\n'
  [ "$2" != FAILED ] || n_failed=$((n_failed + 1))
}

# Runs a test program: name of the row, file of the log, then the command. It passes where it exits
# with 0 and says that at least one test passed: a program that skips its tests does not.
tests() {
  local what=$1 log=$folder/logs/$2.log started=$SECONDS verdict=FAILED passed
  shift 2
  "$@" >"$log" 2>&1
  local status=$?
  passed=$(sed -n 's/.*test result: ok\. \([0-9]*\) passed.*/\1/p' "$log" | tail -n 1)
  local remark="${passed:-0} passed"
  if [ "$status" -eq 0 ] && [ "${passed:-0}" -gt 0 ]; then
    verdict=ok
  else
    remark="exit status $status; $log"
    grep -aE "^test .* FAILED$|panicked at|^ERROR|ERROR SUMMARY" -A 2 "$log" | head -n 40
  fi
  row "$what" "$verdict" $((SECONDS - started)) "$remark"
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

# The program tells a story with the model in it, and refuses a GPU that is hidden.
program() {
  local log=$folder/logs/program.log started=$SECONDS
  local story=("$bin/cellar" run --backend cuda --temp 0 -n 40 'Once upon a time')
  if "${story[@]}" >"$log" 2>"$log.errors" && [ -s "$log" ]; then
    row 'the program tells a story' ok $((SECONDS - started)) ''
  else
    tail -n 5 "$log.errors"
    row 'the program tells a story' FAILED $((SECONDS - started)) "$log.errors"
  fi
  if CUDA_VISIBLE_DEVICES='' "${story[@]}" >"$log.hidden" 2>&1; then
    row 'the program refuses a hidden GPU' FAILED 0 "$log.hidden"
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

if ! devices=$("$bin/devices" 2>&1); then
  echo "gpu-check: FAILED, nothing was checked: $devices" >&2
  exit 1
fi
driver=$(sed -n 's/.*Kernel Module *\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
about="$devices; driver ${driver:-unknown}; $(date -u +%F); commit $(cat "$folder/COMMIT")"
printf '%s\n\n' "$about"

refusal
tests 'the device' device "$bin/device"
tests 'kernels at odd sizes' kernels "$bin/kernels"
for precision in precise fast; do
  tests "contract suite, $precision" "contract-$precision" "$bin/contract" "$precision::"
done
# Every test by itself: fixtures, texts, states, replays, encoders, random operations.
names=$("$bin/models" --list --format terse | sed -n 's/: test$//p')
[ -n "$names" ] || row 'whole models' FAILED 0 'bin/models lists no test'
for name in $names; do
  tests "models: ${name//_/ }" "models-$name" "$bin/models" --exact "$name" --nocapture
done
sanitize=$(PATH=$PATH:/usr/local/cuda/bin:${CUDA_HOME:-/none}/bin command -v compute-sanitizer)
if [ -n "$sanitize" ]; then
  sanitizer memcheck kernels
  sanitizer racecheck kernels
  sanitizer memcheck contract fast::
else
  row 'compute-sanitizer' 'not found' 0 'install it with the CUDA toolkit'
fi
program
tests 'GEMV: at least 70 % of copies' bandwidth "$bin/bandwidth" --nocapture
rates=$(sed -n 's/.*RATE \(.*\) \([0-9]* GB\/s.*\)$/| \1 | \2 |/p' "$folder/logs/bandwidth.log")

printf '\n%s\n\n| check | result | seconds | remark |\n| --- | --- | --- | --- |\n%s' "$about" "$table"
[ -z "$rates" ] || printf '\n| what | rate |\n| --- | --- |\n%s\n' "$rates"
if [ "$n_failed" -gt 0 ]; then
  printf '\ngpu-check: FAILED, %d of the checks\n' "$n_failed" >&2
  exit 1
fi
printf '\ngpu-check: all good, %d s\n' "$SECONDS"
