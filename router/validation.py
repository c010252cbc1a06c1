"""From a client's message to a request that can run, or an error that says which field is wrong and what is allowed.

Defaults come from the model's generation config, then from generation.proto. Nothing here touches a worker.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdcore.config import CODEC_CHOICES, CODECS
from pdcore.costs import AUTO
from pdcore.errors import InvalidRequest, UnknownModel
from pdcore.structured import MAX_CHOICES, StructuredOutput
from pdcore.types import MAX_SAMPLES, PriorityClass, SamplingParams
from protos import generation_pb2
from protos.convert import structured_from_proto
from router.conversation import ChatInput, read_chat
from router.logit_validation import LogitParams, check_some_allowed, check_token_ids, logit_params
from router.tokenizer import GenerationDefaults, Special, TextModel
from router.tools.plan import ToolPlan, plan_tools
from router.tools.tool import Choice
from router.violations import Violations

MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_SALT_CHARS = 128
MAX_IDEMPOTENCY_KEY_CHARS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
MAX_TOP_K = 2**31 - 1
DEFAULT_MAX_TOKENS = 256  # where neither the configuration nor the model's publisher says anything

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]+")

_IDEMPOTENCY_KEY = re.compile(rf"[\x20-\x7e]{{0,{MAX_IDEMPOTENCY_KEY_CHARS}}}")  # printable ASCII

_PRIORITIES = {
    generation_pb2.PRIORITY_INTERACTIVE: PriorityClass.INTERACTIVE,
    generation_pb2.PRIORITY_STANDARD: PriorityClass.STANDARD,
    generation_pb2.PRIORITY_BATCH: PriorityClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the connected workers allow.

    Attributes:
        context_tokens: prompt and output together, at most.
        vocab_size: token ids are below this.
        kv_codecs: codecs that every connected worker has for KV.
    """

    context_tokens: int
    vocab_size: int
    kv_codecs: frozenset[str] = frozenset(CODECS)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request. `params` carries the stop token ids of the model unless the client ignores them.

    `samples`: of the output, wanted. `kv_codec`: a codec's name or ``auto``; empty if the client did not say.
    `cache_salt`: see `RequestSpec`.
    `include_stop`: see `router.text.TextStream`. `special`: tokens that have a text.
    `tools`: what its tools mean for the output; None if it has none.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    samples: int
    stops: tuple[str, ...]
    priority: PriorityClass
    tenant: str
    kv_codec: str = ""
    cache_salt: str = ""
    include_stop: bool = False
    special: Special = Special.HIDDEN
    tools: ToolPlan | None = None
    idempotency_key: str = ""


def check_model(asked: str, served: str) -> None:
    """Raises UnknownModel; an empty name asks for the served model."""
    if asked and asked != served:
        raise UnknownModel(asked[:MAX_ID_CHARS], [served])


