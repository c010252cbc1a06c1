"""Ratio, speed and harm of codecs on the KV of a model.

What is compared with what::

    reference   float32 arithmetic over the prompt's KV as it is served: rounded to 16 bits
    a codec     the same, over that KV encoded and decoded
    control     the served arithmetic, 16 bits throughout and no codec, against float32 throughout

so that a codec's figures are of the codec alone, and the control's are what serving the model in 16 bits costs
anyway. Each prompt is followed by tokens of its text, all scored in one pass: nothing is sampled, and no choice made
early changes what comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from cluster.codec_quality.half_products import fast_products
from cluster.codec_quality.model_runs import SequenceRun, make_runner
from cluster.codec_quality.scoring import PromptScore, bootstrap_interval, score_prompt
from cluster.codec_quality.sections import Coded, through_codec
from kv_transfer.codecs.base import Codec
from kv_transfer.conversion import TORCH_DTYPES
from pdcore.types import KvGeometry

PROMPT_TOKENS = 256
CONTROL = "control"

Report = Callable[[str, int, int], None]
"""Told what is being done, and how far it is: (what, done, of)."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec's figures; of the control where `codec` is `CONTROL`.

    Attributes:
        ratio: bytes of the KV over bytes of the payloads; 1 for the control.
        encode_gb_s, decode_gb_s: decoded bytes per second of processor time on one core, 1e9 bytes, in the median
            over prompts; None for the control, and for the decoding of what was all sent raw.
        kl: mean KL divergence of the next token's distribution from the reference's, in nats.
        top1: percentage points by which the likeliest next token is right more often than the reference's, against
            the text. top1_low, top1_high: its 95% interval, by resampling prompts.
        exact_match: share of tokens whose greedy choice is the reference's.
    """

    codec: str
    lossless: bool
    ratio: float
    encode_gb_s: float | None
    decode_gb_s: float | None
    kl: float
    top1: float
    top1_low: float
    top1_high: float
    exact_match: float


@dataclass(slots=True)
class _Tally:
    """What has been seen of one codec."""

    scores: list[PromptScore] = field(default_factory=list)
    coded: list[Coded] = field(default_factory=list)

    def quality(self, name: str, lossless: bool) -> Quality:
        top1 = 100 * np.array([score.top1 for score in self.scores])
        low, high = bootstrap_interval(top1)
        raw = sum(coded.raw_bytes for coded in self.coded)
        return Quality(
            codec=name,
            lossless=lossless,
            ratio=raw / sum(coded.payload_bytes for coded in self.coded) if self.coded else 1.0,
            encode_gb_s=_speed([(coded.raw_bytes, coded.encode_s) for coded in self.coded]),
            decode_gb_s=_speed([(coded.raw_bytes, coded.decode_s) for coded in self.coded]),
            kl=float(np.mean([score.kl for score in self.scores])),
            top1=float(top1.mean()),
            top1_low=low,
            top1_high=high,
            exact_match=float(np.mean([score.exact_match for score in self.scores])),
        )


def measure(
    folder: Path, dtype: str, windows: Sequence[Sequence[int]], codecs: Sequence[Codec], report: Report
) -> list[Quality]:
    """Measure `codecs`, and the control, which comes first.

    Args:
        dtype: of the served model, bfloat16 or float16.
        windows: token ids, `PROMPT_TOKENS` of prompt, then those to be scored and one more, which is only compared
            with; all of the same length.

    Raises:
        ModelError: the model cannot be read.
    """
    half = TORCH_DTYPES[dtype]
    exact = SequenceRun(make_runner(folder, dtype, "float32", len(windows[0])))
    served = SequenceRun(make_runner(folder, dtype, dtype, len(windows[0])))
    geometry: KvGeometry = replace(exact.runner.geometry, dtype=dtype)
    tallies = {name: _Tally() for name in (CONTROL, *(codec.name for codec in codecs))}
    for number, window in enumerate(windows):
        prompt, scored = window[:PROMPT_TOKENS], window[PROMPT_TOKENS:-1]
        following = np.array(window[PROMPT_TOKENS + 1 :])

        def tell(what: str, done: int = number) -> None:
            report(what, done, len(windows))

        tell(CONTROL)
        exact.compute(prompt, 0)
        kv = exact.read_kv(PROMPT_TOKENS).to(half)
        full = exact.score(scored, PROMPT_TOKENS)
        with fast_products(half):
            served.compute(prompt, 0)
            found = served.score(scored, PROMPT_TOKENS)
        tallies[CONTROL].scores.append(score_prompt(full, found, following))
        exact.write_kv(kv)
        expected = exact.score(scored, PROMPT_TOKENS)
        for codec in codecs:
            tell(codec.name)
            coded = through_codec(kv, geometry, codec)
            found = expected  # what equal KV would give once more
            if not torch.equal(coded.kv.view(torch.int16), kv.view(torch.int16)):
                exact.write_kv(coded.kv)
                found = exact.score(scored, PROMPT_TOKENS)
            tallies[codec.name].scores.append(score_prompt(expected, found, following))
            tallies[codec.name].coded.append(replace(coded, kv=kv[:0]))
    lossless = {codec.name: codec.lossless for codec in codecs}
    return [tally.quality(name, lossless.get(name, False)) for name, tally in tallies.items()]


def _speed(runs: Sequence[tuple[int, float]]) -> float | None:
    """The median over prompts: now and then others on the machine slow one down. None if nothing was done."""
    speeds = [num_bytes / seconds for num_bytes, seconds in runs if seconds > 0]
    return float(np.median(speeds)) / 1e9 if speeds else None
