#!/usr/bin/env bash
# pdserve's OpenAI interface by curl.
#
# Usage: examples/shell/curl.sh [URL]; of several routers' URLs (URL,URL) the first is called
# The environment says who calls, as for `pdserve generate`: PDSERVE_API_KEY where the cluster has keys; under TLS (https://)
# PDSERVE_TLS_CA, a file with the authority of its certificate, and PDSERVE_TLS_CERT and PDSERVE_TLS_KEY where it wants one.
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
url=${url%%,*}
# The key goes by a file descriptor: arguments are there for everybody on this machine to see.
tls=()
[ -z "${PDSERVE_TLS_CA:-}" ] || tls+=(--cacert "$PDSERVE_TLS_CA")
[ -z "${PDSERVE_TLS_CERT:-}" ] || tls+=(--cert "$PDSERVE_TLS_CERT" --key "${PDSERVE_TLS_KEY:?has to be set beside it}")
# What curl's own words for a connection without, or with too much, TLS mean here.
advise() {
  [ "$1" -ne 22 ] || exit 22  # the cluster has answered, by an error
  case $url in
    https://*) advice="does it speak TLS? http:// is for a cluster without; PDSERVE_TLS_CA names the authority of its certificate" ;;
    *) advice="if it speaks TLS, the URL begins with https://, and PDSERVE_TLS_CA names the authority of its certificate" ;;
  esac
  echo "no answer from $url (curl ended with status $1): is a cluster there, and is this the URL behind http=?" >&2
  echo "$advice" >&2
  exit 1
}
call() {
  curl --silent --show-error --max-time 30 ${tls[@]+"${tls[@]}"} --header 'content-type: application/json' \
    --config <(printf 'header = "authorization: Bearer %s"\n' "${PDSERVE_API_KEY:-none}") "$@" || return
  echo
}

echo "--- models"
call --fail "$url/v1/models" || advise $?

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
