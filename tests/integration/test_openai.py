"""OpenAI's own client against a router: what it asks for, how it is answered, and which of its errors it raises."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pdcore.classes import TenantLimits
from pdcore.types import Role
from protos import worker_pb2
from tests.integration.test_router_flow import Gate
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker, token_of
from tests.support.tiny_model import tiny_llama

KEY = "sk-test-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def client_of(cluster: NullCluster, **options: Any) -> openai.AsyncOpenAI:
    base = f"http://{cluster.router.http_address}/v1"
    return openai.AsyncOpenAI(**({"base_url": base, "api_key": "none", "max_retries": 0} | options))


def text_of(cluster: NullCluster, prompt: list[int], count: int, sample: int = 0) -> str:
    """What null workers answer."""
    tokens = [token_of(tuple(prompt), index, sample) for index in range(count)]
    return "".join(cluster.text.token_bytes(token).decode() for token in tokens)


class Cluster(NullCluster):
    """A null cluster with HTTP, and a client. `api`: OpenAI's."""

    def __init__(self, model_path: Path, workers: list[NullWorker] | None = None, **options: Any) -> None:
        super().__init__(model_path, workers or pair(), http_port=0, **options)

    async def __aenter__(self) -> Cluster:
        await super().__aenter__()
        self.api = client_of(self)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.api.close()
        await super().__aexit__(*details)

    @property
    def text(self) -> Any:
        return self.router._text_model

    def tokens(self, text: str) -> list[int]:
        """Of a text; the tiny tokenizer has one for each byte."""
        return [int(self.text._tokenizer.token_to_id(character)) for character in text.replace(" ", "Ġ")]


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with Cluster(model) as running:
        yield running


# -- answers --------------------------------------------------------------------------------------------------------


async def test_a_completion_and_its_stream(cluster: Cluster) -> None:
    prompt = cluster.tokens("hello")
    whole = await cluster.api.completions.create(model="null", prompt="hello", max_tokens=9)
    assert whole.object == "text_completion"
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason, choice.index) == (text_of(cluster, prompt, 9), "length", 0)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 9, 14)
    stream = await cluster.api.completions.create(
        model="null", prompt=prompt, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    *events, last = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == choice.text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event.usage is None for event in events)
    assert not last.choices
    assert last.usage == whole.usage
    assert len({event.id for event in [*events, last]}) == 1


async def test_every_event_may_tell_the_tokens_so_far(cluster: Cluster) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    completions = await cluster.api.completions.create(
        model="null", prompt=["hello", "you"], max_tokens=6, n=2, stream=True, stream_options=options
    )
    so_far = {index: 0 for index in range(4)}
    async for event in completions:
        assert event.usage is not None
        if not event.choices:
            assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (5 + 3, 4 * 6)
            continue
        (choice,) = event.choices
        assert event.usage.prompt_tokens == (5 if choice.index < 2 else 3)
        assert event.usage.completion_tokens >= so_far[choice.index]
        assert event.usage.total_tokens == event.usage.prompt_tokens + event.usage.completion_tokens
        so_far[choice.index] = event.usage.completion_tokens
    assert set(so_far.values()) == {6}
    messages: Any = [{"role": "user", "content": "hi"}]
    chat = await cluster.api.chat.completions.create(
        model="null", messages=messages, max_tokens=6, stream=True, stream_options=options
    )
    counts = [event.usage.completion_tokens async for event in chat if event.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 6


async def test_a_chat_and_its_stream(cluster: Cluster) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
    ]
    rendered = "<system>be brief\n<user>hi\nthere\n<assistant>".replace("\n", "Ċ")
    prompt = cluster.tokens(rendered)
    whole = await cluster.api.chat.completions.create(model="null", messages=messages, max_completion_tokens=8)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text_of(cluster, prompt, 8)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    stream = await cluster.api.chat.completions.create(model="null", messages=messages, max_tokens=8, stream=True)
    events = [event async for event in stream]
    assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == "length"
    assert "usage" not in events[0].model_fields_set
    text = str(whole.choices[0].message.content)
    async with cluster.api.chat.completions.stream(model="null", messages=messages, stop=text[4:7]) as helper:
        final = await helper.get_final_completion()
    assert final.choices[0].message.content == text[:4]


