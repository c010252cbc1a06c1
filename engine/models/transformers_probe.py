"""What a model of `transformers` does in its attention, found out by running it; and whether paging it is right.

Configs do not say reliably which layers have attention, which window they have or how scores are scaled, and
modelling code may do things that only hold for whole, separate sequences. So a model is run on a few tokens when it
is loaded: once to see what its layers ask for, and once to compare it with its own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import HeadShape
from engine.models.transformers_attention import AttentionCall, LayerAttention, MaskRule
from engine.step import StepInput
from pdcore.errors import UnsupportedModel

_LENGTHS = (7, 5)  # of the sequences that are compared
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.25}


class Recorder:
    """An `AttentionContext` that notes what each layer asks for, and answers with zeros.

    Args:
        max_len: positions are below this; a window that is no shorter is none.
    """

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self._seen: list[tuple[int, LayerAttention]] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.options:
            raise UnsupportedModel(f"its attention has options that are not implemented: {', '.join(call.options)}")
        (_, heads, tokens, size), (_, kv_heads, _, _) = call.query.shape, call.key.shape
        if call.value.shape != call.key.shape:
            raise UnsupportedModel(f"keys of {size} and values of {call.value.shape[-1]} numbers differ in size")
        shape = HeadShape(heads, kv_heads, size, call.scale, call.softcap)
        self._seen.append((call.layer, LayerAttention(shape, self._window(call.mask))))
        return call.query.new_zeros(1, tokens, heads, size)

    def layers(self, expected: int) -> tuple[LayerAttention, ...]:
        """One entry for each of the `expected` layers.

        Raises:
            UnsupportedModel: some layer has no attention of this kind, or several, or their KV differs in shape.
        """
        if [layer for layer, _ in self._seen] != list(range(expected)):
            raise UnsupportedModel(
                f"{len({layer for layer, _ in self._seen})} of its {expected} layers keep K and V through "
                "transformers' AttentionInterface, each once and in order; all must"
            )
        found = tuple(attention for _, attention in self._seen)
        shapes = {(layer.shape.num_kv_heads, layer.shape.head_dim) for layer in found}
        if len(shapes) != 1:
            raise UnsupportedModel(f"the shape of K and V differs between its layers: {sorted(shapes)}")
        return found

    def _window(self, mask: object) -> int | None:
        if not isinstance(mask, MaskRule):
            raise UnsupportedModel("its layers do not take their masks from transformers' masking functions")
        zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(self._max_len)
        last = self._max_len - 1
        rows = {
            query: mask.visible(zero, zero, torch.tensor(query), keys).expand(self._max_len)
            for query in (last, max(last - 1, 0), last // 2)
        }
        window = int(rows[last].sum())
        for query, seen in rows.items():
            if not torch.equal(seen, (keys <= query) & (keys > query - window)):
                raise UnsupportedModel(
                    "its queries see other positions than all before them, or the last few of those"
                )
        return None if window == self._max_len else window


def probe_tokens(max_len: int) -> list[torch.Tensor]:
    """Token ids of the sequences that are compared: int64, each of at most 8 tokens."""
    return [torch.arange(1, min(length, max_len) + 1) for length in _LENGTHS]


def check_paging(
    run: Callable[[StepInput], torch.Tensor], tokens: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Compare paged attention on several sequences in one batch with the model's own on each alone.

    Args:
        run: logits [T, vocab] of a step over as many blocks of 8 tokens as there are sequences; every row is wanted.
        tokens: as from `probe_tokens`.
        expected: logits [tokens, vocab] of each sequence, by the model's own attention.

    Raises:
        UnsupportedModel: they differ by more than arithmetic does.
    """
    paged, own = run(_step([part.numpy() for part in tokens])), torch.cat(list(expected))
    spread = own.float() - own.float().mean(-1, keepdim=True)
    error = float((paged.float() - own.float()).norm() / spread.norm().clamp_min(1e-6))
    if not error < _TOLERANCE[own.dtype]:
        raise UnsupportedModel(
            f"its logits are off by {error:.0%} when sequences are batched end to end with paged attention: it does "
            "more with a sequence than attention and work on single tokens"
        )


def _step(sequences: Sequence[NDArray[np.int64]]) -> StepInput:
    """All tokens of the sequences, each in a block of its own of 8 tokens."""
    lengths = [len(tokens) for tokens in sequences]
    positions = np.concatenate([np.arange(length) for length in lengths])
    count = len(positions)
    block = np.repeat(np.arange(len(lengths)), lengths)
    empty = np.zeros(0, np.int32)
    return StepInput(
        step_id=0,
        num_decodes=0,
        token_ids=np.concatenate(sequences),
        token_slots=np.full(count, -1, np.int32),
        positions=positions,
        slot_mapping=block * 8 + positions,
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(lengths, np.int32),
        block_tables=np.arange(len(lengths), dtype=np.int32)[:, None],
        sample_rows=np.arange(count, dtype=np.int32),
        sample_slots=np.zeros(count, np.int32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        seeds=np.zeros(count, np.uint64),
        sample_index=np.zeros(count, np.int32),
        sample_positions=positions + 1,
        forbidden_rows=empty,
        forbidden_tokens=empty,
    )
