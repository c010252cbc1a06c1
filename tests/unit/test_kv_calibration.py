"""Calibrations of tc4: their files, how they are made, and the measurement of codecs that uses them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.codec_quality import samples
from cluster.codec_quality.calibrations import find_calibration
from cluster.codec_quality.fitting import WINDOW_TOKENS, calibrate, group_width
from cluster.codec_quality.half_products import fast_products
from cluster.codec_quality.measuring import CONTROL, PROMPT_TOKENS, measure
from cluster.codec_quality.model_runs import SequenceRun, make_runner, model_geometry
from cluster.codec_quality.scoring import bootstrap_interval, mean_kl, score_prompt
from cluster.codec_quality.sections import through_codec
from kv_transfer.codecs.calibration import Calibration, file_name, load_calibration, save_calibration
from kv_transfer.codecs.registry import STANDARD, worker_codecs
from kv_transfer.codecs.tc4 import Tc4Codec
from pdcore.config import TransferConfig
from pdcore.errors import ConfigError, ModelError
from pdcore.types import KvGeometry
from tests.support.calibrations import random_calibration
from tests.support.tiny_model import tiny_llama

GEOMETRY = KvGeometry("model", 3, 4, 16, "bfloat16", 16, 64)


def example() -> Calibration:
    return random_calibration(layers=3, heads=4, head_dim=16, width=32, step=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def windows_of(model: Path, texts: dict[str, str], size: int, count: int) -> list[list[int]]:
    return samples.cut_windows(list(texts.values()), samples.load_tokenizer(model), size, count)


@pytest.fixture(scope="module")
def calibration(model: Path) -> Calibration:
    windows = windows_of(model, samples.calibration_texts(), WINDOW_TOKENS, 4)
    return calibrate(model, "bfloat16", windows, lambda what, done, of: None)


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = example()
    path = tmp_path / "new" / file_name(saved, "a/b model")
    save_calibration(saved, path)
    assert path.name == f"tc4-a-b-model-{saved.digest().hex()[:16]}.safetensors"
    assert os.listdir(path.parent) == [path.name]
    loaded = load_calibration(path, GEOMETRY)
    assert loaded.digest() == saved.digest()
    for field in dataclasses.fields(saved):
        assert np.array_equal(getattr(saved, field.name), getattr(loaded, field.name))
    assert Tc4Codec(loaded).calibration == saved.digest()[:16]


def test_the_digest_covers_everything() -> None:
    base = example()
    digests = {base.digest()}
    for name in ("mean", "basis", "step", "inverse_frequencies"):
        changed = np.array(getattr(base, name))
        changed.reshape(-1)[-1] += 1e-3
        digests.add(dataclasses.replace(base, **{name: changed}).digest())
    digests.add(dataclasses.replace(base, model_digest="other").digest())
    digests.add(dataclasses.replace(base, head_dim=32).digest())
    assert len(digests) == 7


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    save_calibration(example(), path)
    whole = path.read_bytes()
    places = np.random.default_rng(0).integers(0, len(whole), 300)
    for place in (*places.tolist(), *range(16)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"transfer\.calibration"):
            load_calibration(path, GEOMETRY)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"transfer\.calibration"):
            load_calibration(path, GEOMETRY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_digest": "other"}, "made for model model, this is other"),
        ({"num_layers": 4}, "layers"),
        ({"num_kv_heads": 2}, "heads"),
        ({"head_dim": 8}, "head_dim"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "calibration.safetensors"
    save_calibration(example(), path)
    with pytest.raises(ConfigError, match=words):
        load_calibration(path, dataclasses.replace(GEOMETRY, **change))  # type: ignore[arg-type]


def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path: Path, model: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, model / "model.safetensors"):
        with pytest.raises(ConfigError, match="pdserve calibrate"):
            load_calibration(path, GEOMETRY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", np.zeros((3, 2), np.float32)),
        ("step", np.full((3, 2), -1, np.float32)),
        ("step", np.full((3, 2), np.nan, np.float32)),
        ("step", np.ones((3, 1), np.float32)),
        ("step", np.ones((3, 2), np.float64)),
        ("mean", np.zeros((3, 2, 2, 24), np.float32)),
        ("mean", np.zeros((0, 2, 2, 32), np.float32)),
        ("basis", np.zeros((3, 2, 2, 32, 31), np.float32)),
        ("inverse_frequencies", np.full(8, np.inf)),
    ],
)
def test_parts_that_do_not_fit_are_found(name: str, value: np.ndarray) -> None:
    assert example().problem() is None
    assert name in str(dataclasses.replace(example(), **{name: value}).problem())


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.safetensors"
    save_calibration(example(), path)
    before = path.read_bytes()

    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("kv_transfer.codecs.calibration.os.replace", full)
    other = random_calibration(layers=3, heads=4, head_dim=16, width=32, step=0.1)
    with pytest.raises(OSError, match="no space"):
        save_calibration(other, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_workers_have_tc4_if_they_have_its_file(tmp_path: Path) -> None:
    assert worker_codecs("", GEOMETRY) is STANDARD
    path = tmp_path / "calibration.safetensors"
    save_calibration(example(), path)
    codecs = worker_codecs(str(path), GEOMETRY)
    assert set(codecs.names) == {*STANDARD.names, "tc4"}
    assert codecs.find("tc4", example().digest()[:16]) is codecs["tc4"]
    assert codecs.find("tc4", bytes(range(16))) is None
    with pytest.raises(ConfigError):
        worker_codecs(str(tmp_path / "missing"), GEOMETRY)


def test_configured_tc4_needs_a_calibration() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.calibration"):
        TransferConfig(codec="tc4")
    assert TransferConfig(codec="tc4", calibration="file").codec == "tc4"


def test_the_newest_usable_file_is_found(tmp_path: Path) -> None:
    assert find_calibration(GEOMETRY, tmp_path / "missing") is None
    made = [random_calibration(layers=3, heads=4, head_dim=16, width=32, step=step) for step in (0.1, 0.2)]
    other = random_calibration(layers=3, heads=4, head_dim=16, width=32, step=0.3, model_digest="other")
    for age, calibration in enumerate((*made, other)):
        path = tmp_path / file_name(calibration, "m")
        save_calibration(calibration, path)
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "tc4-m-damaged.safetensors").write_bytes(b"no")
    found = find_calibration(GEOMETRY, tmp_path)
    assert found is not None
    assert found[1].digest() == made[1].digest()


# --- making one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "head_dim", "width"),
    [(3, 64, 192), (8, 128, 256), (8, 64, 256), (5, 64, 64), (2, 16, 32), (4, 512, 512)],
)
def test_heads_are_grouped_up_to_a_width(heads: int, head_dim: int, width: int) -> None:
    assert group_width(KvGeometry("m", 1, heads, head_dim, "bfloat16", 16, 1)) == width


def test_a_calibration_fits_its_model(model: Path, calibration: Calibration) -> None:
    geometry = model_geometry(model, "bfloat16")
    assert calibration.problem() is None
    assert calibration.misfit(geometry) is None
    assert calibration.misfit(model_geometry(model, "float16")) is None, "the same directions in another type"
    assert calibration.misfit(replace(geometry, model_digest="other")) is not None
    product = calibration.basis.swapaxes(-1, -2) @ calibration.basis
    assert np.allclose(product, np.eye(calibration.width), atol=1e-5)
    # It does what it was made for, on other texts too.
    windows = windows_of(model, samples.evaluation_texts(), PROMPT_TOKENS, 3)
    run = SequenceRun(make_runner(model, "bfloat16", "float32", PROMPT_TOKENS))
    raw, payload = 0, 0
    for window in windows:
        run.compute(window, 0)
        kv = run.read_kv(PROMPT_TOKENS).bfloat16()
        coded = through_codec(kv, geometry, Tc4Codec(calibration))
        raw, payload = raw + coded.raw_bytes, payload + coded.payload_bytes
        assert torch.equal(coded.kv[:, :, :4], kv[:, :, :4])
        error = (coded.kv[:, :, 4:].float() - kv[:, :, 4:].float()).square().mean(dim=(2, 3, 4))
        assert (error < 1.3 * torch.from_numpy(calibration.step).square() / 12 + 1e-4).all()
    assert 3.3 < raw / payload < 4.7


def test_directions_are_those_of_keys_before_rotation(model: Path, calibration: Calibration) -> None:
    """Moving a text to other positions changes its rotated keys, and not what tc4 makes of them."""
    run = SequenceRun(make_runner(model, "bfloat16", "float32", 512))
    (window,) = windows_of(model, samples.evaluation_texts(), 256, 1)
    run.compute(window, 0)
    kv = run.read_kv(256)[:1, :, 4:]  # the first layer's depend on the token and its position alone
    run.compute(window[:1] * 200 + window, 0)
    moved = run.read_kv(456)[:1, :, 204:]
    assert torch.allclose(kv[:, 1], moved[:, 1], atol=1e-5)
    assert not torch.allclose(kv[:, 0], moved[:, 0], atol=0.1)
    codec = Tc4Codec(calibration)
    geometry = model_geometry(model, "bfloat16")
    from kv_transfer.codecs.base import SectionShape

    sizes = []
    for keys, start in ((kv, 4), (moved, 204)):
        values = keys[:, 0].contiguous().bfloat16().view(torch.uint8).numpy().reshape(-1)
        shape = SectionShape(0, "bfloat16", 0, 1, start, 252, 0, geometry.num_kv_heads, geometry.head_dim)
        parts = codec.encode(values, shape)
        assert parts is not None
        sizes.append(sum(len(part) for part in parts))
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]


def test_too_few_texts_are_refused(model: Path) -> None:
    windows = windows_of(model, samples.calibration_texts(), WINDOW_TOKENS, 2)
    with pytest.raises(ModelError, match="give at least 4"):
        calibrate(model, "bfloat16", windows, lambda what, done, of: None)


# --- measuring ------------------------------------------------------------------------------------------------------


def test_lossless_codecs_change_nothing_and_lossy_ones_little(model: Path, calibration: Calibration) -> None:
    windows = windows_of(model, samples.evaluation_texts(), PROMPT_TOKENS + 17, 3)
    seen = []
    codecs = [*STANDARD, Tc4Codec(calibration)]
    results = measure(model, "bfloat16", windows, codecs, lambda what, done, of: seen.append((what, done, of)))
    by_name = {line.codec: line for line in results}
    assert list(by_name) == [CONTROL, *(codec.name for codec in codecs)]
    assert set(seen) == {(name, number, 3) for name in by_name for number in range(3)}
    control = by_name.pop(CONTROL)
    assert (control.ratio, control.encode_gb_s, control.decode_gb_s, control.lossless) == (1.0, None, None, False)
    assert 0 < control.kl < 0.1
    for name, line in by_name.items():
        assert line.encode_gb_s is not None
        assert line.decode_gb_s is not None
        assert line.top1_low <= line.top1 <= line.top1_high
        if line.lossless:
            assert (line.kl, line.exact_match, line.top1, line.top1_low, line.top1_high) == (0, 1, 0, 0, 0), name
        else:
            assert 0 < line.kl < 1, name
            assert 0.5 < line.exact_match <= 1, name
    assert by_name["raw"].ratio == 1
    assert by_name["q8"].kl < by_name["k6v4"].kl < by_name["k4v4"].kl
    assert by_name["q8"].kl < by_name["fp8"].kl
    assert by_name["q8"].ratio == pytest.approx(16 / (8 + 16 / 16))  # a scale for each 16 dims


def test_a_lossless_codec_that_loses_is_found_out(model: Path) -> None:
    """The figures come from what was decoded, not from what a codec says of itself."""

    class Liar:
        name, version, lossless, dtypes = "raw", 1, True, ("bfloat16",)
        calibration = parameters = bytes(16)

        def encode(self, values: np.ndarray, shape: object) -> list[memoryview]:
            return [values.data]

        def decode(self, payload: memoryview, shape: object, out: np.ndarray) -> None:
            out[:] = np.frombuffer(payload, np.uint8)
            out[1::2] ^= 1

    windows = windows_of(model, samples.evaluation_texts(), PROMPT_TOKENS + 9, 1)
    _, line = measure(model, "bfloat16", windows, [Liar()], lambda what, done, of: None)
    assert line.kl > 0
    assert line.exact_match < 1


def test_scores_are_what_they_say() -> None:
    expected = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]))
    found = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.2, 0.2, 0.6]]))
    kl = sum((p.exp() * (p - q)).sum() for p, q in zip(expected.double(), found.double(), strict=True)) / 3
    score = score_prompt(expected, found, np.array([0, 2, 0]))
    assert score.kl == pytest.approx(float(kl), rel=1e-6)
    assert score.top1 == pytest.approx(2 / 3 - 1 / 3)
    assert score.exact_match == pytest.approx(2 / 3)
    assert mean_kl(expected, expected.clone()) == 0
    assert mean_kl(expected, expected + 3.0) == pytest.approx(0, abs=1e-12)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval(draw.normal(0.3, 1.0, 40))
        covered += low <= 0.3 <= high
    assert covered >= 88
    assert bootstrap_interval(np.zeros(5)) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_products_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(9, 64, generator=draw).to(dtype), torch.randn(32, 64, generator=draw).to(dtype)
    a, b = torch.randn(3, 8, 64, generator=draw).to(dtype), torch.randn(3, 64, 5, generator=draw).to(dtype)
    plain = (torch.nn.functional.linear(rows, weight), torch.bmm(a, b))
    with fast_products(dtype):
        widened = (torch.nn.functional.linear(rows, weight), torch.bmm(a, b))
    for one, other in zip(plain, widened, strict=True):
        assert other.dtype is dtype
        torch.testing.assert_close(one, other)


# --- texts ----------------------------------------------------------------------------------------------------------


def test_windows_are_of_one_size_and_share_nothing(model: Path) -> None:
    tokenizer = samples.load_tokenizer(model)
    texts = ["abcdefghij" * 3, "0123456789", "xyz"]
    windows = samples.cut_windows(texts, tokenizer, 8, 10)
    decoded = [tokenizer.decode(window) for window in windows]  # type: ignore[attr-defined]
    assert decoded == ["abcdefgh", "01234567", "ijabcdef", "ghijabcd"]
    assert samples.cut_windows(texts, tokenizer, 8, 2) == windows[:2]


def test_texts_for_measuring_and_for_calibrating_are_different() -> None:
    measured, calibrated = samples.evaluation_texts(), samples.calibration_texts()
    assert sum(map(len, measured.values())) > 50_000
    assert sum(map(len, calibrated.values())) > 100_000
    lines = {line for text in calibrated.values() for line in text.splitlines() if len(line) > 40}
    assert not [line for text in measured.values() for line in text.splitlines() if len(line) > 40 and line in lines]
