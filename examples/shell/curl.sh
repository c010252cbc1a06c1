#!/usr/bin/env bash
# pdserve's OpenAI interface by curl.
#
# Usage: examples/shell/curl.sh [URL]
# The environment says who calls, as for `pdserve generate`: PDSERVE_API_KEY where the cluster has keys; under TLS (https://)
# PDSERVE_TLS_CA, a file with the authority of its certificate, and PDSERVE_TLS_CERT and PDSERVE_TLS_KEY where it wants one.
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
# The key goes by a file descriptor: arguments are there for everybody on this machine to see.
tls=()
[ -z "${PDSERVE_TLS_CA:-}" ] || tls+=(--cacert "$PDSERVE_TLS_CA")
[ -z "${PDSERVE_TLS_CERT:-}" ] || tls+=(--cert "$PDSERVE_TLS_CERT" --key "${PDSERVE_TLS_KEY:?has to be set beside it}")
call() {
  curl --silent --show-error --max-time 30 ${tls[@]+"${tls[@]}"} --header 'content-type: application/json' \
    --config <(printf 'header = "authorization: Bearer %s"\n' "${PDSERVE_API_KEY:-none}") "$@"
  echo
}

echo "--- models"
call --fail "$url/v1/models"

echo "--- a text"
call --fail "$url/v1/completions" --data '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}'

echo "--- a chat, streamed"
call --fail --no-buffer "$url/v1/chat/completions" --data @- <<'JSON'
{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "max_tokens": 16, "stream": true, "stream_options": {"include_usage": true}
}
JSON

echo "--- an error says which field is wrong, and the header x-request-id whose it is"
call --include "$url/v1/completions" --data '{"prompt": "x", "temperature": 9}'
