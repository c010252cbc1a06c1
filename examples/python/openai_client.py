"""The official `openai` package against pdserve's HTTP interface (`pip install openai`).

Usage: python examples/python/openai_client.py [HOST:PORT or URL]

Under TLS give an https:// URL, and the authority's file in SSL_CERT_FILE if it is not one of the usual ones.
"""

from __future__ import annotations

import os
import sys

from openai import APIConnectionError, APIStatusError, BadRequestError, OpenAI


def main(url: str) -> None:
    # Without API keys in the cluster any will do. The package tries again by itself when there is no room.
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PDSERVE_API_KEY", "none"), max_retries=3)
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
    try:
        address = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "127.0.0.1:8000"
        main(address if "://" in address else f"http://{address}")
    except APIConnectionError:
        sys.exit("nobody answers there; is a cluster running? `pdserve serve` starts one, and prints http=URL")
    except APIStatusError as error:
        sys.exit(f"{error.message} (request {error.request_id})")
