#!/usr/bin/env bash
# Talks REST with curl alone: health, a request with tensors as JSON, one flat request, and a text word by word.
set -euo pipefail

url=localhost:8000
[[ ${1:-} == --url ]] && url=${2:?--url needs HOST:PORT}

# ask PATH [CURL OPTION...]: prints the answer, which must be a good one.
ask() {
  local path=$1
  shift
  curl --silent --show-error --fail-with-body --max-time 30 "$@" "http://$url$path"
}

# expect TEXT ANSWER
expect() {
  echo "$2"
  [[ $2 == *"$1"* ]] || { echo "error: wrong answer: no $1" >&2 && exit 1; }
}

ask /v2/health/ready || { echo "error: no server that is ready answers at $url" >&2 && exit 1; }
expect '"data":["CONCH","SHELL"]' "$(ask /v2/models/strings/infer --data '{
  "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": ["conch", "shell"]}],
  "outputs": [{"name": "upper"}]
}')"
expect '"upper":"CONCH"' "$(ask /v2/models/strings/generate --data '{"text": "conch"}')"
expect 'data: ' "$(ask /v2/models/word_chain/generate_stream --no-buffer --data '{"prompt": "A", "max_words": 3}')"
