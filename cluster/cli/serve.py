"""``pdserve serve``: a cluster that stays up until it is told to end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
import uvloop

from cluster.cli.client import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, fail
from cluster.cli.settings import read_settings
from cluster.cli.signals import Signals
from cluster.cli.streams import write_or_give_up
from cluster.config import ClusterConfig
from cluster.config_file import to_yaml
from cluster.descendants import kill_descendants
from cluster.ray_environment import prepare_environment
from pdcore.addresses import grpc_address, http_address
from pdcore.errors import ConfigError, PdserveError

_DEFAULTS = ClusterConfig()
_FOR_PROGRAMS = ("READY ", "drained ", "stopped")
"""Lines that are looked for by how they begin: they have no time in front."""


def _option(text: str, default: object) -> Any:
    """A flag that is not set unless given: it would win over the configuration file."""
    return typer.Option(help=f"{text}; default {default}, or the configuration's.")


def serve(
    *,
    prefill: Annotated[int | None, _option("Prefill workers", _DEFAULTS.prefill.workers)] = None,
    decode: Annotated[int | None, _option("Decode workers", _DEFAULTS.decode.workers)] = None,
    aggregated: Annotated[int | None, _option("Workers that do both phases", _DEFAULTS.aggregated.workers)] = None,
    model: Annotated[str | None, _option("Short name, model folder, GGUF file or hub id", _DEFAULTS.model)] = None,
    dtype: Annotated[str | None, _option("float32, bfloat16 or float16", _DEFAULTS.dtype)] = None,
    host: Annotated[str | None, _option("Address that the router listens on", _DEFAULTS.router.host)] = None,
    grpc_port: Annotated[
        int | None, _option("Port of the router; 0 picks a free one", _DEFAULTS.router.grpc_port)
    ] = None,
    http_port: Annotated[
        int | None,
        _option(
            "Port of its HTTP interface, for OpenAI's clients; 0 picks a free one, -1: none",
            _DEFAULTS.router.http_port,
        ),
    ] = None,
    routers: Annotated[
        int | None,
        _option("Routers, on --grpc-port, --http-port and the ports after them", _DEFAULTS.router.replicas),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="local (a Ray of its own), auto (the one that runs here) or HOST:PORT; default: "
            "that of the Ray job, else local."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; flags win over it.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key; may be repeated.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Let routers, workers and the controller listen without TLS on addresses that other machines can "
            "reach; see docs/security.md.",
        ),
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the configuration and end; `pdserve config --explain` says what each key does.",
        ),
    ] = False,
) -> None:
    """Start a cluster and serve until SIGTERM or Ctrl-C, then drain.

    Prints one line that begins with READY, and names the routers' addresses, once requests can come. While draining,
    new requests are refused and running ones may finish for drain_timeout_s; a second signal ends it at once. Told
    before it is READY, it ends what it has started, in some seconds; a second signal then kills all of it at once.

    What happens after READY is said with the time in front. What workers and Ray log goes to standard error.

    Exit codes: 0 drained, 1 failed or requests were cut off, 2 a bad flag or configuration, 130 interrupted.

    As a job on a running Ray cluster, set RAY_JOB_STOP_WAIT_TIME_S in the job's runtime environment to more than
    drain_timeout_s, or Ray kills the job 3 s after `ray job stop`, drained or not. The job's `python` is the one on
    PATH when `ray start` ran: activate the virtual environment first. The README has the whole command.

    Examples:

      pdserve serve --prefill 1 --decode 2 --grpc-port 50051

      pdserve serve --routers 2 --grpc-port 50051

      pdserve serve --config cluster.yaml --set router.max_queue=64
    """
    if aggregated and prefill is None and decode is None and config is None:
        prefill = decode = 0  # --aggregated alone asks for a cluster of nothing else
    settings = read_settings(
        config,
        {
            "prefill.workers": prefill,
            "decode.workers": decode,
            "aggregated.workers": aggregated,
            "model": model,
            "dtype": dtype,
            "router.host": host,
            "router.grpc_port": grpc_port,
            "router.http_port": http_port,
            "router.replicas": routers,
            "ray.address": ray_address,
            "router.allow_insecure_listen": insecure or None,
            "ray.allow_insecure_listen": insecure or None,
        },
        assignments or (),
    )
    if print_config:
        typer.echo(to_yaml(settings), nl=False)
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from router.logs import set_levels  # no command needs a router, but those that run one

    set_levels(settings.router.log_level, prompts=settings.router.log_prompts)
    terminal = _Terminal(sys.stdout)
    try:
        # Ray prints what workers say, and what it says of them, on standard output, where READY is looked for.
        with contextlib.redirect_stdout(sys.stderr):
            code = uvloop.run(_serve(settings, terminal))
    except ConfigError as error:
        raise fail(str(error), EXIT_USAGE) from error
    except PdserveError as error:
        raise fail(str(error), EXIT_FAILED) from error
    raise typer.Exit(code)


async def _serve(settings: ClusterConfig, terminal: _Terminal) -> int:
    prepare_environment(settings)
    from cluster.controller import ClusterController  # Ray comes with it, which --help does not need

    asked = Signals()
    controller = ClusterController(settings, terminal.say, on_ray=asked.listen)
    try:
        started = await asked.unless(controller.start(), count=1, told=lambda: _end_start(asked, terminal))
        if not started:
            terminal.say("interrupted before the cluster was ready")
            return EXIT_INTERRUPTED
        count = len(controller.members().members)
        tls = settings.tls.public.to_config() is not None
        where = where_to_call(controller.addresses, controller.http_addresses, tls=tls)
        terminal.say(f"READY {where} model={controller.served_name} workers={count}")
        terminal.tells_time = True
        await asked.wait(1)
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(await controller.drain())

        if not await asked.unless(drain(), count=2):
            terminal.say("told again to end: not waiting for running requests")
            return EXIT_INTERRUPTED
        return 0 if drained[0] else EXIT_FAILED
    finally:
        asked.on_next(lambda: _leave(terminal))
        await controller.stop()
        terminal.say("stopped")


def _end_start(asked: Signals, terminal: _Terminal) -> None:
    terminal.say("ending what was started ... (a second Ctrl-C or SIGTERM kills it)")
    asked.on_next(lambda: _leave(terminal))


def _leave(terminal: _Terminal) -> None:
    """End this process and all that it has started, as by SIGKILL.

    On a Ray that was there before us actors go with whoever made them. The folder of a Ray of ours is removed by the
    next start.
    """
    terminal.say("told again to end: killed")
    kill_descendants()
    os._exit(EXIT_INTERRUPTED)


def where_to_call(grpc_addresses: Sequence[str], http_addresses: Sequence[str], *, tls: bool) -> str:
    """The routers' addresses (``host:port``) as READY has them, to be given to clients as they are."""
    fields = {
        "grpc": [grpc_address(address, tls=tls) for address in grpc_addresses],
        "http": [http_address(address, tls=tls) for address in http_addresses],
    }
    return " ".join(f"{name}={','.join(found)}" for name, found in fields.items() if found)


class _Terminal:
    """Where `pdserve serve` says what happens, in lines; with the time of day in front once `tells_time` is set."""

    def __init__(self, out: TextIO) -> None:
        self.tells_time = False
        self._out = out

    def say(self, line: str) -> None:
        if self.tells_time and not line.startswith(_FOR_PROGRAMS):
            line = f"{time.strftime('%H:%M:%S')} {line}"
        # The cluster goes on where its reader has gone, as in `serve | head`.
        write_or_give_up(self._out, f"{line}\n")
