#!/usr/bin/env bash
# Checks the backend `metal` on a Mac with Apple silicon and Rust: builds everything, runs the tests of
# the device, of the kernels, the contract suite and whole models on the GPU, and prints a report to
# paste into an issue. Exits with 1 where anything fails or there is no GPU.
#
# Logs are in target/metal-check. CELLAR_SOAK_SECONDS: how long random operations go on (60).
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -s)" != Darwin ]; then
  echo 'metal-check: this is not macOS: only macOS has Metal' >&2
  exit 1
fi
export CELLAR_REQUIRE_GPU=1 CELLAR_SOAK_SECONDS=${CELLAR_SOAK_SECONDS:-60}
export CARGO_TERM_COLOR=never NO_COLOR=1 RUST_BACKTRACE=1
logs=target/metal-check
mkdir -p "$logs"
rm -f "$logs"/*.log
table='' details='' n_failed=0

# A row of the table: runs a command; with `tests`, at least one test must have passed.
check() {
  local what=$1 name=$2 kind=$3 started=$SECONDS verdict=ok passed='' status
  shift 3
  printf 'metal-check: %s\n' "$what" >&2
  "$@" >"$logs/$name.log" 2>&1
  status=$?
  if [ "$kind" = tests ]; then
    passed=$(sed -n 's/.*test result: [a-zA-Z]*\. \([0-9]*\) passed; \([0-9]*\) failed.*/\1 passed, \2 failed/p' \
      "$logs/$name.log" | tail -n 1)
    case $passed in '' | '0 passed'*) status=1 ;; esac
  fi
  if [ "$status" -ne 0 ]; then
    verdict=FAILED
    n_failed=$((n_failed + 1))
    details+=$'\n'"### $what"$'\n\n```text\n'
    details+=$(grep -aE '^error|panicked at|^test .* FAILED$|metal backend|\.(k|h):[0-9]+:' -A 3 "$logs/$name.log" |
      head -n 40 || true)
    details+=$'\n```\n'
  fi
  table+="| $what | $verdict | $passed | $((SECONDS - started)) s |"$'\n'
}

check 'the program builds' build command cargo build --release --locked
check 'devices' devices command target/release/cellar devices
check 'the device' device tests cargo test --locked -p cellar-kv-metal --test device
check 'kernels at odd sizes' kernels tests cargo test --locked -p cellar-kv-metal --test kernels
for precision in precise fast; do
  check "contract suite, $precision" "contract-$precision" tests \
    cargo test --locked -p cellar-kv-metal --test contract "$precision::"
done
check 'whole models' models tests cargo test --locked -p model-tests --test metal
check 'the program tells a story' story command \
  target/release/cellar run --backend metal --temp 0 -n 40 'Once upon a time'

printf '\n## metal-check\n\n%s, macOS %s, %s, commit %s, %s\n\n' \
  "$(sysctl -n machdep.cpu.brand_string)" "$(sw_vers -productVersion)" "$(rustc --version)" \
  "$(git rev-parse --short HEAD)" "$(date -u +%F)"
printf '```text\n%s\n```\n' "$(cat "$logs/devices.log")"
printf '\n| check | result | tests | time |\n| --- | --- | --- | --- |\n%s%s' "$table" "$details"
if [ "$n_failed" -gt 0 ]; then
  printf '\n%d of the checks FAILED; logs are in %s\n' "$n_failed" "$logs"
  exit 1
fi
printf '\nall good\n'
