#!/usr/bin/env bash
# pdserve's gRPC interface by grpcurl: reflection is served, no .proto files are needed.
#
# Usage: examples/shell/grpcurl.sh [ADDRESS]     with PDSERVE_API_KEY set where the cluster has keys
set -euo pipefail

address=${1:-127.0.0.1:50051}
grpcurl=${GRPCURL:-grpcurl}
headers=()
if [ -n "${PDSERVE_API_KEY:-}" ]; then
  export PDSERVE_API_KEY  # which grpcurl puts in; so it is not among the arguments, which others on this machine can see
  headers=(-expand-headers -H 'authorization: Bearer ${PDSERVE_API_KEY}')
fi
call() { "$grpcurl" -plaintext ${headers[@]+"${headers[@]}"} "$@"; }

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
