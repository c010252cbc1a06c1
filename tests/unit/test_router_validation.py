"""Bad input: every field, with its limit; and the defaults."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pdcore.errors import InvalidRequest, UnknownModel
from pdcore.types import PriorityClass
from protos import generation_pb2
from router.client import Sampling, build_request
from router.tokenizer import SLICE_CHARS, TextModel
from router.validation import GenerationRequest, Limits, tokenize_input, validate
from tests.support.tiny_model import tiny_llama

# The tokenizer knows one token, <|eos|>, that is past this vocabulary.
LIMITS = Limits(context_tokens=64, vocab_size=257)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def no_template(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").unlink()
    return TextModel.load(folder)


async def check(message: generation_pb2.GenerateRequest, model: TextModel) -> GenerationRequest:
    return await validate(message, text_model=model, served_name="tiny", limits=LIMITS, in_flight={"running"})


def ok(**sampling: Any) -> generation_pb2.GenerateRequest:
    return build_request("hello", Sampling(**sampling))


def raw(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**fields)


BAD = {
    "no input": (raw(), "input", "must be set"),
    "empty prompt": (build_request(""), "prompt", "must not be empty"),
    "empty token ids": (build_request([]), "token_ids.ids", "at least one token"),
    "no messages": (raw(chat=generation_pb2.Chat()), "chat.messages", "at least one message"),
    "role": (build_request([{"role": "tool", "content": "x"}]), "chat.messages[0].role", "system, user, assistant"),
    "token id": (build_request([1, 257]), "token_ids.ids[1]", "below the vocabulary size 257, got 257"),
    "text token": (build_request("x<|eos|>"), "prompt[1]", "below the vocabulary size 257, got 257"),
    "prompt length": (build_request("x" * 64), "prompt", "has 64 tokens; .* context of 64 tokens"),
    "token ids length": (build_request([1] * 64), "token_ids.ids", "has 64 tokens"),
    "chat length": (build_request([{"role": "user", "content": "x" * 64}]), "chat", "context of 64 tokens"),
    "hopeless length": (build_request("x" * 10**6), "prompt", "1000000 characters cannot fit"),
    "hopeless chat": (build_request([{"role": "user", "content": "x" * 10**6}]), "chat", "cannot fit"),
    "many messages": (build_request([{"role": "user", "content": ""}] * 65), "chat.messages", "64 tokens, got 65"),
    "prompt and output": (ok(max_tokens=60), "sampling.max_tokens", r"prompt \(5 tokens\).*\(60\).*64"),
    "max_tokens": (ok(max_tokens=0), "sampling.max_tokens", "at least 1"),
    "min_tokens": (ok(max_tokens=5, min_tokens=6), "sampling.min_tokens", r"at most max_tokens \(5\), got 6"),
    "temperature": (ok(temperature=2.5), "sampling.temperature", r"in \[0, 2\], got 2.5"),
    "temperature < 0": (ok(temperature=-0.1), "sampling.temperature", r"in \[0, 2\]"),
    "temperature nan": (ok(temperature=float("nan")), "sampling.temperature", "got nan"),
    "temperature inf": (ok(temperature=float("inf")), "sampling.temperature", "got inf"),
    "top_p 0": (ok(top_p=0.0), "sampling.top_p", r"in \(0, 1\]"),
    "top_p": (ok(top_p=1.5), "sampling.top_p", "got 1.5"),
    "top_p nan": (ok(top_p=float("nan")), "sampling.top_p", "got nan"),
    "min_p": (ok(min_p=1.0), "sampling.min_p", r"in \[0, 1\)"),
    "min_p nan": (ok(min_p=float("nan")), "sampling.min_p", "got nan"),
    "top_k": (ok(top_k=2**31), "sampling.top_k", "at most 2147483647"),
    "stops": (ok(stop=["x"] * 17), "sampling.stop", "at most 16 strings, got 17"),
    "empty stop": (ok(stop=["a", ""]), "sampling.stop[1]", "1 to 256 characters, got 0"),
    "long stop": (ok(stop=["x" * 257]), "sampling.stop[0]", "1 to 256 characters, got 257"),
    "stop token": (ok(stop_token_ids=[3, 257]), "sampling.stop_token_ids[1]", "below the vocabulary size"),
    "stop tokens": (ok(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "at most 64, got 65"),
    "presence": (ok(presence_penalty=2.5), "sampling.presence_penalty", r"in \[-2, 2\], got 2.5"),
    "frequency nan": (ok(frequency_penalty=float("nan")), "sampling.frequency_penalty", "got nan"),
    "repetition": (ok(repetition_penalty=0.0), "sampling.repetition_penalty", r"in \[0.01, 100\], got 0"),
    "repetition nan": (ok(repetition_penalty=float("nan")), "sampling.repetition_penalty", "got nan"),
    "bias": (ok(logit_bias={3: 101.0}), "sampling.logit_bias", r"in \[-100, 100\], got 101 for token 3"),
    "bias nan": (ok(logit_bias={3: float("nan")}), "sampling.logit_bias", "got nan"),
    "bias token": (ok(logit_bias={257: 1.0}), "sampling.logit_bias", "below the vocabulary size 257, got 257"),
    "biases": (
        ok(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias",
        "at most 1024 tokens, got 1025",
    ),
    "allowed": (ok(allowed_token_ids=[1, 257]), "sampling.allowed_token_ids[1]", "below the vocabulary size 257"),
    "none left": (ok(allowed_token_ids=[0], bad_words=["!"]), "sampling.allowed_token_ids", "must leave a token"),
    "no early token": (
        ok(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
        "sampling.allowed_token_ids",
        "must leave a token",
    ),
    "bad words": (ok(bad_words=["x"] * 129), "sampling.bad_words", "at most 128 words, got 129"),
    "empty bad word": (ok(bad_words=["x", ""]), "sampling.bad_words[1]", "1 to 256 characters, got 0"),
    "long bad word": (ok(bad_words=["x" * 257]), "sampling.bad_words[0]", "1 to 256 characters, got 257"),
    "unwritable bad word": (ok(bad_words=["a<|eos|>"]), "sampling.bad_words[0]", "no tokens that this model could"),
    "logprobs": (ok(logprobs=21), "sampling.logprobs", "at most 20, got 21"),
    "prompt logprobs": (ok(prompt_logprobs=21), "sampling.prompt_logprobs", "at most 20, got 21"),
    "codec": (build_request("x", kv_codec="q9"), "kv_codec", "one of auto, raw, zstd, .*fp8, got 'q9'"),
    "salt": (build_request("x", cache_salt="s" * 129), "cache_salt", "at most 128 characters, got 129"),
    "id length": (build_request("x", request_id="a" * 129), "request_id", "at most 128 characters, got 129"),
    "id characters": (build_request("x", request_id="a b"), "request_id", "letters, digits"),
    "id newline": (build_request("x", request_id="a\n"), "request_id", "letters, digits"),
    "id in use": (build_request("x", request_id="running"), "request_id", "is running"),
    "tenant": (build_request("x", tenant="t" * 129), "tenant", "at most 128 characters, got 129"),
    "priority": (raw(prompt="x", priority=9), "priority", "got 9"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("message", "field", "problem"), BAD.values(), ids=BAD.keys())
async def test_bad_input_names_field_and_limit(
    model: TextModel, message: generation_pb2.GenerateRequest, field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await check(message, model)
    assert caught.value.field == field
    assert re.search(problem, caught.value.problem), caught.value.problem


async def test_unknown_model(model: TextModel) -> None:
    with pytest.raises(UnknownModel, match="'other' is not served here; served: tiny"):
        await check(build_request("x", model="other"), model)


async def test_chat_without_a_template(no_template: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await check(build_request([{"role": "user", "content": "x"}]), no_template)


async def test_defaults(model: TextModel) -> None:
    request = await check(build_request("hello"), model)
    params = request.params
    assert params.max_tokens == 59  # what is left of the context
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.stop_token_ids, params.min_tokens) == ((257,), 0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ((), (), ())
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (request.include_stop, request.skip_special) == (False, True)
    assert request.priority is PriorityClass.STANDARD
    assert re.fullmatch("[0-9a-f]{16}", request.request_id)
    other = await check(build_request("hello"), model)
    assert other.params.seed != params.seed
    assert other.request_id != request.request_id


async def test_what_the_client_says_counts(model: TextModel) -> None:
    sampling = Sampling(
        max_tokens=59, temperature=0, top_k=5, top_p=0.5, min_p=0.25, seed=2**64 - 1, stop=["x"],
        stop_token_ids=[7, 7], ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    request = await check(
        build_request("hello", sampling, model="tiny", request_id="a.B-1:_", tenant="t", priority="batch"), model
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (59, 0.0, 5, 0.5)
    assert (params.min_p, params.seed, params.min_tokens) == (0.25, 2**64 - 1, 2)
    assert params.stop_token_ids == (7,)
    assert (request.request_id, request.tenant, request.stops) == ("a.B-1:_", "t", ("x",))
    assert request.priority is PriorityClass.BATCH
    assert (request.kv_codec, request.cache_salt) == ("", "")
    request = await check(build_request("hello", kv_codec="bexp3", cache_salt="tenant 7"), model)
    assert (request.kv_codec, request.cache_salt) == ("bexp3", "tenant 7")


async def test_what_changes_logits(model: TextModel) -> None:
    sampling = Sampling(
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={9: -100.0, 3: 1.5},
        allowed_token_ids=[5, 3, 5],
        logprobs=0,
        prompt_logprobs=20,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    request = await check(build_request("hello", sampling), model)
    params = request.params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2.0, 0.5, 1.25)
    assert params.logit_bias == ((3, 1.5), (9, -100.0))
    assert params.allowed_token_ids == (3, 5)
    assert (params.logprobs, params.prompt_logprobs) == (0, 20)
    assert (request.include_stop, request.skip_special) == (True, False)
    assert (await check(ok(repetition_penalty=0.01), model)).params.repetition_penalty == pytest.approx(0.01)


async def test_bad_words_are_meant_with_and_without_a_space(model: TextModel) -> None:
    ids = {character: (await model.tokenize_words([character]))[0][0] for character in "ab "}
    a, b, space = ids["a"], ids["b"], ids[" "]
    request = await check(ok(bad_words=["a", "ab", " b", " ", "a"]), model)
    assert request.params.bad_words == ((a,), (space, a), (a, b), (space, a, b), (space, b), (space,))


async def test_only_codecs_that_all_workers_have_may_be_asked_for(model: TextModel) -> None:
    limits = Limits(context_tokens=64, vocab_size=257, kv_codecs=frozenset({"raw", "q8"}))

    async def ask(codec: str) -> str:
        message = build_request("x", kv_codec=codec)
        request = await validate(message, text_model=model, served_name="tiny", limits=limits, in_flight=())
        return request.kv_codec

    assert [await ask(codec) for codec in ("", "auto", "raw", "q8")] == ["", "auto", "raw", "q8"]
    with pytest.raises(InvalidRequest, match=r"must be one of auto, raw, q8, got 'tc4', .*pdserve calibrate"):
        await ask("tc4")


async def test_a_seed_of_zero_is_a_seed(model: TextModel) -> None:
    assert (await check(ok(seed=0), model)).params.seed == 0


async def test_generation_config_defaults(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [257, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 10,'
        ' "repetition_penalty": 1.5}'
    )
    model = TextModel.load(folder)
    params = (await check(build_request("hello"), model)).params
    assert params.repetition_penalty == 1.5
    assert (await check(ok(repetition_penalty=1.0), model)).params.repetition_penalty == 1.0
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 10)
    assert params.stop_token_ids == (257, 9)
    params = (await check(ok(temperature=0, top_k=0), model)).params
    assert (params.temperature, params.top_k) == (0.0, 0)


async def test_chat_is_rendered(model: TextModel) -> None:
    request = await check(build_request([{"role": "user", "content": "hi"}]), model)
    assert request.prompt == tuple(await model.tokenize("<user>hi\n<assistant>", 64))


class Encodes:
    """Records how many characters are tokenised at once."""

    def __init__(self, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars: list[int] = []
        encode = model._encode

        def recorded(text: str, *, add_special_tokens: bool) -> list[int]:
            self.chars.append(len(text))
            return encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(model, "_encode", recorded)


LONG = "some words \n" * 60_000
LONG_INPUTS = {
    "prompt": build_request(LONG),
    "chat": build_request([{"role": "user", "content": LONG}]),
}


@pytest.mark.parametrize("kind", LONG_INPUTS)
async def test_of_an_over_long_text_little_is_tokenised(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # By its characters it could fit: 14 of them are one token at best.
    limits = Limits(context_tokens=65_000, vocab_size=512)
    assert len(LONG) < limits.context_tokens * model.max_token_chars
    for message in (LONG_INPUTS[kind], generation_pb2.TokenizeRequest(prompt=LONG)):
        encodes = Encodes(model, monkeypatch)
        with pytest.raises(InvalidRequest, match="more tokens than the context of 65000 tokens") as caught:
            await tokenize_input(message, model, limits)
        assert caught.value.field in (kind, "prompt")
        assert len(encodes.chars) == 1
        assert encodes.chars[0] <= SLICE_CHARS


async def test_a_long_text_that_fits_is_tokenised_as_a_whole(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model._encode(LONG, add_special_tokens=True)
    fits = Limits(context_tokens=len(whole), vocab_size=512)
    encodes = Encodes(model, monkeypatch)
    assert await tokenize_input(build_request(LONG), model, fits) == whole
    *slices, last = encodes.chars
    assert last == len(LONG) == sum(slices)
    assert max(slices) <= SLICE_CHARS
    with pytest.raises(InvalidRequest, match="more"):
        await tokenize_input(build_request(LONG), model, Limits(len(whole) - 1, 512))


@pytest.mark.parametrize("text", ["x" * (3 * SLICE_CHARS + 1), "ab " * SLICE_CHARS, " " * (2 * SLICE_CHARS)])
async def test_slices_refuse_nothing_that_fits(model: TextModel, text: str) -> None:
    whole = model._encode(text, add_special_tokens=True)
    assert await model.tokenize(text, len(whole)) == whole
