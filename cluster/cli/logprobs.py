"""Log-probabilities of an answer, for people (tables) and for programs (a dictionary)."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from rich.markup import escape
from rich.table import Table

from cluster.timeline import Answer
from pdcore.logprobs import Logprobs, joined
from protos import generation_pb2, generation_pb2_grpc


class TokenTexts:
    """Texts of single tokens, which the cluster knows; each is asked for once."""

    def __init__(self, channel: grpc.Channel, timeout_s: float = 10.0) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(channel)
        self._timeout_s = timeout_s
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The token's text, quoted, so that blanks show; its number if it has none or nobody answers."""
        if token_id not in self._known:
            try:
                request = generation_pb2.DetokenizeRequest(token_ids=[token_id])
                text = self._stub.Detokenize(request, timeout=self._timeout_s).text
            except grpc.RpcError:
                text = ""
            self._known[token_id] = repr(text) if text else f"#{token_id}"
        return self._known[token_id]


def logprobs_to_dict(answer: Answer) -> dict[str, object]:
    """``logprobs`` and ``prompt_logprobs``, each a list with an entry a token; left out if not asked for."""
    parts = {"logprobs": answer.logprobs, "prompt_logprobs": answer.prompt_logprobs}
    return {name: _entries(joined(part)) for name, part in parts.items() if part}


def _entries(logprobs: Logprobs) -> list[dict[str, object]]:
    top = logprobs.top
    return [
        {
            "position": logprobs.start + i,
            "logprob": round(value, 6),
            "top": [
                {"token_id": token_id, "logprob": round(likely, 6)}
                for token_id, likely in zip(
                    logprobs.top_ids[i * top : (i + 1) * top],
                    logprobs.top_values[i * top : (i + 1) * top],
                    strict=True,
                )
            ],
        }
        for i, value in enumerate(logprobs.values)
    ]


def logprob_tables(answer: Answer, text_of: TokenTexts, prompt_ids: Sequence[int] = ()) -> list[Table]:
    """A table each for the prompt and the output, as far as they were asked for: one row per token.

    Args:
        prompt_ids: the prompt's tokens; without them, or if they are not all, its table does not name them.
    """
    tables = []
    whose = f" of {answer.name}" if answer.sample is not None else ""
    if answer.prompt_logprobs:
        scored = joined(answer.prompt_logprobs)
        known = prompt_ids if len(prompt_ids) == scored.start + len(scored.values) else None
        tables.append(_table("Prompt log-probabilities", scored, known, text_of))
    if answer.logprobs:
        tables.append(_table(f"Log-probabilities{whose}", joined(answer.logprobs), answer.token_ids, text_of))
    return tables


def _table(title: str, logprobs: Logprobs, token_ids: Sequence[int] | None, text_of: TokenTexts) -> Table:
    """`token_ids`: the tokens themselves, from position 0 on; None if this program does not know them."""
    table = Table(title=title, title_justify="left")
    table.add_column("position", justify="right")
    if token_ids is not None:
        table.add_column("token")
    table.add_column("logprob", justify="right")
    table.add_column("likeliest")
    top = logprobs.top
    for i, value in enumerate(logprobs.values):
        position = logprobs.start + i
        likely = zip(
            logprobs.top_ids[i * top : (i + 1) * top], logprobs.top_values[i * top : (i + 1) * top], strict=True
        )
        cells = [str(position)]
        if token_ids is not None:
            cells.append(escape(text_of(token_ids[position])))
        cells.append(f"{value:.3f}")
        cells.append(escape("  ".join(f"{text_of(token_id)} {logprob:.3f}" for token_id, logprob in likely)))
        table.add_row(*cells)
    return table
