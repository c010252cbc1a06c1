"""Many streams on one event loop: three questions at once, one of them left early, one with a deadline.

Usage: python examples/python/generate_async.py [ADDRESS], and the flags of generate.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from connection import Caller, add_flags, grpc_caller

from pdcore.errors import DeadlineExceeded, RequestError
from router.client import AsyncClient, Sampling


async def whole(client: AsyncClient, question: str) -> str:
    message = {"role": "user", "content": question}
    answer = await client.complete([message], Sampling(max_tokens=24), timeout_s=60, priority="interactive")
    return f"whole: {answer.text!r}"


async def beginning(client: AsyncClient, prompt: str, characters: int) -> str:
    text = ""
    # Leaving `async with` ends the request in the cluster, in whichever state it is.
    async with client.generate(prompt, Sampling(max_tokens=2000, ignore_eos=True)) as stream:
        async for event in stream:
            text += event.text
            if len(text) >= characters:
                break
    return f"beginning: {text[:characters]!r}"


async def hurried(client: AsyncClient, prompt: str) -> str:
    try:
        await client.complete(prompt, Sampling(max_tokens=2000, ignore_eos=True), timeout_s=0.5)
    except DeadlineExceeded as error:
        return f"hurried: not within half a second (request {error.request_id})"
    return "hurried: done in time"


async def main(address: str, who: Caller) -> None:
    async with AsyncClient(address, api_key=who.api_key, tls=who.tls) as client:
        works = whole(client, "Why is the sky blue?"), beginning(client, "One, two,", 40), hurried(client, "Pi is 3.")
        for line in await asyncio.gather(*works):
            print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", help="as READY has it behind grpc=")
    add_flags(parser)
    args = parser.parse_args()
    try:
        asyncio.run(main(args.address, grpc_caller(args)))
    except RequestError as error:
        sys.exit(f"{error} (request {error.request_id})")
