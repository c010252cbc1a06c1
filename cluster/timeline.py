"""Where a request's time went, for people (a table) and for programs (a dictionary)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from pdcore.logprobs import Logprobs
from protos import generation_pb2, kv_pb2
from protos.convert import logprobs_from_proto

_COLUMNS = 3  # of a table: so many fit 80 columns
_REASONS = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: "error",
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def finish_reason(end: generation_pb2.End) -> str:
    """Why an answer ended: ``stop``, ``length``, ``cancelled`` or ``error``."""
    return _REASONS[end.finish_reason]


@dataclass
class Answer:
    """One request's answer as it comes in, event by event.

    Attributes:
        name: for people. sample: which of several samples of one request it is, None if it is the only one.
        end: None until the answer is complete.
    """

    name: str
    sample: int | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    end: generation_pb2.End | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, event: generation_pb2.GenerateEvent) -> None:
        """Take one event of the stream."""
        self.text += event.text
        self.token_ids.extend(event.token_ids)
        if event.HasField("logprobs"):
            self.logprobs.append(logprobs_from_proto(event.logprobs))
        if event.HasField("prompt_logprobs"):
            self.prompt_logprobs.append(logprobs_from_proto(event.prompt_logprobs))
        if event.HasField("end"):
            self.end = event.end

    def to_dict(self) -> dict[str, object]:
        """The finished request as plain data. Milliseconds; bytes as the receiver counted them.

        Samples of one request have one transfer between them: see `samples_to_dict`.
        """
        assert self.end is not None, self.name
        timeline = self.end.timeline
        return {
            "prompt_tokens": self.end.usage.prompt_tokens,
            "completion_tokens": self.end.usage.completion_tokens,
            "text": self.text,
            "ttft_ms": round(timeline.ttft_ms, 3),
            "tpot_ms": round(timeline.tpot_ms, 3),
            "finish_reason": finish_reason(self.end),
            "prefill_worker": timeline.prefill_worker,
            "decode_worker": timeline.decode_worker,
            **({"kv": _kv_to_dict(timeline.kv)} if self.sample is None else {"sample": self.sample}),
        }


def samples_to_dict(answers: Sequence[Answer], extra: Callable[[Answer], dict[str, object]]) -> dict[str, object]:
    """A finished request of several samples as plain data, with what `extra` knows of each."""
    assert answers[0].end is not None, answers[0].name
    samples = [{**answer.to_dict(), **extra(answer)} for answer in answers]
    return {"kv": _kv_to_dict(answers[0].end.timeline.kv), "samples": samples}


def _kv_to_dict(kv: kv_pb2.TransferStats) -> dict[str, object]:
    return {
        "blocks": kv.blocks,
        "raw_bytes": kv.raw_bytes,
        "wire_bytes": kv.wire_bytes,
        "codec": kv.codec,
        "transport": kv.transport,
        "seconds": round(kv.seconds, 6),
        "codec_reason": kv.codec_reason,
    }


def timeline_tables(answers: Sequence[Answer]) -> list[Table]:
    """One column per finished request, one row per stage of its life; below it, why KV was packed as it was."""
    return [_table(answers[at : at + _COLUMNS]) for at in range(0, len(answers), _COLUMNS)]


def _table(answers: Sequence[Answer]) -> Table:
    table = Table(title="Timeline", title_justify="left", caption=_codec_reasons(answers), caption_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    rows = [[label] for label in _LABELS]
    for answer in answers:
        table.add_column(answer.name, justify="right", overflow="fold")
        for row, cell in zip(rows, _cells(answer), strict=True):
            row.append(cell)
    for row in rows:
        table.add_row(*row)
    return table


def _codec_reasons(answers: Sequence[Answer]) -> str | None:
    lines = []
    for answer in answers:
        assert answer.end is not None, answer.name
        kv = answer.end.timeline.kv
        if kv.codec_reason and not answer.sample:
            lines.append(escape(f"{answer.name}: KV by {kv.codec}: {kv.codec_reason}"))
    return "\n".join(lines) or None


_LABELS = (
    "mode",
    "prompt tokens",
    "output tokens",
    "queued",
    "prefill: waited",
    "prefill: computed",
    "first token after",
    "KV blocks",
    "KV raw",
    "KV on the wire",
    "KV ratio",
    "KV codec",
    "KV transport",
    "KV sent during prefill",
    "first to second token",
    "per token",
    "in all",
    "finish",
    "prefill worker",
    "decode worker",
    "replays",
)


def _cells(answer: Answer) -> list[str]:
    assert answer.end is not None, answer.name
    usage, timeline = answer.end.usage, answer.end.timeline
    prefill = ["-"] * 2
    if timeline.mode != "local":
        prefill = [_ms(timeline.prefill_queued_ms), _ms(timeline.prefill_ms)]
    kv = ["-"] * 7
    if timeline.HasField("kv") and answer.sample:
        kv = ["as sample 0", *['"'] * 6]
    elif timeline.HasField("kv"):
        stats = timeline.kv
        kv = [
            str(stats.blocks),
            _bytes(stats.raw_bytes),
            _bytes(stats.wire_bytes),
            f"{stats.raw_bytes / stats.wire_bytes:.2f}" if stats.wire_bytes else "-",
            stats.codec,
            stats.transport,
            _ms(stats.seconds * 1000),
        ]
    return [
        timeline.mode or "-",
        str(usage.prompt_tokens),
        str(usage.completion_tokens),
        _ms(timeline.queued_ms),
        *prefill,
        _ms(timeline.ttft_ms),
        *kv,
        _ms(timeline.second_token_ms),
        _ms(timeline.tpot_ms),
        _ms(timeline.total_ms),
        finish_reason(answer.end),
        timeline.prefill_worker or "-",
        timeline.decode_worker or "-",
        str(timeline.replays),
    ]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms"


def _bytes(count: int) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.2f} MiB"
    return f"{count / 1024:.1f} KiB"
