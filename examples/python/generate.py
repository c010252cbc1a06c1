"""Stream an answer, take a whole one, hold a conversation.

Usage: python examples/python/generate.py [ADDRESS] [--api-key-file FILE]
    [--tls-ca FILE] [--tls-cert FILE --tls-key FILE]
"""

from __future__ import annotations

import argparse
import sys

from connection import Caller, add_flags, grpc_caller

from pdcore.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from router.chat_history import ChatHistory
from router.client import Client, Retry, Sampling


def main(address: str, who: Caller) -> None:
    # Retry: what is refused for want of room or of workers is tried again, within bounds.
    with Client(address, api_key=who.api_key, tls=who.tls, retry=Retry(max_wait_s=2.0)) as client:
        print(f"served: {client.model().model.name}")

        # Token by token. The `with` ends the request, should this be left before the answer is complete.
        with client.generate("Once upon a time", Sampling(max_tokens=32), timeout_s=60) as stream:
            for event in stream:
                print(event.text, end="", flush=True)
        end = stream.collect().end
        count, ms = end.usage.completion_tokens, end.timeline.ttft_ms
        print(f"\n[{stream.request_id}: {count} tokens, first after {ms:.0f} ms]")

        # At once, by a schema: the answer is JSON that fits it.
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}},
            "required": ["name", "legs"],
            "additionalProperties": False,
        }
        answer = client.complete("A dog, as JSON: ", Sampling(max_tokens=48, json_schema=schema), timeout_s=60)
        print(answer.text, answer.finish_reason)

        history = ChatHistory("Answer in one sentence.")
        for question in ("Why is the sky blue?", "And at dusk?"):
            reply = client.complete(history.ask(question), Sampling(max_tokens=32, temperature=0.7), timeout_s=60)
            history.answered(reply.text)
            usage = reply.end.usage
            print(
                f"{question} {reply.text} [{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached]"
            )

        try:
            client.complete("x", Sampling(temperature=9.0))
        except InvalidRequest as error:
            print(f"refused as it should be: {error.field} {error.problem} (request {error.request_id})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", help="as READY has it behind grpc=")
    add_flags(parser)
    args = parser.parse_args()
    try:
        main(args.address, grpc_caller(args))
    except Overloaded as error:
        sys.exit(f"no room; come again in {error.retry_after_s:.0f} s (request {error.request_id})")
    except Unavailable as error:
        sys.exit(f"{error}; is a cluster running there? `pdserve serve` starts one. If it has TLS, give --tls-ca")
    except RequestError as error:
        sys.exit(f"{error} (request {error.request_id})")
