#!/usr/bin/env bash
# From a fresh clone to a chat with a real model: sets everything up, then serves on
# 127.0.0.1:30000. Any argument goes to the server:
#
#   scripts/serve.sh                               the demo pair, three drafts a step
#   scripts/serve.sh --nightjar-policy off         the same model without speculation
#   scripts/serve.sh --model-path DIR --port 31000 your own checkpoint
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { echo "[nightjar] $*" >&2; }

python=$(scripts/venv.sh)
port=30000
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --port) next=$((i + 1)) && port=${!next:-$port} ;;
    --port=*) port=${!i#--port=} ;;
  esac
done

# Says when the server answers; ends with it.
announce() {
  until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
    sleep 1
    kill -0 "$1" 2>/dev/null || return
  done
  cat >&2 <<TEXT

[nightjar] ready on http://127.0.0.1:$port. Try, in another terminal:

  curl -s http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'

or let an OpenAI client use base_url http://127.0.0.1:$port/v1. Ctrl-C here stops the server.

TEXT
}

say "starting the server; loading takes about half a minute"
announce $$ &
exec "$python" -m sglang_nightjar.launch_server --host 127.0.0.1 --port 30000 "$@"
