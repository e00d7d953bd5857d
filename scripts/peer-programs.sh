#!/usr/bin/env bash
# Runs unmodified programs of llama.cpp (b11434, built with shared libraries) on Cellar's libllama and on their own,
# by turns, and prints what both gave. Ends with 1 where a program fails on Cellar's, or the two differ by more than
# they should (docs/how-to/libllama.md has results).
#
#   scripts/peer-programs.sh BIN MODEL.gguf [bench|perplexity|batched|completion|server|duel|misuse ...]
#
# BIN is the folder with llama-bench, llama-server and so on, and llama.cpp's libllama.so.0. THREADS is the number
# of threads (2), ROUNDS of measurements (3), CALLS of random calls (100000), CHUNKS of text for perplexities (60:
# of few, rounded activations move the result by more than the libraries differ). PYTHON is a Python with
# llama-cpp-python for `duel` (.ci/libllama prepare makes one). LIBRARY is Cellar's library; without, the release
# build of cellar-capi is made. REPACK=0 turns llama.cpp's repacked weights off, whose AMX instructions end programs
# in some virtual machines.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=$(realpath "$1") && model=$(realpath "$2") && shift 2
[ $# -ge 1 ] || set -- bench perplexity batched completion server duel misuse
cd "$(dirname "$0")/.."
threads=${THREADS:-2} rounds=${ROUNDS:-3} calls=${CALLS:-100000} chunks=${CHUNKS:-60}
python=${PYTHON:-${XDG_CACHE_HOME:-$HOME/.cache}/cellar-ci/libllama/bin/python}
stories=models/stories-llama-f16.gguf
target=${CARGO_TARGET_DIR:-target}

library=${LIBRARY:-$target/release/libllama.so}
[ -n "${LIBRARY:-}" ] || cargo build --release --locked --quiet -p cellar-capi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/ours"
cp "$library" "$folder/ours/libllama.so"
ln -s libllama.so "$folder/ours/libllama.so.0"
failed=0
repack=() bench_repack=()
if [ "${REPACK:-1}" = 0 ]; then repack=(--no-repack) bench_repack=(--repack 0); fi

# Runs a program on one of both libraries.
on() {
  local library=$1 program=$2
  shift 2
  case $library in
    ours) LD_LIBRARY_PATH=$folder/ours "$bin/$program" "$@" ;;
    peer) "$bin/$program" "$@" ;;
  esac
}

# Says which library a program loads, so that nothing is compared with itself.
check_loaded() {
  local loaded
  loaded=$(LD_LIBRARY_PATH=$folder/ours ldd "$bin/$1" | sed -n 's/.*libllama.so.0 => \([^ ]*\) .*/\1/p')
  [ "$loaded" = "$folder/ours/libllama.so.0" ] || { echo "$1 loads $loaded" >&2; exit 1; }
}

wrong() {
  printf 'FAILED: %s\n' "$*"
  failed=1
}

# Prints the middle of numbers.
median() { sort -g | awk '{ n[NR] = $1 } END { print n[int((NR + 1) / 2)] }'; }

# True if two numbers differ by no more than a share of the second.
near() { awk -v a="$1" -v b="$2" -v s="$3" 'BEGIN { d = a - b; exit !((d < 0 ? -d : d) <= s * b) }'; }

bench() {
  local library
  for ((round = 0; round < rounds; round++)); do
    for library in ours peer; do
      on $library llama-bench -m "$model" -t "$threads" "${bench_repack[@]}" -p 512 -n 64 -r 2 -o csv 2> "$folder/log" |
        python3 -c '
import csv, sys
for row in csv.DictReader(sys.stdin):
    kind = "generation" if int(row["n_gen"]) else "prompt"
    print(kind, row["avg_ts"])' > "$folder/bench" || wrong "llama-bench on $library: $(tail -n 3 "$folder/log")"
      for kind in prompt generation; do
        sed -n "s/^$kind //p" "$folder/bench" >> "$folder/$kind-$library"
      done
    done
    if [ -x "$target/release/cellar" ]; then
      "$target/release/cellar" bench "$model" -p 512 -n 64 -r 2 --threads "$threads" > "$folder/cellar-bench-$round" 2>&1
    fi
  done
  for kind in prompt generation; do
    printf 'bench: %s: %.1f tokens a second on Cellar, %.1f on llama.cpp\n' $kind \
      "$(median < "$folder/$kind-ours")" "$(median < "$folder/$kind-peer")"
  done
  cat "$folder"/cellar-bench-* 2> /dev/null || true
}

perplexity() {
  local library ours peer
  find docs README.md -name '*.md' -print0 | sort -z | xargs -0 cat > "$folder/text"
  for library in ours peer; do
    on $library llama-perplexity -m "$model" -f "$folder/text" -c 512 --chunks "$chunks" -t "$threads" "${repack[@]}" > "$folder/ppl-$library" 2>&1 ||
      wrong "llama-perplexity on $library: $(tail -n 3 "$folder/ppl-$library")"
  done
  ours=$(sed -n 's/.*PPL = \([0-9.]*\).*/\1/p' "$folder/ppl-ours")
  peer=$(sed -n 's/.*PPL = \([0-9.]*\).*/\1/p' "$folder/ppl-peer")
  printf 'perplexity: %s on Cellar, %s on llama.cpp\n' "$ours" "$peer"
  near "${ours:-0}" "${peer:-1}" 0.002 || wrong 'they differ by more than 0.2 %'
}

