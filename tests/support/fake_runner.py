"""A model runner without a model: small, exact, and unforgiving about the arrays that it is given.

The "model" is causal. The KV of token t encodes the token, its position and a digest that chains the digest read back
from the cache at t - 1; the next token is a hash of the whole context read back through the block table, in every
layer. So a wrong block, slot, position, order of chunks, seed or sample position shows as a wrong token. The cache
can gather and scatter as a real one, so that two fake runners can stand at the two ends of a transfer.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.step import RowLogprobs, StepInput, StepOutput, StepProgress
from pdcore.types import MAX_SAMPLES, FinishReason, KvGeometry, ModelInfo, RequestSpec, SamplingParams

DIGITS = 10  # of base 128, exact in every cache dtype: 3 of the token, 3 of the position, 4 of the digest
_DIGEST_MASK = (1 << 28) - 1


class FakeCache:
    """A paged cache laid out [slot, layer, K or V, head, dim], unlike the wire's layout on purpose."""

    def __init__(self, geometry: KvGeometry) -> None:
        assert geometry.head_dim >= DIGITS, geometry.head_dim
        self.geometry = geometry
        slots = geometry.num_blocks * geometry.block_size
        shape = (slots, geometry.num_layers, 2, geometry.num_kv_heads, geometry.head_dim)
        self.data = torch.full(shape, -1.0, dtype=getattr(torch, geometry.dtype))

    def slots(self, block_ids: Sequence[int], token_start: int, token_count: int) -> torch.Tensor:
        """int64 [token_count]: where tokens of a sequence with this block table live."""
        size = self.geometry.block_size
        positions = torch.arange(token_start, token_start + token_count)
        return torch.as_tensor(list(block_ids), dtype=torch.int64)[positions // size] * size + positions % size

    def gather(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], token_start: int, token_count: int
    ) -> torch.Tensor:
        """As `KvStore.gather`."""
        rows = self.data[self.slots(block_ids, token_start, token_count)]
        return rows[:, layer_start : layer_start + layer_count].permute(1, 2, 0, 3, 4).contiguous()

    def scatter(
        self, layer_start: int, block_ids: Sequence[int], token_start: int, values: torch.Tensor, head_start: int = 0
    ) -> None:
        """As `KvStore.scatter`."""
        slots = self.slots(block_ids, token_start, values.shape[2])
        heads = slice(head_start, head_start + values.shape[3])
        self.data[slots, layer_start : layer_start + values.shape[0], :, heads] = values.permute(2, 0, 1, 3, 4)