async def validate(
    message: generation_pb2.GenerateRequest,
    *,
    text_model: TextModel,
    served_name: str,
    limits: Limits,
    in_flight: Collection[str],
    tenant: str | None = None,
    default_class: PriorityClass = PriorityClass.STANDARD,
) -> GenerationRequest:
    """Check every field and tokenise the prompt.

    Args:
        in_flight: ids of the requests that are running; an id may be used again once its request has ended.
        tenant: whose it is; None for whom it names. default_class: of a request that names none.

    Raises:
        InvalidRequest, UnknownModel: see generation.proto for what is allowed. What is cheap to check is checked
            first, and all of that is named; the prompt is looked at only if nothing of it was wrong.
        Overloaded: too many structured outputs wait to be checked.
    """
    check_model(message.model, served_name)
    wrong, sampling = Violations(), message.sampling
    with wrong:
        request_id = _request_id(message.request_id, in_flight)
    with wrong:
        _check_chars_of("tenant", message.tenant, MAX_TENANT_CHARS)
    with wrong:
        priority = _priority(message, default_class)
    with wrong:
        _check_chars_of("cache_salt", message.cache_salt, MAX_SALT_CHARS)
    if _IDEMPOTENCY_KEY.fullmatch(message.idempotency_key) is None:
        problem = f"must have at most {MAX_IDEMPOTENCY_KEY_CHARS} characters, all of them printable ASCII"
        wrong.add(InvalidRequest("idempotency_key", problem))
    with wrong:
        _check_kv_codec(message.kv_codec, limits)
    _check_ranges(sampling, wrong)
    with wrong:
        samples = _samples(sampling)
    with wrong:
        stop_token_ids = _stop_token_ids(sampling, limits.vocab_size)
    with wrong:
        stops = _stops(sampling.stop)
    with wrong:
        _check_choices(sampling.structured_output.choice.choices)
    wrong.check()
    logits = await logit_params(sampling, text_model, text_model.defaults, limits.vocab_size)
    chat = _read_chat(message, text_model, limits)
    tools, structure = _tools(chat, text_model, structured_from_proto(sampling))
    prompt = await _prompt_tokens(message, chat, text_model, limits)
    params = _params(
        sampling,
        text_model,
        structure=structure,
        logits=logits,
        stop_token_ids=stop_token_ids,
        prompt_tokens=len(prompt),
        limits=limits,
    )
    if structure is not None:  # last, since it costs most
        await _check_structure(structure, tools, text_model, limits)
    return GenerationRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        params=params,
        samples=samples,
        stops=stops,
        priority=priority,
        tenant=message.tenant if tenant is None else tenant,
        kv_codec=message.kv_codec,
        cache_salt=message.cache_salt,
        include_stop=sampling.include_stop_str_in_output,
        special=_special(sampling, tools),
        tools=tools,
        idempotency_key=message.idempotency_key,
    )


async def tokenize_input(
    message: generation_pb2.TokenizeRequest | generation_pb2.GenerateRequest,
    text_model: TextModel,
    limits: Limits,
) -> list[int]:
    """Token ids of a text prompt or a chat, `context_tokens` at most.

    Raises:
        InvalidRequest: empty, too long (if by far, found without tokenising all of it), or refused by the template.
    """
    return await _limited_tokens(message, _read_chat(message, text_model, limits), text_model, limits)


async def _limited_tokens(
    message: generation_pb2.TokenizeRequest | generation_pb2.GenerateRequest,
    chat: ChatInput | None,
    text_model: TextModel,
    limits: Limits,
) -> list[int]:
    """See `tokenize_input`."""
    field = message.WhichOneof("input")
    tokens = await _text_tokens(message, chat, text_model, limits)
    if len(tokens) > limits.context_tokens:
        raise InvalidRequest(
            str(field), f"has {len(tokens)} tokens, more than the context of {limits.context_tokens} tokens holds"
        ).with_facts(context_tokens=limits.context_tokens, prompt_tokens=len(tokens))
    return tokens


async def _text_tokens(
    message: generation_pb2.TokenizeRequest | generation_pb2.GenerateRequest,
    chat: ChatInput | None,
    text_model: TextModel,
    limits: Limits,
) -> list[int]:
    if chat is not None:
        return await text_model.tokenize_chat(chat.conversation, limits.context_tokens)
    if message.WhichOneof("input") != "prompt":
        raise InvalidRequest("input", "one of prompt and chat must be set")
    if not message.prompt:
        raise InvalidRequest("prompt", "must not be empty")
    _check_chars("prompt", len(message.prompt), text_model, limits)
    return await text_model.tokenize(message.prompt, limits.context_tokens)


def new_request_id() -> str:
    """One that nobody else has."""
    return secrets.token_hex(8)


def usable_id(asked: str) -> bool:
    """Whether a request can have this id, unless another one has."""
    return len(asked) <= MAX_ID_CHARS and _REQUEST_ID.fullmatch(asked) is not None


def _request_id(asked: str, in_flight: Collection[str]) -> str:
    if not asked:
        return new_request_id()
    if len(asked) > MAX_ID_CHARS:
        raise InvalidRequest("request_id", f"must have at most {MAX_ID_CHARS} characters, got {len(asked)}")
    if _REQUEST_ID.fullmatch(asked) is None:
        raise InvalidRequest("request_id", "must consist of letters, digits and any of . _ : -")
    if asked in in_flight:
        raise id_in_use(asked)
    return asked


def id_in_use(asked: str) -> InvalidRequest:
    """A request cannot have the id of one that is running."""
    return InvalidRequest("request_id", f"a request with the id {asked!r} is running")


