"""``pdserve status --steps``: what the workers' schedulers did, as tables for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protos import admin_pb2, worker_pb2

_COLUMNS = ("step", "ago", "tokens", "dec", "pre", "bound", "run", "waiting", "free", "out", "ms", "pred")
_LEGEND = """\
dec, pre: sequences that got one token, or more. bound: what kept prompts from getting more: tokens
(max_num_batched_tokens), itl (target_itl_ms), seqs (max_num_seqs), memory (KV blocks). run: sequences with blocks.
waiting: interactive/standard/batch. free: blocks. out: sequences preempted, so many of them to host memory (s), and
+ those that come back from there. pred: predicted ms."""


def show_steps(reply: admin_pb2.GetClusterStepsReply, console: Console) -> None:
    """Print one table for each worker; 80 columns are enough for it."""
    if not reply.workers:
        console.print("no worker is registered")
        return
    for worker in reply.workers:
        console.print(f"[bold]{escape(worker.worker_id)}[/]", highlight=False)
        if worker.problem:
            console.print(worker.problem, markup=False, highlight=False, soft_wrap=True)
        elif not worker.steps:
            console.print("no steps yet")
        else:
            console.print(_table(list(worker.steps)))
        console.print()
    console.print(_LEGEND.replace("\n", " "), highlight=False)


def _table(steps: list[worker_pb2.StepRecord]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for header in _COLUMNS:
        justify = "left" if header.startswith("bound") else "right"
        table.add_column(header, justify=justify, no_wrap=True, vertical="bottom")  # type: ignore[arg-type]
    for step in steps:
        table.add_row(
            str(step.step),
            f"{step.age_s:.1f}s" if step.age_s < 100 else f"{step.age_s:.0f}s",
            str(step.tokens),
            str(step.decodes),
            str(step.prefills),
            step.bound_by,
            str(step.running),
            f"{step.waiting_interactive}/{step.waiting_standard}/{step.waiting_batch}",
            str(step.free_blocks),
            _moved(step),
            f"{step.ms:.1f}",
            f"{step.predicted_ms:.1f}" if step.predicted_ms else "-",
        )
    return table


def _moved(step: worker_pb2.StepRecord) -> str:
    """Preempted, of these swapped, and swapped in."""
    swapped = f"({step.swapped_out}s)" if step.swapped_out else ""
    return f"{step.preempted}{swapped}{f'+{step.swapped_in}' if step.swapped_in else ''}"
