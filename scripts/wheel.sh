#!/usr/bin/env bash
# Builds the Python wheel for any Linux with glibc 2.28 or later (Debian 10, RHEL 8), with zig as the
# linker, and checks that its module needs no later symbol. Needs Python and Rust. Further arguments go to maturin.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${XDG_CACHE_HOME:-$HOME/.cache}/cellar-ci/wheel
if [ ! -x "$venv/bin/python-zig" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'maturin>=1.9,<2' 'ziglang>=0.13,<1'
fi
out=${CARGO_TARGET_DIR:-$PWD/target}/wheels
PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv maturin build --release --locked --zig --compatibility manylinux_2_28 \
  --manifest-path python/Cargo.toml --out "$out" "$@"
wheel=$(find "$out" -name 'cellar-*manylinux_2_28*.whl' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2-)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m zipfile -e "$wheel" "$folder"
newest=$(objdump -T "$folder"/cellar/*.so | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
[ "$(printf '%s\nGLIBC_2.28\n' "$newest" | sort -V | tail -1)" = GLIBC_2.28 ] || {
  echo "the module needs $newest, which is later than GLIBC_2.28" >&2
  exit 1
}
echo "$wheel: needs at most $newest"