def _check_kv_codec(asked: str, limits: Limits) -> None:
    allowed = [name for name in CODEC_CHOICES if name == AUTO or name in limits.kv_codecs]
    if asked and asked not in allowed:
        problem = f"must be one of {', '.join(allowed)}, got {asked[:32]!r}"
        if asked in CODEC_CHOICES:
            problem += ", which not every worker has here"
            if asked == "tc4":
                problem += ": it needs transfer.calibration, a file made by `pdserve calibrate`"
        raise InvalidRequest("kv_codec", problem)


def _priority(message: generation_pb2.GenerateRequest, default: PriorityClass) -> PriorityClass:
    if message.priority == generation_pb2.PRIORITY_UNSPECIFIED:
        return default
    if message.priority not in _PRIORITIES:
        raise InvalidRequest("priority", f"must be one of the values of Priority, got {message.priority}")
    return _PRIORITIES[message.priority]


def _check_chars_of(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(field, f"must have at most {limit} characters, got {len(text)}")


def _check_ranges(sampling: generation_pb2.Sampling, wrong: Violations) -> None:
    # Written as "inside the range" so that NaN, which is inside no range, is refused.
    if sampling.HasField("temperature") and not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        wrong.add(_range("temperature", f"in [0, {MAX_TEMPERATURE:g}]", sampling.temperature))
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        wrong.add(_range("top_p", "in (0, 1]", sampling.top_p))
    if sampling.HasField("min_p") and not 0 <= sampling.min_p < 1:
        wrong.add(_range("min_p", "in [0, 1)", sampling.min_p))
    if sampling.HasField("top_k") and sampling.top_k > MAX_TOP_K:
        wrong.add(_range("top_k", f"at most {MAX_TOP_K}", sampling.top_k))
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        wrong.add(_range("max_tokens", "at least 1", sampling.max_tokens))


def _samples(sampling: generation_pb2.Sampling) -> int:
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= MAX_SAMPLES:
        raise _range("n", f"in [1, {MAX_SAMPLES}]", n)
    return n


def _range(name: str, allowed: str, value: float) -> InvalidRequest:
    return InvalidRequest(f"sampling.{name}", f"must be {allowed}, got {value:g}")


def _stop_token_ids(sampling: generation_pb2.Sampling, vocab_size: int) -> tuple[int, ...]:
    count = len(sampling.stop_token_ids)
    if count > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("sampling.stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS}, got {count}")
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    return tuple(sampling.stop_token_ids)


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("sampling.stop", f"must be at most {MAX_STOPS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"sampling.stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}"
            )
    return tuple(stops)


def _check_choices(choices: Sequence[str]) -> None:
    """Before they are copied; what else there is to check, is checked with the other forms of output."""
    if len(choices) > MAX_CHOICES:
        problem = f"must be 1 to {MAX_CHOICES} strings, got {len(choices)}"
        raise InvalidRequest("sampling.structured_output.choice", problem)


async def _prompt_tokens(
    message: generation_pb2.GenerateRequest, chat: ChatInput | None, text_model: TextModel, limits: Limits
) -> Sequence[int]:
    field = message.WhichOneof("input")
    if field is None:
        raise InvalidRequest("input", "one of prompt, chat and token_ids must be set")
    if field == "token_ids":
        tokens: Sequence[int] = message.token_ids.ids
        name = "token_ids.ids"
        # The length first: it is the cheaper check, and such a list may be long.
        _check_length(name, len(tokens), limits)
        check_token_ids(name, tokens, limits.vocab_size)
    else:
        name = str(field)
        tokens = await _limited_tokens(message, chat, text_model, limits)
        # A tokenizer may know added tokens that the model has no row for.
        check_token_ids(name, tokens, limits.vocab_size)
    if not tokens:
        raise InvalidRequest(name, "must have at least one token")
    _check_length(name, len(tokens), limits)
    return tokens


def _read_chat(
    message: generation_pb2.TokenizeRequest | generation_pb2.GenerateRequest, text_model: TextModel, limits: Limits
) -> ChatInput | None:
    if message.WhichOneof("input") != "chat":
        return None
    max_chars = limits.context_tokens * text_model.max_token_chars
    return read_chat(message.chat, text_model.chat_template, max_chars, limits.context_tokens)


