"""The tables of ``docs/kv-transports.md``, made from `kv_transfer.negotiation`. Pure.

python -m kv_transfer.transport_matrix docs/kv-transports.md     writes them into the page again
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_transfer.negotiation import AUTO, CUDA, GRPC, Offer, Site, may_use, negotiate, obstacle
from pdcore.config import CODEC_DTYPES, CODECS, LOSSLESS_CODECS, TRANSPORTS
from pdcore.types import DTYPE_BYTES

BEGIN: Final = "<!-- made by kv_transfer/transport_matrix.py: begin -->"
END: Final = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the two ends of a pair sit."""

    name: str
    sender: Site
    receiver: Site


def _site(**differences: object) -> Site:
    values: dict[str, object] = {"host": "a", "pid_namespace": "1", "user": 1, "address": "10.0.0.1"}
    return Site(**{**values, **differences})  # type: ignore[arg-type]


_GPU_0: Final = _site(device=CUDA, device_id="0")
_GPU_1: Final = _site(device=CUDA, device_id="1")
_FAR_GPU: Final = _site(host="b", address="10.0.0.2", device=CUDA, device_id="2")
_FAR: Final = _site(host="b", address="10.0.0.2")

PLACEMENTS: Final = (
    Placement("one host", _site(), _site()),
    Placement("one host, two containers", _site(), _site(pid_namespace="2")),
    Placement("one host, two users", _site(), _site(user=2)),
    Placement("two hosts", _site(), _FAR),
    Placement("two hosts, groups bound to loopback", _site(address="127.0.0.1"), _FAR),
    Placement("one host, encrypted stream", _site(tls=True), _site(tls=True)),
    Placement("two hosts, encrypted stream", _site(tls=True), _FAR),
    Placement("one host, two GPUs", _GPU_0, _GPU_1),
    Placement("one host, one GPU", _GPU_0, _GPU_0),
    Placement("one host, CPU to GPU", _site(), _GPU_0),
    Placement("two hosts, two GPUs", _GPU_0, _FAR_GPU),
)

_DEVICE_PAIRS: Final = (
    Placement("CPU to CPU", _site(), _site()),
    Placement("CPU to GPU", _site(), _GPU_0),
    Placement("GPU to CPU", _GPU_0, _site()),
    Placement("GPU to GPU", _GPU_0, _GPU_1),
)


def tables() -> str:
    """Both tables as Markdown."""
    return f"{placement_table()}\n\n{codec_table()}\n"


def placement_table() -> str:
    """Transports by placement: what ``auto`` takes, what can be asked for, and why the rest cannot."""
    rows = []
    for placement in PLACEMENTS:
        sender, receiver = _offers(placement, AUTO)
        order = negotiate(sender, receiver).transports
        cells = [placement.name]
        for transport in TRANSPORTS:
            problem = None if transport == GRPC else obstacle(transport, sender, receiver)
            if problem is not None:
                cells.append(f"no: {problem}")
            else:
                cells.append(str(order.index(transport) + 1) if transport in order else "on request")
        rows.append(cells)
    return _markdown(["placement", *(f"`{name}`" for name in TRANSPORTS)], rows)


def codec_table() -> str:
    """Codecs by device: over what they can travel within a host. Frames are bytes, so that only caches matter."""
    rows = []
    for codec in CODECS:
        dtypes = CODEC_DTYPES.get(codec, tuple(DTYPE_BYTES))
        cells = [f"`{codec}`", "lossless" if codec in LOSSLESS_CODECS else "lossy", ", ".join(dtypes)]
        for placement in _DEVICE_PAIRS:
            sender, receiver = _offers(placement, AUTO)
            cells.append(", ".join(t for t in TRANSPORTS if t == GRPC or obstacle(t, sender, receiver) is None))
        rows.append(cells)
    return _markdown(["codec", "numbers", "cache dtypes", *(placement.name for placement in _DEVICE_PAIRS)], rows)


def with_tables(page: str) -> str:
    """`page` with its tables as they should be. Raises ValueError if it has no place for them."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:start]}\n\n{tables()}\n{page[end:]}"


def _offers(placement: Placement, wanted: str) -> tuple[Offer, Offer]:
    usable = may_use(wanted, TRANSPORTS)
    return Offer(placement.sender, wanted, usable), Offer(placement.receiver, wanted, usable)


def _markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
