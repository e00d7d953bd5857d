#!/usr/bin/env bash
# Runs unmodified coding agents (npm) on `cellar serve` with a real model: a first answer, then in the same
# conversation a call of a tool that reads a file. Prints a table, and ends with 1 where an agent fails: its
# first answer does, a request is refused, no tool is called, or the second turn reuses less than 0.95 of the
# first turn's prompt.
#
#   scripts/agents.sh MODEL.gguf [claude|codex|opencode|qwen ...]
#
# Needs Node.js with npm, and 32,768 tokens of context: the agents' prompts have 6,000 to 19,000. The packages go to
# $CELLAR_AGENTS (~/.cache/cellar-ci/agents), all that agents write to a temporary folder, which is also their
# HOME. CELLAR names the program (target/release/cellar), TURN_SECONDS the most that a turn may take (1800),
# KEEP=1 keeps the temporary folder, with the server's log and what the agents printed.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.." && root=$PWD && cd - > /dev/null
model=$(realpath "$1") && shift
[ $# -ge 1 ] || set -- claude codex opencode qwen
cellar=$(realpath "${CELLAR:-$root/target/release/cellar}")
cache=${CELLAR_AGENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/cellar-ci/agents}
limit=${TURN_SECONDS:-1800}
declare -A packages=([claude]=@anthropic-ai/claude-code [codex]=@openai/codex [opencode]=opencode-ai
  [qwen]=@qwen-code/qwen-code)

wanted=()
for agent in "$@"; do
  [ -n "${packages[$agent]:-}" ] || { echo "agents.sh: '$agent' is none of: ${!packages[*]}" >&2; exit 2; }
  [ -e "$cache/node_modules/.bin/$agent" ] || wanted+=("${packages[$agent]}")
done
mkdir -p "$cache"
[ ${#wanted[@]} -eq 0 ] || npm install --prefix "$cache" --no-audit --no-fund --loglevel error "${wanted[@]}"

folder=$(mktemp -d)
server=
trap 'stop; [ -n "${KEEP:-}" ] || rm -rf "$folder"' EXIT
stop() { [ -z "$server" ] || { kill "$server" 2> /dev/null; wait "$server" || true; server=; }; }

# A server for each agent, so that none finds the memory full of another one's prompts.
start() {
  log=$folder/serve-$1.log
  # Greedy where an agent sends no temperature: small models call tools more surely then.
  "$cellar" serve "$model" --alias local --port 0 --parallel 1 -c 32768 --temp 0 2> "$log" &
  server=$!
  until url=$(grep -o -m 1 'http://[0-9.:]*' "$log"); do
    kill -0 "$server" 2> /dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.2
  done
}

# The settings of each agent: docs/how-to/agents.md explains them.
configure() {
  case $1 in
  claude) export ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=local \
    ANTHROPIC_DEFAULT_HAIKU_MODEL=local API_TIMEOUT_MS=3600000 CLAUDE_CODE_MAX_OUTPUT_TOKENS=1000 \
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1 IS_SANDBOX=1 ;;
  codex)
    mkdir -p .codex && cat > .codex/config.toml << CONFIG ;;
model = "local"
model_provider = "cellar"
model_context_window = 32768
[model_providers.cellar]
name = "Cellar"
base_url = "$url/v1"
wire_api = "responses"
CONFIG
  opencode)
    export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
    cat > work/opencode.json << CONFIG ;;
{"model": "cellar/local", "small_model": "cellar/local", "share": "disabled", "permission": "allow",
 "provider": {"cellar": {"npm": "@ai-sdk/openai-compatible", "name": "Cellar",
   "options": {"baseURL": "$url/v1", "apiKey": "none", "timeout": 3600000},
   "models": {"local": {"tool_call": true, "limit": {"context": 32768, "output": 1000}}}}}}
CONFIG
  qwen)
    export OPENAI_BASE_URL=$url/v1 OPENAI_API_KEY=none OPENAI_MODEL=local
    mkdir -p .qwen && cat > .qwen/settings.json << CONFIG ;;
{"security": {"auth": {"selectedType": "openai"}}, "general": {"disableAutoUpdate": true},
 "privacy": {"usageStatisticsEnabled": false},
 "model": {"name": "local", "generationConfig": {"timeout": 3600000, "samplingParams": {"max_tokens": 1000}}}}
