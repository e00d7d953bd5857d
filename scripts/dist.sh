#!/usr/bin/env bash
# Builds a tarball of the program for each CPU architecture: a static binary (musl), licences, shell
# completions and manual pages; another of the library with llama.cpp's C API; and SHA256SUMS over all
# tarballs. The same commit gives the same bytes.
#
#   scripts/dist.sh [TARGET…]      default: x86_64 and aarch64 Linux, where they can be built
#
# Where a musl target cannot be installed, the architecture's glibc target takes its place, and
# GLIBC.txt in the tarball names the glibc that it needs. Shared libraries are always for glibc.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-dist}
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
commit=${CELLAR_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export CELLAR_COMMIT=$commit SOURCE_DATE_EPOCH=$epoch CARGO_TERM_COLOR=never
# Paths of this machine have no place in a binary.
rustflags="--remap-path-prefix=$PWD=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
host=$(rustc -vV | sed -n 's/^host: //p')
built=() skipped=()

# Prints the C compiler for a target; ring has C sources.
c_compiler() {
  local arch=${1%%-*} name
  for name in "$arch-linux-musl-gcc" "$arch-linux-gnu-gcc"; do
    if command -v "$name"; then return; fi
  done
  [ "$arch" = "${host%%-*}" ] && command -v cc
}

# Prints the program that links for a target.
linker() {
  local arch=${1%%-*}
  if [ "$arch" = "${host%%-*}" ]; then echo cc; else echo "$arch-linux-gnu-gcc"; fi
}

# Copies the licence files of every crate that is compiled into a package for a target.
third_party() {
  local crate licence dir file
  printf "Rust's standard library is MIT OR Apache-2.0; the C library musl is MIT.\n"
  cargo tree -p "$2" --target "$1" -e normal --prefix none --locked -f '{p}|{l}' |
    sed 's/ (\*)$//; s/ (.*)|/|/; s/ v/-/' | sort -u | while IFS='|' read -r crate licence; do
    for dir in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"$crate"; do
      [ -d "$dir" ] || continue
      printf '\n==== %s (%s)\n' "$crate" "$licence"
      find "$dir" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' \) |
        sort | while IFS= read -r file; do
        printf '\n---- %s\n\n' "${file##*/}"
        cat "$file"
      done
      break
    done
  done
}

# Makes a target ready to be compiled for.
prepare() {
  local target=$1 compiler variable
  if ! rustup target add "$target" >/dev/null 2>&1; then
    skipped+=("$target: its standard library can be neither found nor installed")
    return 1
  fi
  if ! compiler=$(c_compiler "$target"); then
    skipped+=("$target: no C compiler (install gcc-${target%%-*}-linux-gnu or musl-tools)")
    return 1
  fi
  variable=$(tr 'a-z-' 'A-Z_' <<<"$target")
  export "CC_${target//-/_}=$compiler" "CFLAGS_${target//-/_}=-O2 -U_FORTIFY_SOURCE"
  # musl's compiler wrapper links static position-independent programs with the wrong start files, and
  # they crash; Rust brings its own, for which any linker of the architecture does.
  export "CARGO_TARGET_${variable}_LINKER=$(linker "$target")"
  export "CARGO_TARGET_${variable}_RUSTFLAGS=$rustflags"
  printf '== %s (%s)\n' "$target" "$compiler"
}

# Compiles a package for a target.
compile() {
  if ! cargo build --release --locked -p "$2" --target "$1"; then
    skipped+=("$1: $2 does not compile here")
    return 1
  fi
}

# Says which glibc a file of a folder needs.
name_glibc() {
  printf '%s needs glibc %s or newer.\n' "$2" \
    "$(grep -aoE 'GLIBC_2\.[0-9]+' "$1/$2" | sort -uV | tail -n 1 | cut -d_ -f2)" >"$1/GLIBC.txt"
}

# Makes the tarball of a folder.
pack() {
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" \
    --mode=u+rw,go+r,go-w -C "$out" "$1" | gzip -n9 >"$out/$1.tar.gz"
  built+=("$1.tar.gz")
}

build() {
  local target=$1 name stage shell
  prepare "$target" && compile "$target" cellar-cli || return 1

  name=cellar-$version-$target
  stage=$out/$name
  rm -rf "$stage"
  mkdir -p "$stage/completions" "$stage/man"
  cp LICENSE-APACHE LICENSE-MIT README.md CHANGELOG.md "$stage/"
  cp models/README.md "$stage/MODEL-CARD.md"
  cp "${CARGO_TARGET_DIR:-target}/$target/release/cellar" "$stage/cellar"
  strip_binary "$target" "$stage/cellar"
  third_party "$target" cellar-cli >"$stage/THIRD-PARTY.txt"
  # A binary for another architecture may not run here; the command line is the same.
  if "$stage/cellar" --version >/dev/null 2>&1; then runs=$PWD/$stage/cellar; fi
  if [ -z "${runs:-}" ]; then
    skipped+=("$target: no binary that runs here could write completions and manual pages")
    return 1
  fi
  for shell in bash zsh fish; do "$runs" completions "$shell" >"$stage/completions/cellar.$shell"; done
  "$runs" man "$stage/man"
  case $target in
    *-gnu) name_glibc "$stage" cellar ;;
  esac
  pack "$name"
}

# The library: a folder of its own, so that it takes the place of llama.cpp's only for programs that name it.
library() {
  local target=${1%-musl}
  target=${target%-gnu}-gnu
  local name=libllama-$version-$target
  local stage=$out/$name
  prepare "$target" && compile "$target" cellar-capi || return 1
  rm -rf "$stage"
  mkdir -p "$stage/lib/pkgconfig"
  cp LICENSE-APACHE LICENSE-MIT docs/how-to/libllama.md "$stage/"
  cp "${CARGO_TARGET_DIR:-target}/$target/release/libllama.so" "$stage/lib/libllama.so.0"
  ln -s libllama.so.0 "$stage/lib/libllama.so"
  strip_binary "$target" "$stage/lib/libllama.so.0"
  name_glibc "$stage" lib/libllama.so.0
  third_party "$target" cellar-capi >"$stage/THIRD-PARTY.txt"
  cat >"$stage/lib/pkgconfig/llama.pc" <<PC
libdir=\${pcfiledir}/..

Name: llama
Description: llama.cpp's C API (b11434) over Cellar; llama.h is llama.cpp's own
Version: $version
Libs: -L\${libdir} -lllama
PC
  pack "$name"
}

strip_binary() {
  local strip=strip
  command -v "${1%%-*}-linux-gnu-strip" >/dev/null && strip=${1%%-*}-linux-gnu-strip
  "$strip" "$2" 2>/dev/null || printf '   %s is not stripped\n' "$2"
}

mkdir -p "$out"
if [ $# -gt 0 ]; then
  for target in "$@"; do
    build "$target" || true
    library "$target" || true
  done
else
  # The host's architecture first: its binary writes completions and manual pages for all.
  for arch in $(printf '%s\n' "${host%%-*}" x86_64 aarch64 | awk '!seen[$0]++'); do
    build "$arch-unknown-linux-musl" || build "$arch-unknown-linux-gnu" || true
    library "$arch-unknown-linux-gnu" || true
  done
fi
for reason in "${skipped[@]}"; do printf 'not built: %s\n' "$reason" >&2; done
[ ${#built[@]} -gt 0 ] || exit 1
(cd "$out" && sha256sum "${built[@]}" >SHA256SUMS && cat SHA256SUMS)