class FakeRunner:
    """`ModelRunner` on a `FakeCache`. `steps` counts forward passes, `computed` tokens."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        layers: int = 2,
        kv_heads: int = 2,
        head_dim: int = DIGITS,
        dtype: str = "float32",
        vocab_size: int = 256,
        max_model_len: int = 2048,
        max_num_seqs: int = 64,
    ) -> None:
        digest = f"fake-{layers}-{kv_heads}-{head_dim}-{dtype}-{vocab_size}"
        self.model = ModelInfo("fake", digest, max_model_len, vocab_size, dtype)
        self.geometry = KvGeometry(digest, layers, kv_heads, head_dim, dtype, block_size, num_blocks)
        self.progress = StepProgress()
        self.cache = FakeCache(self.geometry)
        self.steps = 0
        self.computed = 0
        self._last_sampled = np.full(max_num_seqs * MAX_SAMPLES, -1, np.int64)

    def run(self, step: StepInput) -> StepOutput:
        """As `ModelRunner.run`; asserts that `step` is well formed."""
        check_step(step, self.geometry, len(self._last_sampled) // MAX_SAMPLES)
        self.progress.layers_done = 0
        self.progress.step_id = step.step_id
        tokens = np.where(step.token_slots >= 0, self._last_sampled[step.token_slots], step.token_ids)
        digests = np.empty(len(tokens), np.int64)
        for s in range(len(step.context_lens)):
            self._chain(step, s, tokens, digests)
        values = encode(tokens, step.positions, digests, self.geometry)
        slots = torch.from_numpy(step.slot_mapping)
        for layer in range(self.geometry.num_layers):
            self.cache.data[slots, layer] = values[layer].permute(1, 0, 2, 3)
            self.progress.layers_done = layer + 1
        step.await_masks()
        bits = np.unpackbits(step.mask_bits.view(np.uint8), axis=1, bitorder="little").astype(bool)
        allowed = {int(r): row[: self.model.vocab_size] for r, row in zip(step.mask_rows, bits, strict=True)}
        sampled = [self._sample(step, r, allowed) for r in range(len(step.sample_rows))]
        self._last_sampled[step.sample_slots] = sampled
        self.steps += 1
        self.computed += len(tokens)
        logprobs = scores = None
        if step.logprobs is not None:
            wanted = np.array(sampled, np.int64)[step.logprobs >= 0]
            logprobs = fake_logprobs(wanted, int(step.logprobs.max()))
        if step.scores is not None:
            scores = fake_logprobs(step.scores.targets, step.scores.top)
        return StepOutput(np.array(sampled, np.int64), logprobs, scores)

    def _chain(self, step: StepInput, s: int, tokens: NDArray[np.int64], digests: NDArray[np.int64]) -> None:
        start, end = int(step.query_start[s]), int(step.query_start[s + 1])
        digest, first = 0, int(step.positions[start])
        if first > 0:
            row = self.cache.gather(0, 1, step.block_tables[s].tolist(), first - 1, 1)[0, 0, 0, 0]
            digest = sum((int(row[6 + i]) - 6 - i) % 128 << 7 * i for i in range(4))
        for t in range(start, end):
            digest = _extend(digest, int(tokens[t]), int(step.positions[t]))
            digests[t] = digest

    def _sample(self, step: StepInput, r: int, allowed: dict[int, NDArray[np.bool_]]) -> int:
        s = int(np.searchsorted(step.query_start, step.sample_rows[r], side="right")) - 1
        context = self.cache.gather(
            0, self.geometry.num_layers, step.block_tables[s].tolist(), 0, int(step.context_lens[s])
        )
        seed = int(step.seeds[r]) if step.temperature[r] > 0 else 0
        forbidden = set(step.forbidden_tokens[step.forbidden_rows == r].tolist())
        if r in allowed:
            forbidden.update(np.flatnonzero(~allowed[r]).tolist())
        position = int(step.sample_positions[r])
        return _choose(context, seed, int(step.sample_index[r]), position, forbidden, self.model.vocab_size)


def fake_logprobs(tokens: NDArray[np.int64], top: int) -> RowLogprobs:
    """A token's log-probability is minus its id; the likeliest tokens are therefore 0, 1, 2 ..."""
    likeliest = np.broadcast_to(np.arange(top, dtype=np.int32), (len(tokens), top))
    return RowLogprobs(-tokens.astype(np.float32), likeliest, -likeliest.astype(np.float32))


def oracle(runner: FakeRunner, spec: RequestSpec, limit: int | None = None) -> tuple[list[int], FinishReason | None]:
    """What `runner`'s model generates after ``spec.known_tokens``, computed from the tokens alone.

    Stops after `limit` tokens if that comes before the end; the reason is None then.
    """
    tokens = list(spec.known_tokens)
    generated: list[int] = []
    while limit is None or len(generated) < limit:
        token = next_token(runner, tokens, spec.params, len(tokens) - len(spec.prompt), spec.sample)
        tokens.append(token)
        generated.append(token)
        if token in spec.params.stop_token_ids:
            return generated, FinishReason.STOP
        if len(tokens) - len(spec.prompt) >= spec.params.max_tokens:
            return generated, FinishReason.LENGTH
    return generated, None


def next_token(runner: FakeRunner, tokens: Sequence[int], params: SamplingParams, index: int, sample: int = 0) -> int:
    """The token that follows `tokens`; `index` of them were generated."""
    digests, digest = [], 0
    for position, token in enumerate(tokens):
        digest = _extend(digest, token, position)
        digests.append(digest)
    context = encode(np.array(tokens), np.arange(len(tokens)), np.array(digests), runner.geometry)
    forbidden = params.stop_token_ids if index < params.min_tokens else ()
    seed = params.seed if params.temperature > 0 else 0
    return _choose(context, seed, sample, len(tokens), forbidden, runner.model.vocab_size)


