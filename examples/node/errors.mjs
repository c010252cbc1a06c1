// What the cluster says about a failed call: the google.rpc details of its status.

import { fileURLToPath } from 'node:url';
import { status } from '@grpc/grpc-js';
import protobuf from 'protobufjs';

const file = fileURLToPath(new URL('google_rpc.proto', import.meta.url));
const types = new protobuf.Root().loadSync(file, { keepCase: true });
const Status = types.lookupType('google.rpc.Status');

/** {BadRequest, ErrorInfo, ResourceInfo, RetryInfo}: those of them that the error has. */
export function detailsOf(error) {
  const found = {};
  for (const bytes of error.metadata?.get('grpc-status-details-bin') ?? []) {
    for (const any of Status.decode(bytes).details) {
      const name = any.type_url.split('/').pop();
      try {
        const type = types.lookupType(name);
        found[name.split('.').pop()] = type.toObject(type.decode(any.value), { longs: Number });
      } catch {
        // A kind of detail that this program does not know.
      }
    }
  }
  return found;
}

/** A line for people: what went wrong, where, of which request, and when to come again. */
export function explain(error) {
  const { BadRequest, ErrorInfo, RetryInfo } = detailsOf(error);
  const lines = [`${status[error.code]}: ${error.details}`];
  for (const { field, description } of BadRequest?.field_violations ?? []) lines.push(`  ${field}: ${description}`);
  const request = ErrorInfo?.metadata?.request_id ?? error.metadata?.get('x-request-id')[0];
  if (request) lines.push(`  request ${request}`);
  const delay = RetryInfo?.retry_delay;
  if (delay) lines.push(`  come again in ${(delay.seconds ?? 0) + (delay.nanos ?? 0) / 1e9} s`);
  if (error.code === status.UNAVAILABLE && !ErrorInfo) { // not the cluster's words
    lines.push('  is a cluster running there? If it has TLS, --tls-ca names the authority of its certificate,');
    lines.push('  and --tls-cert and --tls-key are ours, where it wants one');
  }
  if (error.code === status.UNAUTHENTICATED) lines.push('  set PDSERVE_API_KEY to a key of this cluster');
  return lines.join('\n');
}