batched() {
  local library
  for library in ours peer; do
    on $library llama-batched-bench -m "$model" -c 4096 -b 512 -npp 64 -ntg 32 -npl 1,4,16 -t "$threads" "${repack[@]}" \
      > "$folder/batched" 2> "$folder/log" || wrong "llama-batched-bench on $library: $(tail -n 3 "$folder/log")"
    printf 'batched, %s (PP, TG, B, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s, T s, S t/s):\n' $library
    grep '^| *[0-9]' "$folder/batched" || wrong 'no rows'
  done
}

# Greedy text of llama-completion from the small model, without the line breaks in the end.
complete() {
  local library=$1 text
  shift
  text=$(on "$library" llama-completion -m $stories -t "$threads" --temp 0 --ignore-eos -no-cnv --no-display-prompt "$@" \
    2> "$folder/log") || wrong "llama-completion on $library: $(tail -n 3 "$folder/log")"
  printf '%s' "$text"
}

# True if the shorter of two texts, of at least so many bytes, begins the longer.
begins() {
  local n
  n=$(wc -c "$2" "$3" | awk 'NR < 3 { print $1 }' | sort -n | head -n 1)
  [ "$n" -ge "$1" ] && cmp -s -n "$n" "$2" "$3"
}

completion() {
  local prompt='Once upon a time there was a little dog' library first
  for library in ours peer; do
    complete $library -p "$prompt" -n 48 -c 256 > "$folder/text-$library"
    complete $library -p "$prompt" -n 300 -c 128 --keep 8 --context-shift > "$folder/shifted-$library"
    printf 'completion: %s: %d bytes, with context shift %d\n' $library \
      "$(wc -c < "$folder/text-$library")" "$(wc -c < "$folder/shifted-$library")"
  done
  begins 150 "$folder/text-ours" "$folder/text-peer" || wrong 'greedy texts differ'
  [ "$(wc -c < "$folder/shifted-ours")" -gt 600 ] || wrong 'the text ends where the context does'
  first=$(cmp "$folder/shifted-ours" "$folder/shifted-peer" | sed 's/.*byte \([0-9]*\),.*/\1/') || true
  printf 'completion: shifted texts are the same %s\n' "${first:+up to byte $first}"
  # A state file: saved by one run, continued by the next, and one of llama.cpp's continued by Cellar.
  for library in ours peer; do
    complete $library -p "$prompt" -n 8 -c 256 --prompt-cache "$folder/$library.state" --prompt-cache-all > /dev/null
  done
  for library in ours peer; do
    cp "$folder/$library.state" "$folder/copy.state"
    complete ours -p "$prompt" -n 24 -c 256 --prompt-cache "$folder/copy.state" > "$folder/continued"
    grep -q 'session file' "$folder/log" || wrong "the state file of $library is not used"
    grep -i 'session file' "$folder/log" | tail -n 1 | sed "s/^/completion: state of $library: /"
    begins 80 "$folder/continued" "$folder/text-ours" ||
      wrong "the text goes on otherwise from the state file of $library"
  done
}

server() {
  local library port pid
  local -A environment=([ours]=LD_LIBRARY_PATH=$folder/ours [peer]=LD_LIBRARY_PATH=$bin)
  for library in ours peer; do
    port=$((20000 + RANDOM % 20000))
    mkdir -p "$folder/slots-$library"
    # Not in a function: it is this process that is ended.
    env "${environment[$library]}" "$bin/llama-server" -m "$model" -c 8192 -np 8 -t "$threads" --port $port \
      --slot-save-path "$folder/slots-$library" --cache-reuse 16 --no-webui "${repack[@]}" > "$folder/server-$library" 2>&1 &
    pid=$!
    python3 crates/capi/tests/python/server.py http://127.0.0.1:$port | sed "s/^/server: $library: /" ||
      wrong "llama-server on $library: $(tail -n 5 "$folder/server-$library")"
    kill $pid
    wait $pid 2> /dev/null || true
  done
}

duel() {
  local kind file
  for kind in shared streams state; do
    file=$stories
    [ $kind != state ] || file=tests/fixtures/stories/stories-mamba-f16.gguf
    "$python" crates/capi/tests/python/duel.py "$folder/ours/libllama.so" "$bin/libllama.so" $file $kind "$calls" 1 0.05 ||
      wrong "random calls, $kind"
  done
}

misuse() {
  CAPI_CALLS=$calls cargo test --workspace --locked --quiet --lib -- random:: || wrong 'bad arguments'
}

for part in "$@"; do
  case $part in
    bench | perplexity | completion | server) check_loaded "llama-$part" ;;
    batched) check_loaded llama-batched-bench ;;
    duel | misuse) ;;
    *) echo "peer-programs.sh: there is no part '$part'" >&2; exit 2 ;;
  esac
  $part
done
exit $failed