def encode(
    tokens: NDArray[np.int64], positions: NDArray[np.int64], digests: NDArray[np.int64], geometry: KvGeometry
) -> torch.Tensor:
    """[layers, 2, tokens, heads, dim]: digits of all three, shifted by layer, K or V, head and dim."""
    digits = np.stack(
        [tokens >> 7 * i for i in range(3)]
        + [positions >> 7 * i for i in range(3)]
        + [digests >> 7 * i for i in range(4)],
        axis=-1,
    )
    values = np.resize(np.arange(DIGITS), geometry.head_dim)
    spread = (
        np.arange(geometry.num_layers)[:, None, None, None, None] * 7
        + np.arange(2)[None, :, None, None, None] * 3
        + np.arange(geometry.num_kv_heads)[None, None, None, :, None] * 5
        + np.arange(geometry.head_dim)
    )
    encoded = (digits[:, values][None, None, :, None, :] + spread) % 128
    return torch.from_numpy(np.ascontiguousarray(encoded)).to(getattr(torch, geometry.dtype))


def check_step(step: StepInput, geometry: KvGeometry, max_num_seqs: int) -> None:
    """Assert that the arrays keep what `StepInput` promises."""
    tokens, seqs, rows = len(step.token_ids), len(step.context_lens), len(step.sample_rows)
    assert 0 < seqs <= max_num_seqs
    for name, dtype, shape in (
        ("token_ids", np.int64, (tokens,)),
        ("token_slots", np.int32, (tokens,)),
        ("positions", np.int64, (tokens,)),
        ("slot_mapping", np.int64, (tokens,)),
        ("query_start", np.int32, (seqs + 1,)),
        ("context_lens", np.int32, (seqs,)),
        ("block_tables", np.int32, (seqs, step.block_tables.shape[1])),
        ("sample_rows", np.int32, (rows,)),
        ("sample_slots", np.int32, (rows,)),
        ("temperature", np.float32, (rows,)),
        ("top_p", np.float32, (rows,)),
        ("min_p", np.float32, (rows,)),
        ("top_k", np.int32, (rows,)),
        ("seeds", np.uint64, (rows,)),
        ("sample_index", np.int32, (rows,)),
        ("sample_positions", np.int64, (rows,)),
        ("forbidden_rows", np.int32, (len(step.forbidden_tokens),)),
        ("forbidden_tokens", np.int32, (len(step.forbidden_tokens),)),
        ("mask_rows", np.int32, (len(step.mask_rows),)),
        ("mask_bits", np.uint32, (len(step.mask_rows), step.mask_bits.shape[1])),
    ):
        array = getattr(step, name)
        assert (array.dtype, array.shape) == (np.dtype(dtype), shape), (name, array.dtype, array.shape)
    if step.logprobs is not None:
        assert (step.logprobs.dtype, step.logprobs.shape) == (np.dtype(np.int32), (rows,))
        assert (step.logprobs >= 0).any()
    if step.scores is not None:
        scored = step.scores
        assert (scored.rows.dtype, scored.targets.dtype) == (np.dtype(np.int32), np.dtype(np.int64))
        assert scored.rows.shape == scored.targets.shape
        assert len(scored.rows) > 0
        assert not set(scored.rows.tolist()) & set(step.sample_rows.tolist()), "the next token of a sample is unknown"
    counts = np.diff(step.query_start)
    assert step.query_start[0] == 0
    assert step.query_start[-1] == tokens
    assert (counts[: step.num_decodes] == 1).all()
    assert (counts[step.num_decodes :] > 1).all()
    assert len(set(step.slot_mapping.tolist())) == tokens, "two tokens are written to one slot"
    assert len(set(step.sample_slots.tolist())) == rows
    assert rows == 0 or step.sample_slots.max() < max_num_seqs * MAX_SAMPLES
    assert (step.block_tables < geometry.num_blocks).all()
    for s in range(seqs):
        start, end, context = int(step.query_start[s]), int(step.query_start[s + 1]), int(step.context_lens[s])
        expected = np.arange(context - counts[s], context)
        assert (step.positions[start:end] == expected).all(), s
        blocks = step.block_tables[s][expected // geometry.block_size].astype(np.int64)
        slots = blocks * geometry.block_size + expected % geometry.block_size
        assert (step.slot_mapping[start:end] == slots).all(), s
    ends = set((step.query_start[1:] - 1).tolist())
    assert set(step.sample_rows.tolist()) <= ends, "only the last token of a sequence is sampled"


def _extend(digest: int, token: int, position: int) -> int:
    return zlib.crc32(b"%d,%d,%d" % (digest, token, position)) & _DIGEST_MASK


def _choose(
    context: torch.Tensor, seed: int, sample: int, position: int, forbidden: Collection[int], vocab_size: int
) -> int:
    digest = zlib.crc32(context.view(torch.uint8).numpy().tobytes())
    token = zlib.crc32(b"%d,%d,%d,%d" % (digest, seed, sample, position)) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token