async def test_several_samples_and_several_prompts(cluster: Cluster) -> None:
    prompts = ["ab", "cde"]
    whole = await cluster.api.completions.create(model="null", prompt=prompts, max_tokens=6, n=2)
    wanted = [text_of(cluster, cluster.tokens(p), 6, sample) for p in prompts for sample in range(2)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == wanted
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 24)
    lists = [cluster.tokens(p) for p in prompts]
    stream = await cluster.api.completions.create(model="null", prompt=lists, max_tokens=6, n=2, stream=True)
    texts = [""] * 4
    ends = 0
    async for event in stream:
        texts[event.choices[0].index] += event.choices[0].text
        ends += event.choices[0].finish_reason == "length"
    assert (texts, ends) == (wanted, 4)


async def test_stop_strings_end_an_answer(cluster: Cluster) -> None:
    text = text_of(cluster, cluster.tokens("hello"), 12)
    for stop in (text[4:6], [text[4:6], "\u00e9never"]):
        answer = await cluster.api.completions.create(model="null", prompt="hello", max_tokens=12, stop=stop)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:4], "stop")
    answer = await cluster.api.completions.create(
        model="null", prompt="hello", max_tokens=12, stop=text[4:6], extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == text[:6]


async def test_echo(cluster: Cluster) -> None:
    text = text_of(cluster, cluster.tokens("hello"), 4)
    for prompt in ("hello", cluster.tokens("hello")):
        answer = await cluster.api.completions.create(model="null", prompt=prompt, max_tokens=4, echo=True)
        assert answer.choices[0].text == "hello" + text
    stream = await cluster.api.completions.create(
        model="null", prompt=["hello", "x"], max_tokens=4, echo=True, stream=True
    )
    texts = ["", ""]
    async for event in stream:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == ["hello" + text, "x" + text_of(cluster, cluster.tokens("x"), 4)]
    answer = await cluster.api.completions.create(model="null", prompt="hello", max_tokens=0, echo=True)
    assert answer.choices[0].text == "hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_every_field_reaches_the_worker(model: Path) -> None:
    seen: list[worker_pb2.WorkerRequest] = []

    def look(command: str, request: worker_pb2.WorkerRequest) -> None:
        seen.append(request)

    worker = NullWorker("a0", Role.AGGREGATED, refuse=look)
    async with Cluster(model, [worker]) as cluster:
        answer = await cluster.api.chat.completions.create(
            model="null",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=3,
            temperature=0.5,
            top_p=0.75,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            seed=-1,
            logit_bias={"5": -3, "7": 100},
            user="me",
            store=False,
            metadata={"a": "b"},
            extra_body={
                "top_k": 20,
                "min_p": 0.25,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [99, 98],
                "allowed_token_ids": list(range(98)),
                "bad_words": ["a"],
                "guided_choice": ["a", "b"],
                "priority": "interactive",
                "request_id": "mine",
                "cache_salt": "salt",
                "best_of": None,
            },
        )
        assert answer.id == "chatcmpl-mine"
    (request,) = seen
    sampling = request.sampling
    assert request.request_id == "mine"
    assert request.cache_salt == "salt"
    assert request.request_class == worker_pb2.REQUEST_CLASS_INTERACTIVE
    assert sampling.seed == 2**64 - 1
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) == (0.5, 0.75, 0.25, 20)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.max_tokens) == (1.5, 2, 3)
    assert list(sampling.stop_token_ids) == [99, 98]
    assert dict(zip(sampling.bias_token_ids, sampling.biases, strict=True)) == {5: -3, 7: 100}
    assert list(sampling.allowed_token_ids) == list(range(98))
    assert sampling.bad_words
    assert list(sampling.structured_output.choice.choices) == ["a", "b"]


