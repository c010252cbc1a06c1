"""Making a calibration of `tc4`: directions from the KV of texts, steps from what errors in each layer cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.codec_quality.model_runs import SequenceRun, make_runner
from cluster.codec_quality.scoring import mean_kl
from cluster.codec_quality.sections import through_codec
from engine.models.config import read_config
from engine.models.rope import inverse_frequencies
from kv_transfer.codecs.calibration import Calibration
from kv_transfer.codecs.sinks import SINK_TOKENS
from kv_transfer.codecs.tc4 import Tc4Codec, key_turns, rotate_keys
from kv_transfer.conversion import TORCH_DTYPES
from pdcore.errors import ModelError
from pdcore.types import KvGeometry

PROMPT_TOKENS = 448
SCORED_TOKENS = 64
WINDOW_TOKENS = PROMPT_TOKENS + SCORED_TOKENS
_MAX_WIDTH = 256
_PROBED_WINDOWS = 4
_PROBE = 0.4  # step of a probe, in standard deviations of the layer's elements
_SPREAD = 10.0  # a layer counts as at most so many times more or less sensitive than the median
# What the steps are made for, on prompts of _SCALED_TOKENS: 4.0, and what texts of another kind cost. Longer prompts
# come out smaller, for the tokens that are kept are a smaller part of them.
_RATIO = 4.2
_SCALED_TOKENS = 256
_SEARCH_STEPS = 12

Report = Callable[[str, int, int], None]
"""Told what is being done, and how far it is: (what, done, of)."""


def calibrate(folder: Path, dtype: str, windows: Sequence[Sequence[int]], report: Report) -> Calibration:
    """Calibrate `tc4` for the model in `folder`.

    Args:
        dtype: of the served model's cache, bfloat16 or float16.
        windows: token ids, each `WINDOW_TOKENS` long; more of them make better directions.

    Raises:
        ModelError: the model cannot be read, or there are too few windows for its width.
    """
    run = SequenceRun(make_runner(folder, dtype, "float32", WINDOW_TOKENS))
    geometry = replace(run.runner.geometry, dtype=dtype)
    config = read_config(folder)
    frequencies = inverse_frequencies(config.rope, config.head_dim).double().numpy()
    width = group_width(geometry)
    tokens = len(windows) * (PROMPT_TOKENS - SINK_TOKENS)
    if tokens < 4 * width or len(windows) < _PROBED_WINDOWS:
        raise ModelError(
            f"{folder}: {len(windows)} windows of {WINDOW_TOKENS} tokens are too few to calibrate groups of {width} "
            f"dims; give at least {max(_PROBED_WINDOWS, -(-4 * width // PROMPT_TOKENS))}"
        )
    moments = _Moments(geometry, width)
    for number, window in enumerate(windows):
        report("reading KV", number, len(windows))
        run.compute(window[:PROMPT_TOKENS], 0)
        moments.add(run.read_kv(PROMPT_TOKENS).to(TORCH_DTYPES[dtype]), frequencies)
    mean, basis, deviation = moments.directions()
    rough = Calibration(
        geometry.model_digest, geometry.head_dim, mean, basis, (_PROBE * deviation).astype(np.float32), frequencies
    )
    cost = _sensitivity(run, geometry, rough, windows[:_PROBED_WINDOWS], report)
    relative = cost * deviation**2
    middle = np.median(relative)
    # The error of a layer is its sensitivity times its step squared: equal for all layers, the sum is least for a
    # given number of bits. The probes are few, so that no layer's word is taken for more than it can be worth.
    cost = np.clip(relative, middle / _SPREAD, middle * _SPREAD) / deviation**2
    return _scaled(run, geometry, replace(rough, step=(cost**-0.5).astype(np.float32)), windows, report)


def group_width(geometry: KvGeometry) -> int:
    """Elements of the groups of heads that are transformed together: as many whole heads as fit `_MAX_WIDTH`."""
    heads = geometry.num_kv_heads
    fitting = [size for size in range(1, heads + 1) if heads % size == 0 and size * geometry.head_dim <= _MAX_WIDTH]
    return max(fitting, default=1) * geometry.head_dim


class _Moments:
    """First and second moments of every layer's K (before rotation) and V, group by group."""

    def __init__(self, geometry: KvGeometry, width: int) -> None:
        groups = geometry.num_kv_heads * geometry.head_dim // width
        self._count = 0
        self._sum = np.zeros((geometry.num_layers, 2, groups, width))
        self._products = np.zeros((geometry.num_layers, 2, groups, width, width))

    def add(self, kv: torch.Tensor, frequencies: NDArray[np.float64]) -> None:
        """`kv` as `SequenceRun.read_kv` returns it, from position 0 on."""
        numbers = kv.float().numpy()
        layers, _, groups, width = self._sum.shape
        turns = key_turns(0, numbers.shape[2], numbers.shape[3], frequencies)
        for layer in range(layers):
            for kind in (0, 1):
                heads = numbers[layer, kind]
                if kind == 0:
                    heads = rotate_keys(heads, turns, back=True)
                grouped = heads[SINK_TOKENS:].reshape(-1, groups, width).swapaxes(0, 1).astype(np.float64)
                self._sum[layer, kind] += grouped.sum(1)
                self._products[layer, kind] += grouped.swapaxes(1, 2) @ grouped
        self._count += numbers.shape[2] - SINK_TOKENS

    def directions(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
        """Means [L, 2, G, W], bases [L, 2, G, W, W], and the standard deviation of a layer's elements [L, 2]."""
        mean = self._sum / self._count
        covariance = self._products / self._count - mean[..., :, None] * mean[..., None, :]
        variances, vectors = np.linalg.eigh(covariance)
        deviation = np.sqrt(np.maximum(variances, 1e-20).mean(axis=(2, 3)))
        return mean.astype(np.float32), np.ascontiguousarray(vectors[..., ::-1]).astype(np.float32), deviation


def _sensitivity(
    run: SequenceRun, geometry: KvGeometry, rough: Calibration, windows: Sequence[Sequence[int]], report: Report
) -> NDArray[np.float64]:
    """KL per squared step of each layer's K and V alone, [L, 2], measured with the steps of `rough`."""
    dtype = TORCH_DTYPES[geometry.dtype]
    cost = np.zeros((geometry.num_layers, 2))
    codec = Tc4Codec(rough)
    for number, window in enumerate(windows):
        run.compute(window[:PROMPT_TOKENS], 0)
        plain = run.read_kv(PROMPT_TOKENS).to(dtype)
        run.write_kv(plain)
        expected = run.score(window[PROMPT_TOKENS:], PROMPT_TOKENS)
        coded = through_codec(plain, geometry, codec).kv
        for layer in range(geometry.num_layers):
            report("probing layers", number * geometry.num_layers + layer, len(windows) * geometry.num_layers)
            for kind in (0, 1):
                mixed = plain.clone()
                mixed[layer, kind] = coded[layer, kind]
                run.write_kv(mixed)
                cost[layer, kind] += mean_kl(expected, run.score(window[PROMPT_TOKENS:], PROMPT_TOKENS))
    return np.maximum(cost / len(windows), 1e-12) / rough.step.astype(np.float64) ** 2


def _scaled(
    run: SequenceRun,
    geometry: KvGeometry,
    calibration: Calibration,
    windows: Sequence[Sequence[int]],
    report: Report,
) -> Calibration:
    """All steps times one factor, so that the ratio comes out right."""
    samples = []
    for window in windows[:: max(1, len(windows) // _PROBED_WINDOWS)][:_PROBED_WINDOWS]:
        run.compute(window[:_SCALED_TOKENS], 0)
        samples.append(run.read_kv(_SCALED_TOKENS).to(TORCH_DTYPES[geometry.dtype]))
    low, high = -20.0, 20.0  # binary logarithms of the factor
    for number in range(_SEARCH_STEPS):
        report("choosing steps", number, _SEARCH_STEPS)
        factor = np.float32(2 ** ((low + high) / 2))
        codec = Tc4Codec(replace(calibration, step=calibration.step * factor))
        coded = [through_codec(sample, geometry, codec) for sample in samples]
        if sum(c.raw_bytes for c in coded) / sum(c.payload_bytes for c in coded) < _RATIO:
            low = (low + high) / 2
        else:
            high = (low + high) / 2
    return replace(calibration, step=calibration.step * np.float32(2**high))
