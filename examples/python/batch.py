"""Thousands of prompts from a file of JSON lines, so many at a time; answers in the order of the prompts.

Usage: python examples/python/batch.py prompts.jsonl answers.jsonl [--address HOST:PORT] [--concurrency 32]
and the flags of generate.py. Exit status 2: a file or a flag is no good; 1: the cluster could not answer.

A line of input is {"prompt": TEXT} or {"messages": [{"role": TEXT, "content": TEXT}, ...]}, with "id" and
"max_tokens" if you like; anything else in it ends the run, and is named. A line of output has its "id", "text",
"finish_reason", "prompt_tokens", "cached_tokens" and "completion_tokens"; or "id", "error" and "request_id" if that
prompt was refused for what it is. While the cluster has no room, prompts wait and come again.
Whatever ends the run, the same command goes on where it was: answers that are there are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Any

from connection import Caller, add_flags, grpc_caller, refuse

from pdcore.errors import DeadlineExceeded, InvalidRequest, RequestError
from router.client import AsyncClient, Retry, Sampling

AHEAD = 4
"""Prompts that may be sent before the answer to an early one has come, as a multiple of the concurrency."""
KEYS = ("id", "prompt", "messages", "max_tokens")
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")


def problem(item: object) -> str:
    """Why a line of input is none; empty if it is one. What its values are good for is the cluster's to say."""
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        return 'an object with either "prompt" or "messages" is allowed'
    for key in item:
        if key not in KEYS:
            return f"unknown key {key!r}; allowed: {', '.join(KEYS)}"
    if not isinstance(item.get("prompt", ""), str):
        return '"prompt" must be a text'
    if type(item.get("max_tokens", 1)) is not int:
        return '"max_tokens" must be a whole number'
    messages = item.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return '"messages" must be a list of objects'
    for key, value in ((key, value) for message in messages for key, value in message.items()):
        if key not in MESSAGE_KEYS:
            return f"unknown key {key!r} in a message; allowed: {', '.join(MESSAGE_KEYS)}"
        if not isinstance(value, str):
            return f"{key!r} of a message must be a text"
    return ""


def prompts(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
                refuse(f"{path}, line {number}: {error}")
            if words := problem(item):
                refuse(f"{path}, line {number}: {words}")
            yield {"id": str(number), **item}


def take_up(answers: BufferedRandom) -> list[str]:
    """Ids of the answers that are there; what a crash left of a last one is cut off."""
    ids, whole = [], 0
    for line in answers:
        if not line.endswith(b"\n"):
            break
        try:
            ids.append(json.loads(line)["id"])
        except (ValueError, TypeError, KeyError):
            refuse(f"{answers.name} has something else than answers")
        whole += len(line)
    answers.truncate(whole)
    answers.seek(whole)
    return ids


async def ask(client: AsyncClient, item: dict[str, Any], room: asyncio.Semaphore, timeout_s: float) -> dict[str, Any]:
    async with room:
        prompt = item["prompt"] if "prompt" in item else item["messages"]
        sampling = Sampling(max_tokens=item.get("max_tokens", 64))
        try:
            answer = await client.complete(prompt, sampling, timeout_s=timeout_s, priority="batch")
        except (InvalidRequest, DeadlineExceeded) as error:  # of this prompt alone
            return {"id": item["id"], "error": str(error), "request_id": error.request_id}
        except ValueError as error:  # no message can carry it, so that nobody was asked
            return {"id": item["id"], "error": str(error), "request_id": ""}
        usage = answer.end.usage
        return {
            "id": item["id"],
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }


async def run(args: argparse.Namespace, who: Caller, answers: BufferedRandom) -> str:
    """Answer what has no answer yet; returns in words how many that were."""
    known = take_up(answers)
    room, written, already = asyncio.Semaphore(args.concurrency), 0, 0
    running: deque[asyncio.Task[dict[str, Any]]] = deque()

    async def write_first() -> None:
        nonlocal written
        answers.write(json.dumps(await running[0], ensure_ascii=False).encode() + b"\n")
        answers.flush()
        running.popleft()
        written += 1

    retry = Retry(attempts=10_000, max_wait_s=args.patience)
    async with AsyncClient(args.address, api_key=who.api_key, tls=who.tls, retry=retry) as client:
        try:
            for number, item in enumerate(prompts(args.prompts)):
                if number < len(known):
                    if item["id"] != known[number]:
                        refuse(f"{args.answers} is of other prompts: its answer {number + 1} is to {known[number]!r}")
                    already += 1
                    continue
                while len(running) >= AHEAD * args.concurrency or (running and running[0].done()):
                    await write_first()
                running.append(asyncio.create_task(ask(client, item, room, args.timeout)))
            while running:
                await write_first()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return f"all {already} were answered already" if already and not written else f"{written} prompts answered"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--concurrency", type=int, default=32, help="prompts that run at once")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer, waiting included")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that a prompt may wait for room")
    add_flags(parser)
    args = parser.parse_args()
    who = grpc_caller(args)
    try:
        args.prompts.open("rb").close()  # before there is a file of answers to it
        args.answers.touch()
        with args.answers.open("r+b") as answers:
            print(asyncio.run(run(args, who, answers)))
    except OSError as error:
        refuse(str(error))
    except RequestError as error:  # of the cluster, and so of every prompt
        sys.exit(f"{error} (request {error.request_id}); run the same command again to go on from there")


if __name__ == "__main__":
    main()