async def test_models_tokens_and_version(cluster: Cluster) -> None:
    (card,) = (await cluster.api.models.list()).data
    assert (card.id, card.object, card.max_model_len) == ("null", "model", 4096)  # type: ignore[attr-defined]
    assert (await cluster.api.models.retrieve("null")).id == "null"
    with pytest.raises(openai.NotFoundError) as unknown:
        await cluster.api.models.retrieve("some/other")
    assert unknown.value.code == "model_not_found"
    root = cluster.api.with_options(base_url=f"http://{cluster.router.http_address}")
    counted: Any = await root.post("/tokenize", cast_to=object, body={"prompt": "abc", "return_token_strs": True})
    assert counted == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": cluster.tokens("abc"),
        "token_strs": ["a", "b", "c"],
    }
    chat = {"messages": [{"role": "user", "content": "x"}]}
    counted = await root.post("/tokenize", cast_to=object, body=chat)
    assert counted["tokens"] == cluster.tokens("<user>xĊ<assistant>")
    text: Any = await root.post("/detokenize", cast_to=object, body={"tokens": counted["tokens"]})
    assert text == {"prompt": "<user>x\n<assistant>"}
    with pytest.raises(openai.BadRequestError) as refused:
        await root.post("/detokenize", cast_to=object, body={"tokens": [1, 600]})
    assert refused.value.param == "tokens[1]"
    version: Any = await root.get("/version", cast_to=object)
    assert version["version"]


async def test_cached_prompt_tokens_are_told(cluster: Cluster) -> None:
    cluster["p0"].cached_tokens = 3
    for n, stream in ((1, False), (2, False), (1, True), (2, True)):
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await cluster.api.completions.create(model="null", prompt="hello", max_tokens=2, n=n, **options)
        usage = [event async for event in answer][-1].usage if stream else answer.usage
        assert usage.prompt_tokens == 5
        assert usage.prompt_tokens_details.cached_tokens == 3
    several = await cluster.api.completions.create(model="null", prompt=["hello", "world!"], max_tokens=2, n=2)
    assert several.usage.prompt_tokens == 5 + 6
    assert several.usage.prompt_tokens_details.cached_tokens == 3 + 3


async def test_a_template_and_a_length_of_the_configuration(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}, {{ 'thinking' if enable_thinking is not false else 'at once' }}:")
    async with Cluster(model, chat_template=str(template), default_max_tokens=3) as cluster:
        for fields, prompt in (
            ({}, "Why, thinking:"),
            ({"reasoning_effort": "none"}, "Why, at once:"),
            ({"reasoning_effort": None}, "Why, thinking:"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "Why, thinking:"),
        ):
            messages: Any = [{"role": "user", "content": "Why"}]
            answer = await cluster.api.chat.completions.create(model="null", messages=messages, extra_body=fields)
            expected = text_of(cluster, cluster.text._encode(prompt, add_special_tokens=False), 3)
            assert answer.choices[0].message.content == expected, fields
        response = await cluster.api.responses.create(model="null", input="Why", reasoning={"effort": "none"})
        expected = text_of(cluster, cluster.text._encode("Why, at once:", add_special_tokens=False), 3)
        assert response.output_text == expected
        assert response.reasoning is not None
        assert response.reasoning.effort == "none"


# -- errors ---------------------------------------------------------------------------------------------------------


BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 9}),
    ("temperature", {"temperature": "warm"}),
    ("top_p", {"top_p": 0}),
    ("n", {"n": 17}),
    ("n", {"n": 1.5}),
    ("max_tokens", {"max_tokens": 10**9}),
    ("max_tokens", {"max_tokens": 0}),
    ("best_of", {"best_of": 3}),
    ("suffix", {"suffix": "x"}),
    ("reasoning_effort", {"reasoning_effort": "none"}),  # a plain text has none
    ("stop", {"stop": 5}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("logprobs", {"logprobs": 21}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.foo", {"stream": True, "stream_options": {"foo": 1}}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt[1]", {"prompt": ["a", ""]}),
    ("prompt[1][0]", {"prompt": [[1], [600]]}),
    ("foo", {"foo": 1}),
    ("use_beam_search", {"use_beam_search": True}),
    ("ebnf", {"regex": "a", "ebnf": "b"}),
    ("guided_regex", {"guided_regex": "("}),
    ("structured_outputs.json", {"structured_outputs": {"json": "no schema"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("request_id", {"request_id": "no spaces"}),
    ("priority", {"priority": 3}),
]
TEXT = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "image_url": None}
BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "judge", "content": "x"}]}),
    ("messages[1].content", {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (
        "messages[0].content[1].image_url",
        {"messages": [{"role": "user", "content": [TEXT, TEXT | {"image_url": {"url": "https://a"}}]}]},
    ),
    ("messages[0].audio", {"messages": [{"role": "user", "content": "x", "audio": {}}]}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("max_completion_tokens", {"max_completion_tokens": 10**9}),
    ("max_tokens", {"max_completion_tokens": 5, "max_tokens": 6}),
    ("modalities[0]", {"modalities": ["audio"]}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("verbosity", {"verbosity": "low"}),
    ("audio", {"audio": {}}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
]


async def test_bad_requests_name_their_parameter(cluster: Cluster) -> None:
    completions, chats = cluster.api.completions, cluster.api.chat.completions
    for param, fields in BAD_COMPLETIONS:
        with pytest.raises(openai.BadRequestError) as caught:
            await completions.create(model="null", prompt="x", max_tokens=3, extra_body=fields)
        told: Any = caught.value.body
        assert caught.value.param == param, told
        assert caught.value.type == "invalid_request_error"
        assert told["message"].startswith(param)
        assert caught.value.request_id
    for param, fields in BAD_CHATS:
        with pytest.raises(openai.BadRequestError) as caught:
            await chats.create(model="null", messages=[{"role": "user", "content": "x"}], extra_body=fields)
        assert caught.value.param == param, caught.value.body
    await cluster.empty()  # of several prompts the good ones may have been begun


async def test_unknown_models_and_paths(cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as model_error:
        await cluster.api.completions.create(model="gpt", prompt="x")
    assert (model_error.value.code, model_error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as path_error:
        await cluster.api.embeddings.create(model="null", input="x")
    assert path_error.value.code == "not_found"
    lost = cluster.api.with_options(base_url=str(cluster.api.base_url).removesuffix("v1/"))
    with pytest.raises(openai.NotFoundError, match=r"no /models here, but /v1/models: .* ends with /v1"):
        await lost.models.list()
    with pytest.raises(openai.APIStatusError) as method_error:
        await cluster.api.get("/completions", cast_to=object)
    assert method_error.value.status_code == 405
    assert method_error.value.response.headers["allow"] == "POST"


async def test_keys_say_whose_a_request_is(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({hashlib.sha256(KEY.encode()).hexdigest(): "acme"}))
    limits = (TenantLimits("acme", requests_per_minute=2),)
    async with Cluster(model, api_keys_file=str(keys), tenants=limits) as cluster:
        with pytest.raises(openai.AuthenticationError) as caught:
            await cluster.api.models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        # What they are called elsewhere is of no interest.
        async with client_of(cluster, api_key=KEY, organization="of OpenAI") as acme:
            assert (await acme.models.list()).data
            for _ in range(2):
                await acme.completions.create(model="null", prompt="x", max_tokens=1)
            with pytest.raises(openai.RateLimitError) as limited:
                await acme.completions.create(model="null", prompt="x", max_tokens=1)
        headers = limited.value.response.headers
        assert limited.value.code == "rate_limit_exceeded"
        assert 1 <= int(headers["retry-after"]) <= 30
        assert 0 < int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])


async def test_who_waits_no_longer_is_told_so(model: Path) -> None:
    """A client of OpenAI's making says how long it waits for a whole answer, a proxy for a stream as well."""
    gate = Gate("prefill")
    workers = pair()
    workers[0].hook = gate
    async with Cluster(model, workers) as cluster:
        for headers, stream in (
            ({"x-stainless-read-timeout": "0.4"}, False),
            ({"x-envoy-expected-rq-timeout-ms": "400"}, True),
        ):
            with pytest.raises(openai.InternalServerError) as late:
                await cluster.api.completions.create(
                    model="null", prompt="x", max_tokens=3, stream=stream, extra_headers=headers
                )
            assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        await cluster.empty()


async def test_ids_of_headers(model: Path) -> None:
    gate = Gate("token", index=1)
    workers = pair()
    workers[1].hook = gate
    async with Cluster(model, workers) as cluster:
        call = asyncio.ensure_future(
            cluster.api.completions.with_raw_response.create(
                model="null", prompt="x", max_tokens=3, extra_headers={"x-request-id": "from-outside"}
            )
        )
        await gate.reached.wait()
        assert cluster.dispatcher.cancel("from-outside", None)
        with pytest.raises(openai.APIStatusError) as caught:
            await call
        assert (caught.value.status_code, caught.value.code) == (499, "cancelled")
        assert caught.value.request_id == "from-outside"
        await cluster.empty()


# -- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", ["reserve", "prefill", "token"])
async def test_a_client_that_goes_frees_its_place_at_once(model: Path, stream: bool, point: str) -> None:
    gate = Gate(point, index=2 if point == "token" else 0)
    workers = pair()
    for worker in workers:
        worker.hook = gate
    async with Cluster(model, workers) as cluster:

        async def ask() -> None:
            answer = await cluster.api.completions.create(
                model="null", prompt="hello", max_tokens=50, n=2, stream=stream
            )
            if stream:
                async for _ in answer:
                    pass

        call = asyncio.ensure_future(ask())
        await gate.reached.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not cluster.dispatcher.running, "the request is over")
        gate.opened.set()
        await cluster.empty()
        assert (await cluster.api.completions.create(model="null", prompt="x", max_tokens=2)).choices


async def test_an_error_amid_a_stream_is_an_event(model: Path) -> None:
    gate = Gate("token", index=3)
    worker = NullWorker("a0", Role.AGGREGATED, hook=gate)
    async with Cluster(model, [worker], max_replays=0) as cluster:
        stream = await cluster.api.completions.create(model="null", prompt="x", max_tokens=9, stream=True)
        texts = []

        async def read() -> None:
            async for event in stream:
                texts.append(event.choices[0].text)

        reading = asyncio.ensure_future(read())
        await gate.reached.wait()
        await until(lambda: bool(texts), "a token was streamed")
        await worker.crash()
        with pytest.raises(openai.APIError) as caught:
            await reading
        assert caught.value.code in ("replays_exhausted", "no_worker")
        # The same before the first token has a status of its own.
        with pytest.raises(openai.InternalServerError) as refused:
            await cluster.api.completions.create(model="null", prompt="x", max_tokens=9, stream=True)
        assert refused.value.status_code == 503


async def test_draining_refuses_new_requests_and_lets_streams_end(model: Path) -> None:
    gate = Gate("token", index=2)
    workers = pair()
    workers[1].hook = gate
    async with Cluster(model, workers) as cluster:
        stream = await cluster.api.completions.create(model="null", prompt="hello", max_tokens=6, stream=True)
        await gate.reached.wait()
        draining = asyncio.ensure_future(cluster.router.drain(20.0))
        await until(lambda: cluster.dispatcher.draining, "it drains")
        with pytest.raises(openai.InternalServerError) as refused:
            await cluster.api.completions.create(model="null", prompt="x")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["connection"] == "close"
        gate.opened.set()
        text = "".join([event.choices[0].text async for event in stream])
        assert text == text_of(cluster, cluster.tokens("hello"), 6)
        assert await draining
