"""``pdserve demo``: the whole path on a cluster of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from cluster.cli.client import EXIT_FAILED, EXIT_INTERRUPTED, fail
from cluster.cli.output import check_output, write_json
from cluster.cli.settings import read_settings
from cluster.config import ClusterConfig
from cluster.ray_environment import prepare_environment
from cluster.timeline import Answer
from pdcore.errors import PdserveError


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the requests and their timelines as data.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Short name, model folder, GGUF file or hub id.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
) -> None:
    """Start one prefill and one decode worker and a router, send three requests, show where their time went.

    Uses a Ray and ports of its own, and ends all that it started. Fails unless every request was disaggregated.

    Exit codes: 0 done, 1 failed or a request was not disaggregated, 2 a bad flag, 130 interrupted.

    Examples:

      pdserve demo

      pdserve demo --json build/demo.json
    """
    flags = {
        "name": "pdserve-demo",
        "model": model,
        "dtype": dtype,
        "router.grpc_port": 0,
        "router.http_port": 0,
        "ray.address": "local",
        # The demonstration shows the way of a request, not of a failure: a slow machine is no dead worker.
        "dead_after_s": 20.0,
        # Nor of a decode worker that runs a short prompt itself, because it has seen the beginning of it.
        "decode.scheduler.local_prefill_tokens": 0,
        "router.disaggregate": "always",
        # Nor of a link that is faster than any compression: between processes of one machine auto takes raw.
        "transfer.codec": "zstd" if dtype == "float32" else "bexp-zstd",
    }
    settings = read_settings(None, flags)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console()
    check_output("--json", json_file)
    try:
        answers = uvloop.run(_demo(settings, console))
    except PdserveError as error:
        raise fail(str(error), EXIT_FAILED) from error
    from cluster.demo import check_disaggregated, to_dict
    from cluster.timeline import timeline_tables

    console.print(*timeline_tables(answers))
    try:
        check_disaggregated(answers)
    except PdserveError as error:
        raise fail(str(error), EXIT_FAILED) from error
    write_json(json_file, to_dict(answers), console)
    console.print('next: `pdserve serve`, and from another terminal `pdserve generate --chat "..."`', highlight=False)


async def _demo(settings: ClusterConfig, console: Console) -> list[Answer]:
    prepare_environment(settings)
    from cluster.cli.signals import Signals
    from cluster.controller import ClusterController  # Ray comes with it, which --help does not need
    from cluster.demo import demo_rounds, run_requests
    from cluster.demo_view import make_view

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    signals = Signals()
    controller = ClusterController(settings, say, log_to_driver=False, on_ray=signals.listen)
    answers: list[Answer] = []

    async def work() -> None:
        await controller.start()
        answers.extend(await run_requests(controller.addresses[0], demo_rounds(), make_view(console)))
        await controller.drain()

    try:
        if not await signals.unless(work(), count=1, told=lambda: say("ending what was started ...")):
            raise fail("interrupted", EXIT_INTERRUPTED)
    finally:
        await controller.stop()
    return answers
