#!/usr/bin/env bash
# Start a cluster of the demo model in a fresh clone by the first command that README gives, and send a request.
# Prints how long it took, how much disk .venv takes, and the answer; fails if there is none.
#
#   first_request.sh PORT COMMAND...
set -euo pipefail
port=$1
shift
SECONDS=0
"$@" > up.log 2>&1 &
up=$!
trap 'kill "$up" 2> /dev/null || true; wait "$up" || true; cat up.log' EXIT
until curl -sf "http://127.0.0.1:$port/v1/models" > /dev/null; do
  kill -0 "$up" # fails if it ended
  [ "$SECONDS" -lt 1500 ]
  sleep 1
done
echo "serves after $SECONDS s; .venv: $(du -sm .venv | cut -f1) MB"
curl -sSf "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"model": "demo", "messages": [{"role": "user", "content": "And the king said"}], "max_tokens": 32}'
echo
