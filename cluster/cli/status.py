"""``pdserve status``: what a running cluster is doing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli.client import DEFAULT_ADDRESS, EXIT_USAGE, connect_all, fail, failed_call, read_api_key
from cluster.cli.options import Address, ApiKeyFile
from cluster.cli.steps import show_steps
from cluster.cli.tls import TlsCa, TlsCert, TlsKey, TlsName, client_tls
from pdcore.addresses import grpc_address, http_address
from protos import admin_pb2, admin_pb2_grpc, membership_pb2, routers_pb2, worker_pb2

_ROLES = {
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_AGGREGATED: "aggregated",
}
DEFAULT_STEPS = 20

_CIRCUITS = {
    admin_pb2.CIRCUIT_STATE_OPEN: "open: it gets what nobody else could take",
    admin_pb2.CIRCUIT_STATE_HALF_OPEN: "half open: the next request tries it",
}


def status(
    *,
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="What each worker's last steps did, and why.")] = False,
    last: Annotated[
        int | None, typer.Option(min=1, max=512, help=f"How many steps --steps shows; default: {DEFAULT_STEPS}.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
) -> None:
    """Show the pools, workers and load of a running cluster.

    Examples:

      pdserve status

      pdserve status --json --address 127.0.0.1:50051

      pdserve status --steps --last 50

      pdserve status --api-key-file operator.key
    """
    if last is not None and not steps:
        raise fail("--last needs --steps: nothing else has steps to show", EXIT_USAGE)
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    with connect_all(address, read_api_key(api_key_file), tls) as routers:
        address, channel = routers[0]  # one that answers
        admin = admin_pb2_grpc.AdminStub(channel)
        reply: admin_pb2.GetStatusReply | admin_pb2.GetClusterStepsReply
        try:
            if steps:
                reply = admin.GetSteps(worker_pb2.GetStepsRequest(count=last or DEFAULT_STEPS), timeout=10.0)
            else:
                reply = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=5.0)
        except grpc.RpcError as error:
            raise failed_call(error, address) from error
    if as_json:
        data = json_format.MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(data, indent=2))
    elif isinstance(reply, admin_pb2.GetClusterStepsReply):
        show_steps(reply, Console())
    else:
        show(reply, address, Console())


def show(reply: admin_pb2.GetStatusReply, address: str, console: Console) -> None:
    """Print a status for people; 80 columns are enough for it."""
    state = "draining" if reply.draining else "serving"
    console.print(
        f"[bold]{escape(reply.router_id)}[/] at {escape(address)}: {state} for {reply.uptime_s:,.0f} s, model "
        f"{escape(reply.model.name)} ({reply.model.dtype}, {reply.model.max_model_len} tokens)",
        highlight=False,
    )
    console.print(
        f"requests: {reply.running_requests} running, {reply.queued_requests} queued, {reply.finished_requests} "
        f"finished, {reply.failed_requests} failed, {reply.replays} replays"
        + (f", {reply.failed_transfers} failed transfers" if reply.failed_transfers else ""),
        highlight=False,
    )
    if reply.http_address:
        console.print(f"HTTP at {escape(http_address(reply.http_address, tls=reply.tls))}", highlight=False)
    if reply.degraded:
        console.print(f"[yellow]degraded[/]: {escape(reply.degraded)}", highlight=False)
    if reply.decisions:
        total = sum(item.count for item in reply.decisions)
        ways = ", ".join(f"{item.count / total:.0%} {item.mode} ({item.reason})" for item in reply.decisions)
        console.print(f"routes: {escape(ways)}", highlight=False)
    for line in _classes(reply):
        console.print(line, markup=False, highlight=False)
    if len(reply.routers) > 1:  # what is shown is one router's view
        for member in reply.routers:
            state = "draining" if member.state == routers_pb2.ROUTER_STATE_DRAINING else "serving"
            where = grpc_address(member.router.address, tls=member.router.tls)
            if member.router.http_address:
                where += f" and {http_address(member.router.http_address, tls=member.router.tls)}"
            line = f"router {member.router.router_id}: {state} at {where} (pid {member.router.pid})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    workers = sorted(reply.workers, key=lambda item: (item.worker.role, item.worker.worker_id))
    if not workers:
        console.print("no worker is registered")
        return
    for columns in (_WHO, _LOAD):
        console.print()
        console.print(_fitting_table(columns, workers, console))
    for note in _notes(workers):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for item in workers:
        for line in _sent(item.load.transfer_events):
            console.print(f"{item.worker.worker_id}: {line}", markup=False, highlight=False)


def _classes(reply: admin_pb2.GetStatusReply) -> Iterator[str]:
    """Classes that had requests: what became of them, and how many missed their objectives."""
    for item in reply.classes:
        shed = {"queue full": item.shed_full, "too late": item.shed_late, "given up": item.shed_waiting}
        if not (item.admitted or item.waiting or any(shed.values())):
            continue
        causes = _in_brackets(shed)
        missed = _in_brackets({"late": item.late, "slow": item.slow})
        yield (
            f"{item.name}: {item.waiting} of {item.max_queue} waiting, {item.admitted} admitted, "
            f"{sum(shed.values())} shed{causes}, {item.finished} finished{missed}"
        )
    if reply.rate_limited_requests:
        yield f"over their tenants' limits: {reply.rate_limited_requests}"


def _in_brackets(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f" ({shown})" if shown else ""


def _state(item: admin_pb2.WorkerStatus) -> str:
    if not item.connected:
        return "no session"
    return "draining" if item.state == membership_pb2.WORKER_STATE_DRAINING else "serving"


def _used(item: admin_pb2.WorkerStatus) -> str:
    load = item.load
    return f"{load.total_blocks - load.free_blocks}/{load.total_blocks}"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table of workers. `dispensable`: those with the highest number go first where room is short."""

    header: str
    cell: Callable[[admin_pb2.WorkerStatus], str]
    right: bool = False
    dispensable: int = 0


