#!/usr/bin/env bash
# pdserve's gRPC interface by grpcurl: reflection is served, no .proto files are needed.
#
# Usage: examples/shell/grpcurl.sh [ADDRESS]; of several routers' addresses (ADDRESS,ADDRESS) the first is called
# The environment says who calls, as for `pdserve generate`: PDSERVE_API_KEY where the cluster has keys; PDSERVE_TLS_CA, a
# file with the authority of its certificate, where it has TLS (or an https:// address for the usual authorities);
# PDSERVE_TLS_CERT and PDSERVE_TLS_KEY where it wants a certificate.
set -euo pipefail

address=${1:-127.0.0.1:50051}
address=${address%%,*}
grpcurl=${GRPCURL:-grpcurl}
if ! command -v "$grpcurl" >/dev/null; then
  echo "there is no $grpcurl: get it from https://github.com/fullstorydev/grpcurl/releases, or say where it is by GRPCURL" >&2
  exit 2
fi
headers=()
if [ -n "${PDSERVE_API_KEY:-}" ]; then
  export PDSERVE_API_KEY  # which grpcurl puts in; so it is not among the arguments, which others on this machine can see
  headers=(-expand-headers -H 'authorization: Bearer ${PDSERVE_API_KEY}')
fi
tls=()
[ -z "${PDSERVE_TLS_CA:-}" ] || tls+=(-cacert "$PDSERVE_TLS_CA")
[ -z "${PDSERVE_TLS_CERT:-}" ] || tls+=(-cert "$PDSERVE_TLS_CERT" -key "${PDSERVE_TLS_KEY:?has to be set beside it}")
case $address in
  https://* | grpcs://*) address=${address#*://} ;;
  *) [ ${#tls[@]} -gt 0 ] || tls=(-plaintext) ;;
esac
call() { "$grpcurl" ${tls[@]+"${tls[@]}"} ${headers[@]+"${headers[@]}"} "$@"; }

echo "--- services"
call "$address" list

echo "--- what a request can say"
call "$address" describe pdserve.v1.GenerateRequest

echo "--- health"
call -d '{"service": "pdserve.v1.Generation"}' "$address" grpc.health.v1.Health/Check

echo "--- the model"
call "$address" pdserve.v1.Generation/GetModel

echo "--- a text, 30 seconds at most"
call -max-time 30 -d '{"prompt": "Once upon a time", "sampling": {"max_tokens": 16, "temperature": 0}}' \
  "$address" pdserve.v1.Generation/Generate

echo "--- a chat"
call -max-time 30 -d @ "$address" pdserve.v1.Generation/Generate <<'JSON'
{"chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}, "sampling": {"max_tokens": 16}}
JSON

echo "--- an error says which field is wrong"
if call -d '{"prompt": "x", "sampling": {"temperature": 9}}' "$address" pdserve.v1.Generation/Generate 2>&1; then
  echo "it was taken?" >&2
  exit 1
fi
