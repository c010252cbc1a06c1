// Stream an answer from a pdserve cluster, by its .proto files as they are.
//
//   npm ci
//   node generate.mjs "Once upon a time" --max-tokens 64 --timeout 30
//   node generate.mjs --chat "Why is the sky blue?" --address 127.0.0.1:50051
//
//   node generate.mjs --address HOST:PORT --tls-ca ca.crt [--tls-cert tls.crt --tls-key tls.key]
//
// Of several routers' addresses (A,B) the first is called: @grpc/grpc-js resolves one name.
// Ctrl-C ends the request. A cluster with API keys takes one from PDSERVE_API_KEY.

import { readFileSync } from 'node:fs';
import { isIP } from 'node:net';
import { checkServerIdentity } from 'node:tls';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { explain } from './errors.mjs';

const env = process.env;
const USAGE = `Usage: node generate.mjs [PROMPT] [--chat] [--max-tokens N] [--temperature T] [--timeout SECONDS] [--enough CHARACTERS]
           [--address HOST:PORT] [--tls-ca FILE] [--tls-cert FILE --tls-key FILE] [--root FOLDER]`;

/** What the command line says; ends the program if it asks for help, or says what is not known. */
function readArguments(config) {
  let read;
  try {
    read = parseArgs(config);
    if (read.positionals.length > 1) throw new Error('one prompt is allowed; put it in quotes');
  } catch (error) {
    console.error(`${error.message}\n${USAGE}`);
    process.exit(2);
  }
  if (!read.values.help) return read;
  console.log(USAGE);
  process.exit(0);
}

const { values: options, positionals } = readArguments({
  allowPositionals: true,
  options: {
    help: { type: 'boolean', short: 'h' },
    address: { type: 'string', default: '127.0.0.1:50051' },
    'tls-ca': { type: 'string', default: env.PDSERVE_TLS_CA }, // authorities of the cluster's certificate; encrypts
    'tls-cert': { type: 'string', default: env.PDSERVE_TLS_CERT }, // of this client, where the cluster wants one
    'tls-key': { type: 'string', default: env.PDSERVE_TLS_KEY },
    chat: { type: 'boolean', default: false }, // the prompt is a message
    'max-tokens': { type: 'string', default: '64' },
    temperature: { type: 'string' },
    timeout: { type: 'string', default: '60' }, // seconds that the whole answer may take
    enough: { type: 'string' }, // leave after so many characters
    root: { type: 'string', default: fileURLToPath(new URL('../..', import.meta.url)) }, // where protos/ is
  },
});
const prompt = positionals[0] ?? 'Once upon a time';

/** Credentials of the channel: encrypted with the files, or by the usual authorities if the address says so. */
function credentials(scheme, verify) {
  const files = ['tls-ca', 'tls-key', 'tls-cert'].map((name) => options[name] || null);
  if (files.every((path) => path === null) && !/^(https|grpcs)$/i.test(scheme)) return grpc.credentials.createInsecure();
  return grpc.credentials.createSsl(...files.map((path) => path && readFileSync(path)), verify);
}

/** A client's target, credentials and options; ends the program if there can be none. */
function connection() {
  const [, scheme, host] = /^(?:(\w+):\/\/)?(.*?)\/?$/.exec(options.address.split(',')[0]);
  const target = /(^[^:]*|\])$/.test(host) ? `${host}:50051` : host; // gRPC itself would take 443
  // A restarted router is found again within about a second: what matters to programs that stay.
  const channel = { 'grpc.initial_reconnect_backoff_ms': 250, 'grpc.max_reconnect_backoff_ms': 1000 };
  const verify = {};
  const name = target.replace(/:\d+$/, '').replace(/^\[|\]$/g, '');
  if (isIP(name)) { // TLS has no way to ask for an address; it is still what the certificate must have
    channel['grpc.ssl_target_name_override'] = 'pdserve';
    verify.checkServerIdentity = (_, certificate) => checkServerIdentity(name, certificate);
  }
  try {
    return [target, credentials(scheme ?? '', verify), channel];
  } catch (error) {
    console.error(error.message);
    process.exit(2);
  }
}

const definition = loadSync('protos/generation.proto', { includeDirs: [options.root], keepCase: true, longs: Number });
const { Generation } = grpc.loadPackageDefinition(definition).pdserve.v1;
const client = new Generation(...connection());

const metadata = new grpc.Metadata();
if (env.PDSERVE_API_KEY) metadata.set('authorization', `Bearer ${env.PDSERVE_API_KEY}`);

const request = {
  ...(options.chat ? { chat: { messages: [{ role: 'user', content: prompt }] } } : { prompt }),
  sampling: {
    max_tokens: Number(options['max-tokens']),
    ...(options.temperature && { temperature: Number(options.temperature) }),
  },
};
const call = client.Generate(request, metadata, { deadline: Date.now() + 1000 * Number(options.timeout) });
call.on('metadata', (headers) => console.error(`request ${headers.get('x-request-id')[0]}`));
process.once('SIGINT', () => call.cancel());

let characters = 0;
let left = false;
try {
  for await (const event of call) {
    process.stdout.write(event.text ?? '');
    characters += event.text?.length ?? 0;
    if (event.end) {
      const { usage, timeline } = event.end;
      const seconds = (timeline.ttft_ms ?? 0) / 1000;
      console.error(`\n${usage.completion_tokens} tokens, the first after ${seconds.toFixed(3)} s`);
    }
    if (!left && options.enough && characters >= Number(options.enough)) {
      left = true;
      call.cancel(); // frees its work in the cluster at once; what is read next is the error CANCELLED
    }
  }
} catch (error) {
  if (error.code !== grpc.status.CANCELLED) {
    console.error(explain(error));
    process.exitCode = 1;
  } else {
    console.error(left ? '\nthat was enough' : '\ncancelled');
    process.exitCode = left ? 0 : 130;
  }
} finally {
  client.close();
}
