"""Structured outputs on their way through the router: what is refused, how, and on which thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pdcore.errors import InvalidRequest, Overloaded
from pdcore.logprobs import Logprobs
from pdcore.structured import StructuredOutput, StructureKind
from pdcore.types import FinishReason, RequestKey, RequestSpec, SamplingParams
from protos import generation_pb2, worker_pb2
from protos.convert import spec_from_proto, spec_to_proto
from router import structured
from router.client import Sampling, build_request
from router.policy import Mode, Route
from router.structured import StructureCheck
from router.tokenizer import TextModel
from router.tracker import RequestTracker
from router.validation import GenerationRequest, Limits, validate
from tests.support.structures import END, EXAMPLES, bpe_tokenizer, choice, regex
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(tiny_llama(tmp_path_factory.mktemp("tiny")))


async def check(model: TextModel, **sampling: Any) -> GenerationRequest:
    message = build_request("hello", Sampling(**sampling))
    limits = Limits(context_tokens=64, vocab_size=512)
    return await validate(message, text_model=model, served_name="tiny", limits=limits, in_flight=())


GOOD = {
    "json_schema": ({"type": "object"}, ('{"type": "object"}',)),
    "json_object": (True, ()),
    "regex": ("[a-z]+", ("[a-z]+",)),
    "choice": (["yes", "no"], ("yes", "no")),
    "grammar": ('start: "a"+', ('start: "a"+',)),
}


@pytest.mark.parametrize("name", GOOD)
async def test_each_kind_reaches_the_parameters(name: str, model: TextModel) -> None:
    value, sources = GOOD[name]
    request = await check(model, **{name: value})
    assert request.params.structured_output == StructuredOutput(StructureKind(name), sources)


BAD = {
    "json_schema": ('{"type": 3}', "json_schema"),
    "regex": ("[a-", "regex"),
    "choice": (["a", ""], "choice[1]"),
    "grammar": ("start: missing", "grammar"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_one_names_its_field(name: str, model: TextModel) -> None:
    value, field = BAD[name]
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest) as caught:
            await check(model, **{name: value})
        assert caught.value.field == f"sampling.structured_output.{field}"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (worker_pb2.StructuredOutput(), ""),
        (worker_pb2.StructuredOutput(json_object=False), ".json_object"),
        (worker_pb2.StructuredOutput(choice=worker_pb2.Choice()), ".choice"),
        (worker_pb2.StructuredOutput(regex=""), ".regex"),
    ],
)
async def test_a_message_that_says_nothing(
    message: worker_pb2.StructuredOutput, field: str, model: TextModel
) -> None:
    request = generation_pb2.GenerateRequest(prompt="x", sampling=generation_pb2.Sampling(structured_output=message))
    limits = Limits(context_tokens=64, vocab_size=512)
    with pytest.raises(InvalidRequest) as caught:
        await validate(request, text_model=model, served_name="tiny", limits=limits, in_flight=())
    assert caught.value.field == f"sampling.structured_output{field}"


def test_a_client_asks_for_one_form_only() -> None:
    with pytest.raises(ValueError, match=r"at most one of .* got regex and grammar"):
        build_request("x", Sampling(regex="a", grammar="b"))


class TestCheck:
    """`StructureCheck` beside an event loop."""

    @pytest.fixture
    def checker(self) -> StructureCheck:
        tokenizer = bpe_tokenizer()
        return StructureCheck(tokenizer.to_str, tokenizer.token_to_id(END))

    async def test_it_compiles_on_its_own_thread_and_once(
        self, checker: StructureCheck, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[str] = []
        verdict = StructureCheck._verdict

        def recorded(self: StructureCheck, output: StructuredOutput, vocab_size: int) -> InvalidRequest | None:
            threads.append(threading.current_thread().name)
            return verdict(self, output, vocab_size)

        monkeypatch.setattr(StructureCheck, "_verdict", recorded)
        for _ in range(3):
            await checker.check(choice("a", "b"), 1000)
        assert len(threads) == 1
        assert threads[0].startswith("grammar")
        checker.close()

    async def test_too_many_at_once_are_shed(self, checker: StructureCheck, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(structured, "MAX_WAITING", 3)
        may_go = threading.Event()
        monkeypatch.setattr(StructureCheck, "_verdict", lambda *_: may_go.wait(30) and None)
        held = [asyncio.create_task(checker.check(regex(f"a{i}"), 1000)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await checker.check(regex("b"), 1000)
        may_go.set()
        await asyncio.gather(*held)
        await checker.check(regex("b"), 1000)
        checker.close()

    async def test_verdicts_are_bounded(self, checker: StructureCheck, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(structured, "REMEMBERED", 5)
        for i in range(9):
            await checker.check(regex(f"a{i}"), 1000)
        assert len(checker._verdicts) == 5
        checker.close()

    async def test_a_process_that_breaks_is_replaced(self, checker: StructureCheck) -> None:
        chain = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(1500))
        with pytest.raises(InvalidRequest, match="grammar: is more than the compiler can take"):
            await checker.check(StructuredOutput(StructureKind.GRAMMAR, (f"start: r0\n{chain}\nr1500: /x/",)), 1000)
        await checker.check(regex("a+"), 1000)
        checker.close()

    async def test_time_is_bounded(self, checker: StructureCheck) -> None:
        with pytest.raises(InvalidRequest, match=r"regex: takes more than 0\.5 s to compile"):
            await checker.check(regex("(((a{100}){100}){100}){100}"), 1000)
        await checker.check(regex("a+"), 1000)
        checker.close()

    async def test_a_tokenizer_that_cannot_be_used(self) -> None:
        checker = StructureCheck(lambda: '{"model": {}}', None)
        with pytest.raises(InvalidRequest, match="cannot use this tokenizer"):
            await checker.check(regex("a"), 100)
        checker.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_workers_get_what_the_client_asked_for(name: str) -> None:
    params = SamplingParams(5, structured_output=EXAMPLES[name].output)
    spec = RequestSpec(RequestKey("r", 1), (1, 2), params)
    assert spec_from_proto(spec_to_proto(spec)) == spec


class Sink:
    def __init__(self) -> None:
        self.hidden: list[bool] = []

    def push(self, token_id: int, hidden: bool, logprobs: Logprobs | None) -> bool:
        self.hidden.append(hidden)
        return False

    def push_prompt(self, logprobs: Logprobs) -> None:
        raise AssertionError("not asked for")


@pytest.mark.parametrize(("token", "hidden"), [(7, False), (3, True)])
def test_a_complete_output_shows_its_last_token_and_a_stop_token_is_hidden(token: int, hidden: bool) -> None:
    sink = Sink()
    tracker = RequestTracker(
        request_id="r",
        prompt=(1,),
        params=SamplingParams(9, stop_token_ids=(3,), structured_output=choice("a")),
        token_window=64,
        max_replays=1,
        sink=sink,
        now=0.0,
    )
    tracker.dispatch(Route(Mode.LOCAL, "d0", None, "only one"), 0.0)
    tracker.token("d0", 1, 0, token, FinishReason.STOP, now=0.1)
    assert sink.hidden == [hidden]
    assert tracker.outcome is not None
    assert tracker.outcome.finish is FinishReason.STOP
