"""The quick look at codec speeds: every codec that fits has costs that make sense."""

from __future__ import annotations

import pytest

from kv_transfer.codec_speed import assumed_costs, quick_costs
from kv_transfer.codecs.registry import STANDARD
from kv_transfer.frames import CODEC_IDS, LOSSLESS_CODECS
from pdcore.types import KvGeometry


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (30, 3, 64), (2, 64, 256)])
def test_every_codec_that_fits_has_costs(dtype: str, shape: tuple[int, int, int]) -> None:
    geometry = KvGeometry("digest", *shape, dtype, 16, 64)
    assumed, looked = assumed_costs(STANDARD, dtype), quick_costs(STANDARD, geometry)
    assert set(looked) == set(assumed) == {codec.name for codec in STANDARD if dtype in codec.dtypes}
    for name, cost in looked.items():
        assert cost.name == name
        assert cost.lossless == (name in LOSSLESS_CODECS)
        assert cost.ratio == assumed[name].ratio >= 1
        assert 1e5 < cost.encode_bytes_s < 1e12
        assert 1e5 < cost.decode_bytes_s < 1e12
    assert looked["raw"].ratio == 1


def test_nothing_is_assumed_twice_or_forgotten() -> None:
    from kv_transfer import codec_speed

    assert set(codec_speed._RATIOS) == set(codec_speed._RATES) == set(CODEC_IDS)
