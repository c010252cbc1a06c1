"""``pdserve status``: what a running cluster is doing."""

from __future__ import annotations

import json
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli.client import DEFAULT_ADDRESS, connect, failed_call
from protos import admin_pb2, admin_pb2_grpc, membership_pb2, worker_pb2

_ROLES = {
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_AGGREGATED: "aggregated",
}


def status(
    address: Annotated[str, typer.Option(help="HOST:PORT of a running cluster.")] = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the pools, workers and load of a running cluster.

    Examples:

      pdserve status

      pdserve status --json --address 127.0.0.1:50051
    """
    with connect(address) as channel:
        try:
            reply = admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=5.0)
        except grpc.RpcError as error:
            raise failed_call(error, address) from error
    if as_json:
        data = json_format.MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(data, indent=2))
        return
    console = Console()
    state = "draining" if reply.draining else "serving"
    console.print(
        f"[bold]{reply.router_id}[/] at {address}: {state} for {reply.uptime_s:,.0f} s, model {reply.model.name} "
        f"({reply.model.dtype}, {reply.model.max_model_len} tokens)",
        highlight=False,
    )
    console.print(
        f"requests: {reply.running_requests} running, {reply.queued_requests} queued, {reply.finished_requests} "
        f"finished, {reply.failed_requests} failed, {reply.replays} replays",
        highlight=False,
    )
    console.print(_worker_table(reply))
    if not reply.workers:
        console.print("no worker is registered")


def _worker_table(reply: admin_pb2.GetStatusReply) -> Table:
    table = Table()
    for name in ("worker", "pool", "state", "address", "pid"):
        table.add_column(name, overflow="fold")
    for name in ("running", "waiting", "paused", "prompt queue", "KV used", "transfers", "step"):
        table.add_column(name, justify="right")
    for item in sorted(reply.workers, key=lambda item: (item.worker.role, item.worker.worker_id)):
        worker, load = item.worker, item.load
        used = load.total_blocks - load.free_blocks
        table.add_row(
            worker.worker_id,
            _ROLES.get(worker.role, "?"),
            _state(item),
            worker.address,
            str(worker.pid),
            str(load.running),
            str(load.waiting),
            str(load.paused),
            f"{load.queued_prefill_tokens} tokens",
            f"{used}/{load.total_blocks}",
            str(load.open_tickets + load.open_sends),
            f"{load.step_ms:.1f} ms",
        )
    return table


def _state(item: admin_pb2.WorkerStatus) -> str:
    if not item.connected:
        return f"not connected: {escape(item.problem)}" if item.problem else "not connected"
    return "draining" if item.state == membership_pb2.WORKER_STATE_DRAINING else "serving"
