"""The official `openai` package against pdserve's HTTP interface (`pip install openai`).

Usage: python examples/python/openai_client.py [URL], and the flags of generate.py

Of several routers' URLs (URL,URL) the first is called: the package takes one. Under TLS the URL begins with https://;
--tls-ca names the authority if it is not one of the usual ones.
"""

from __future__ import annotations

import argparse
import ssl
import sys

from connection import Caller, add_flags, caller, refuse
from openai import APIConnectionError, APIStatusError, BadRequestError, DefaultHttpxClient, OpenAI

from pdcore.security import ClientTls


def trust(tls: ClientTls) -> ssl.SSLContext:
    """Whom to trust, and what to show, as httpx takes it."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file or None)
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:
        refuse(f"the certificates cannot be used: {error}")
    return context


def tls_advice(url: str) -> str:
    """What may be wrong where no connection comes about."""
    if url.startswith("https://"):
        return (
            "a cluster without TLS has an http:// URL; --tls-ca or PDSERVE_TLS_CA names the authority of one with it"
        )
    return "a cluster with TLS has an https:// URL, and --tls-ca or PDSERVE_TLS_CA names its authority"


def main(url: str, who: Caller) -> None:
    http = DefaultHttpxClient(verify=trust(who.tls)) if who.tls else None
    # Without API keys in the cluster any will do. The package tries again by itself when there is no room.
    client = OpenAI(base_url=f"{url}/v1", api_key=who.api_key or "none", max_retries=3, http_client=http)
    model = client.models.list().data[0].id
    print(f"served: {model}")

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        timeout=60,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")

    text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, timeout=60)
    usage = text.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0
    print(f"{text.choices[0].text} [{text.choices[0].finish_reason}, {cached} prompt tokens were cached]")

    try:
        client.completions.create(model=model, prompt="x", temperature=9)
    except BadRequestError as error:
        print(f"refused as it should be: {error.message} (request {error.request_id})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="as READY has it behind http=")
    add_flags(parser)
    args = parser.parse_args()
    url = args.url.partition(",")[0].rstrip("/")
    url = url if "://" in url else f"http://{url}"
    try:
        main(url, caller(args))
    except APIConnectionError as error:
        told = f"{error} ({error.__cause__}); is a cluster there? `pdserve serve` starts one, and prints http=URL"
        sys.exit(f"{told}\n{tls_advice(url)}")
    except APIStatusError as error:
        sys.exit(f"{error.message} (request {error.request_id})")