CONFIG
  esac
}

# A turn of the conversation: the first with `first`, the next of the same with `next`.
turn() {
  local bin=$cache/node_modules/.bin/$1 say="Say yes" read="Read the file hello.txt with your tool"
  case $1-$2 in
  claude-first) "$bin" -p "$say" ;;
  claude-next) "$bin" -c -p --dangerously-skip-permissions --output-format stream-json --verbose \
    "$read Read and say its text" ;;
  codex-first) "$bin" exec --skip-git-repo-check "$say" ;;
  codex-next) "$bin" exec --skip-git-repo-check resume --last \
    "Run cat hello.txt with your tool exec_command and say its text" ;;
  opencode-first) "$bin" run "$say" ;;
  opencode-next) "$bin" run -c --format json "Read the file $PWD/hello.txt with your tool read and say its text" ;;
  # With -y here too: it adds tools, which come before all messages.
  qwen-first) "$bin" -y "$say" ;;
  qwen-next) "$bin" -c -y -o stream-json "Do not answer yet. Call your tool read_file now, with file_path $PWD/hello.txt" ;;
  esac
}
export -f turn
export cache

# Calls of tools in what an agent printed or wrote down.
n_calls() {
  case $1 in
  codex) cat .codex/sessions/*/*/*/*.jsonl | grep -c '"type":"function_call"' ;;
  *) grep -c '"type":"tool_use"' second.out ;;
  esac
}

status=0
printf '| agent | version | requests | prompt tokens, first turn | reused in the second | calls of tools | |\n'
printf '| --- | --- | --- | --- | --- | --- | --- |\n'
for agent in "$@"; do
  home=$folder/$agent
  mkdir -p "$home/work"
  echo 'The secret word is heron.' > "$home/work/hello.txt"
  start "$agent"
  if ! row=$(
    set +e
    export HOME=$home
    cd "$home" && configure "$agent"
    version=$(timeout 60 "$cache/node_modules/.bin/$agent" --version 2> /dev/null | grep -oE '[0-9]+\.[0-9.]+' | head -1)
    cd work
    timeout "$limit" bash -c "turn $agent first" < /dev/null > ../first.out 2>&1
    first=$?
    middle=$(wc -l < "$log")
    # A small model may go on and on after the tool's result: the limit ends it, and is no fault.
    timeout "$limit" bash -c "turn $agent next" < /dev/null > ../second.out 2>&1
    cd .. && calls=$(n_calls "$agent")
    awk -v agent="$agent" -v version="$version" -v first="$first" -v calls="${calls:-0}" \
      -v middle="$middle" '
      function field(name) { return match($0, " " name "=[0-9]+") ? substr($0, RSTART + length(name) + 2,
        RLENGTH - length(name) - 2) + 0 : 0 }
      $2 != "POST" { next }
      { n[$4]++; if ($4 != 200 && $4 != "-") bad = "a request was refused" }
      NR <= middle { if (field("prompt") > prompt) prompt = field("prompt"); next }
      !seen && field("prompt") >= prompt { seen = 1; reused = field("cached") }
      END {
        for (code in n) codes = codes (codes ? ", " : "") n[code] " × " code
        share = prompt ? reused / prompt : 0
        if (first != 0) bad = "the first answer failed: " first
        else if (!bad && calls == 0) bad = "no tool was called"
        else if (!bad && share < 0.95) bad = "too little was reused"
        printf "| %s | %s | %s | %d | %d (%.3f) | %d | %s |\n", agent, version, codes, prompt, reused, share, calls,
          bad ? bad : "passed"
        exit bad != ""
      }' "$log"
  ); then status=1; fi
  printf '%s\n' "$row"
  stop
done
[ -z "${KEEP:-}" ] || echo "kept: $folder" >&2
exit "$status"