def _tools(
    chat: ChatInput | None, text_model: TextModel, asked: StructuredOutput | None
) -> tuple[ToolPlan | None, StructuredOutput | None]:
    """What the request's tools mean, and the form that the output must have."""
    if chat is None or chat.use is None:
        return None, asked
    plan = plan_tools(chat.use, text_model.tool_format, text_model.tool_tokens, asked)
    return plan, plan.structure


async def _check_structure(
    structure: StructuredOutput, tools: ToolPlan | None, text_model: TextModel, limits: Limits
) -> None:
    try:
        await text_model.structures.check(structure, limits.vocab_size)
    except InvalidRequest as error:
        if tools is None or not tools.own:
            raise
        raise InvalidRequest("chat.tools", f"the output cannot be held to their schemas: {error.problem}") from error


def _special(sampling: generation_pb2.Sampling, tools: ToolPlan | None) -> Special:
    if sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens:
        return Special.SHOWN
    return Special.HIDDEN if tools is None or tools.use.choice is Choice.NONE else Special.TOOLS


def _check_chars(field: str, chars: int, text_model: TextModel, limits: Limits) -> None:
    """Refuse what cannot fit however well it tokenises, before any of it is tokenised."""
    if chars > limits.context_tokens * text_model.max_token_chars:
        raise InvalidRequest(
            field, f"{chars} characters cannot fit into the context of {limits.context_tokens} tokens"
        ).with_facts(context_tokens=limits.context_tokens)


def _check_length(field: str, prompt_tokens: int, limits: Limits) -> None:
    if prompt_tokens >= limits.context_tokens:
        raise InvalidRequest(
            field,
            f"has {prompt_tokens} tokens; with at least one new token it must fit into the context of "
            f"{limits.context_tokens} tokens",
        ).with_facts(context_tokens=limits.context_tokens, prompt_tokens=prompt_tokens)


def _params(
    sampling: generation_pb2.Sampling,
    text_model: TextModel,
    *,
    structure: StructuredOutput | None,
    logits: LogitParams,
    stop_token_ids: tuple[int, ...],
    prompt_tokens: int,
    limits: Limits,
) -> SamplingParams:
    defaults = text_model.defaults
    room = limits.context_tokens - prompt_tokens
    if sampling.HasField("max_tokens"):
        max_tokens = sampling.max_tokens
        if max_tokens > room:
            raise InvalidRequest(
                "sampling.max_tokens",
                f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) together must fit into the context "
                f"of {limits.context_tokens} tokens",
            ).with_facts(context_tokens=limits.context_tokens, prompt_tokens=prompt_tokens)
    else:
        max_tokens = min(room, defaults.max_tokens or DEFAULT_MAX_TOKENS)
    min_tokens = sampling.min_tokens if sampling.HasField("min_tokens") else 0
    if min_tokens > max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"must be at most max_tokens ({max_tokens}), got {min_tokens}")
    ends = () if sampling.ignore_eos else text_model.end_token_ids
    stops = tuple(dict.fromkeys((*ends, *stop_token_ids)))
    check_some_allowed(logits, stops if min_tokens else ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number(sampling, "temperature", defaults, 1.0),
        top_k=int(_number(sampling, "top_k", defaults, 0)),
        top_p=_number(sampling, "top_p", defaults, 1.0),
        min_p=_number(sampling, "min_p", defaults, 0.0),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        stop_token_ids=stops,
        min_tokens=min_tokens,
        structured_output=structure,
        presence_penalty=logits.presence_penalty,
        frequency_penalty=logits.frequency_penalty,
        repetition_penalty=logits.repetition_penalty,
        logit_bias=logits.logit_bias,
        allowed_token_ids=logits.allowed_token_ids,
        bad_words=logits.bad_words,
        logprobs=logits.logprobs,
        prompt_logprobs=logits.prompt_logprobs,
    )


def _number(sampling: generation_pb2.Sampling, name: str, defaults: GenerationDefaults, default: float) -> float:
    """The client's value, else the generation config's, else the stated default."""
    if sampling.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
        return float(getattr(sampling, name))
    suggested = getattr(defaults, name)
    return default if suggested is None else float(suggested)
