#!/usr/bin/env bash
# Builds a folder that scripts/gpu-check.sh runs on a machine with an NVIDIA GPU and neither Rust nor
# this repository: stripped test programs, the program `cellar`, fixtures, and the script itself.
#
#   scripts/gpu-build.sh [FOLDER]      default: target/gpu-check
#
# Beside it, FOLDER.tar.xz holds the folder, for machines that are reached by an upload of a bounded size:
# it fails above 24 MB.
# Tests are built with the profile `dev`, whose overflow checks and debug assertions stay on; the
# program with PROFILE (default: release). Needs the glibc of the other machine or an older one.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/gpu-check}
profile=${PROFILE:-release}
export CARGO_TERM_COLOR=never

# Builds one executable and copies it, without its symbols: NAME, then arguments of cargo.
binary() {
  local name=$1 built
  shift
  # The last line with an executable is the one that was asked for.
  built=$(cargo "$@" --locked --message-format json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
  [ -n "$built" ] || { printf 'gpu-build: cargo built no %s\n' "$name" >&2; exit 1; }
  strip -o "$folder/bin/$name" "$built"
}

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/tests"
binary devices build -p cellar-kv-cuda --example devices
for test in device kernels contract bandwidth; do
  binary "$test" test -p cellar-kv-cuda --test "$test" --no-run
done
binary models test -p model-tests --test cuda --no-run
binary cellar build -p cellar-cli --profile "$profile"
cp -r tests/fixtures "$folder/tests/"
cp -r models "$folder/"
cp scripts/gpu-check.sh "$folder/"
changed=$(git diff --quiet HEAD 2>/dev/null || echo ', changed')
printf '%s%s\n' "$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)" "$changed" \
  >"$folder/COMMIT"
tar -C "$(dirname "$folder")" --sort=name --owner=0 --group=0 -cf - "$(basename "$folder")" | xz -9e -T1 >"$folder.tar.xz"
bytes=$(wc -c <"$folder.tar.xz")
printf '%s: %s; %s.tar.xz: %d bytes\n' "$folder" "$(du -sh "$folder" | cut -f 1)" "$folder" "$bytes"
[ "$bytes" -le 24000000 ] || { printf 'gpu-build: the archive is larger than 24,000,000 bytes\n' >&2; exit 1; }
printf 'On the machine with the GPU: tar xf %s.tar.xz; %s/gpu-check.sh\n' "$(basename "$folder")" "$(basename "$folder")"