_WHO = (
    _Column("worker", lambda item: item.worker.worker_id),
    _Column("pool", lambda item: _ROLES.get(item.worker.role, "?"), dispensable=2),
    _Column("state", _state),
    _Column("address", lambda item: item.worker.address),
    _Column("pid", lambda item: str(item.worker.pid), right=True, dispensable=3),
    _Column("native code", lambda item: item.worker.native_code.partition(":")[0] or "?", dispensable=1),
)
_LOAD = (
    _Column("worker", lambda item: item.worker.worker_id),
    _Column("run", lambda item: str(item.load.running), right=True),
    _Column("wait", lambda item: str(item.load.waiting), right=True),
    _Column("pause", lambda item: str(item.load.paused), right=True, dispensable=1),
    _Column("swapped", lambda item: str(item.load.swapped), right=True, dispensable=3),
    _Column("queued\ntokens", lambda item: str(item.load.queued_prefill_tokens), right=True),
    _Column("KV blocks\nused", _used, right=True),
    _Column("prefix\ncache", lambda item: str(item.load.cached_blocks), right=True, dispensable=2),
    _Column("transfers", lambda item: str(item.load.open_tickets + item.load.open_sends), right=True),
    _Column("mean\nstep", lambda item: f"{item.load.step_ms:.1f} ms", right=True),
)


def _fitting_table(columns: Sequence[_Column], workers: Sequence[admin_pb2.WorkerStatus], console: Console) -> Table:
    """The table with as many of its columns as the console has room for: a folded cell is hard to read."""
    shown = list(columns)
    unbounded = console.options.update(width=10_000)
    while True:
        table = _table(shown, workers)
        spare = max(shown, key=lambda column: column.dispensable)
        if not spare.dispensable or console.measure(table, options=unbounded).maximum <= console.width:
            return table
        shown.remove(spare)


def _table(columns: Sequence[_Column], workers: Sequence[admin_pb2.WorkerStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", no_wrap=True, vertical="bottom")
    for item in workers:
        table.add_row(*(escape(column.cell(item)) for column in columns))
    return table


def _notes(workers: Sequence[admin_pb2.WorkerStatus]) -> Iterator[str]:
    """What does not fit into a cell."""
    problems = [(item.worker.worker_id, item.problem) for item in workers if not item.connected and item.problem]
    slow = [
        (item.worker.worker_id, f"no native code: {item.worker.native_code.partition(': ')[2]}")
        for item in workers
        if item.worker.native_code.startswith("off")
    ]
    offers = {", ".join(item.worker.transports) for item in workers if item.worker.transports}
    circuits = [
        (item.worker.worker_id, f"circuit {_CIRCUITS[item.circuit]}; the last failure: {item.last_failure}")
        for item in workers
        if item.circuit in _CIRCUITS
    ]
    if problems or slow or circuits or offers:
        yield ""
    for worker_id, note in problems + circuits + slow:
        yield f"{worker_id}: {note}"
    if len(offers) == 1:
        yield f"KV transports: {offers.pop()}"
        return
    for item in workers:
        if item.worker.transports:
            yield f"{item.worker.worker_id}: KV transports: {', '.join(item.worker.transports)}"


_TROUBLE = {
    "frames_retried": "frames sent again",
    "frames_rejected": "damaged frames",
    "lanes_failed": "transports that broke or did not open",
    "sends_failed": "sends given up",
    "tickets_failed": "transfers that did not arrive",
}


def _sent(events: Mapping[str, int]) -> Iterator[str]:
    """What a worker's transfers came to since it started: by which way, packed by what, and what went wrong."""
    ways = {name.removesuffix("_frames"): count for name, count in events.items() if name.endswith("_frames")}
    sent = [
        f"{_megabytes(events[f'{transport}_bytes'])} by {transport}"
        for transport, frames in sorted(ways.items())
        if frames
    ]
    if sent:
        yield f"KV sent: {', '.join(sent)}"
    packed = []
    for name, wire in sorted(events.items()):
        codec = name.removeprefix("codec_").removesuffix("_wire_bytes")
        if name == f"codec_{codec}_wire_bytes" and wire:
            packed.append(f"{codec} {_megabytes(wire)} of {_megabytes(events[f'codec_{codec}_raw_bytes'])}")
    if packed:
        yield f"KV packed: {', '.join(packed)}"
    trouble = [f"{events[name]} {words}" for name, words in _TROUBLE.items() if events.get(name)]
    if trouble:
        yield f"KV trouble: {', '.join(trouble)}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
