"""Short ways to make an engine on a fake runner, requests for it, and steps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.engine import Engine, SequenceKind, StepResult, TokenOut
from engine.step import KvCache
from engine.structured import OutputGuards
from engine.swap import Copier, Copy, ThreadCopier
from pdcore.clock import Clock, ManualClock
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.structured import StructuredOutput
from pdcore.types import PriorityClass, RequestKey, RequestSpec, SamplingParams
from tests.support.fake_runner import FakeRunner


def make_engine(
    runner: FakeRunner,
    *,
    budget: int = 64,
    max_num_seqs: int = 8,
    chunk: int = 64,
    max_model_len: int | None = None,
    max_reserved_fraction: float = 0.5,
    prefix_cache: bool = True,
    local_prefill_tokens: int = 64,
    on_pressure: Callable[[str], None] | None = None,
    clock: Clock | None = None,
    guards: OutputGuards | None = None,
    swap_blocks: int = 0,
    preemption: str = "auto",
    prefer_swap: bool = False,
    copier: ManualCopier | None = None,
    on_copied: Callable[[], None] = lambda: None,
    **scheduler: object,
) -> Engine:
    """An engine with these scheduler limits (`scheduler`: more of them), on a clock that stands still.

    `swap_blocks`: its host memory. `copier`: runs its copies; a thread does if there is none.
    """
    geometry = runner.geometry
    config = EngineConfig(
        "fake",
        "fake",
        max_model_len=max_model_len,
        prefix_cache=prefix_cache,
        swap_memory=swap_blocks * geometry.block_size * geometry.bytes_per_token,
        preemption=preemption,
        scheduler=SchedulerConfig(budget, max_num_seqs, chunk, local_prefill_tokens, **scheduler),  # type: ignore[arg-type]
    )
    pressure = on_pressure or (lambda owner: None)
    return Engine(
        runner,
        config,
        clock or ManualClock(),
        pressure,
        max_reserved_fraction,
        guards=guards,
        prefer_swap=prefer_swap,
        on_copied=on_copied,
        make_copier=ThreadCopier if copier is None else copier.attach,
    )


class ManualCopier:
    """A copier that runs nothing by itself: copies wait, and end in whichever order and way a test wants."""

    def __init__(self) -> None:
        self.waiting: list[Copy] = []
        self.done: list[Copy] = []

    def attach(
        self, cache: KvCache, done: Callable[[Copy], None], on_crash: Callable[[BaseException], None]
    ) -> Copier:
        self._cache, self._tell = cache, done
        return self

    def submit(self, copy: Copy) -> None:
        self.waiting.append(copy)

    def finish(self, index: int = 0, *, error: Exception | None = None, seconds: float = 0.0) -> None:
        """End a waiting copy, well or with `error`."""
        copy = self.waiting.pop(index)
        copy.run(self._cache)
        copy.error = copy.error or error
        copy.seconds = seconds
        self.done.append(copy)
        self._tell(copy)

    def finish_all(self) -> None:
        while self.waiting:
            self.finish()

    def close(self, timeout_s: float) -> bool:
        return True


def request(
    name: str,
    prompt: int | Sequence[int],
    max_tokens: int = 8,
    *,
    delivered: Sequence[int] = (),
    window: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocab_size: int = 256,
    salt: str = "",
    structured: StructuredOutput | None = None,
    tenant: str = "",
    priority: PriorityClass = PriorityClass.STANDARD,
    **params_extra: object,
) -> RequestSpec:
    """A request; a number as the prompt stands for that many tokens that depend on the name.

    `params_extra`: more fields of `SamplingParams`.
    """
    if isinstance(prompt, int):
        start = sum(name.encode())
        prompt = [(start + 7 * i * i + i) % vocab_size for i in range(prompt)]
    params = SamplingParams(
        max_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        seed=seed,
        stop_token_ids=tuple(stop),
        min_tokens=min_tokens,
        structured_output=structured,
        **params_extra,  # type: ignore[arg-type]
    )
    return RequestSpec(
        RequestKey(name, 0), tuple(prompt), params, tuple(delivered), window, salt, tenant=tenant, priority=priority
    )


def prompt_of(family: int, shared: int, own: int = 0, *, branch: int = 0, vocab_size: int = 256) -> list[int]:
    """`shared` tokens that all prompts of the family begin with, and `own` that those of the branch share."""
    front = [(31 * family + 5 * i * i + i) % vocab_size for i in range(shared)]
    return front + [(17 * branch + 3 * i * i + 7 * i + 1) % vocab_size for i in range(own)]


def step(engine: Engine) -> StepResult | None:
    """One whole step, with integrity checked at every point; None if nothing could run."""
    plan = engine.schedule()
    engine.check_integrity()
    if plan is None:
        return None
    output = engine.execute(plan)
    engine.check_integrity()
    result = engine.apply(plan, output)
    engine.check_integrity()
    return result


def run(engine: Engine, steps: int = 2000, copier: ManualCopier | None = None, late: int = 0) -> list[TokenOut]:
    """Step until nothing is left to do; all tokens, in order. Fails if that takes more than `steps`.

    `copier`: its copies end when `late` steps have run, or when nothing else can run.
    """
    tokens: list[TokenOut] = []
    for i in range(steps):
        if not engine.has_work():
            break
        result = step(engine)
        if copier is not None and copier.waiting and (result is None or i % (late + 1) == late):
            copier.finish()
            engine.check_integrity()
            if result is None:
                continue
        assert result is not None, f"nothing can run: {engine.load()}"
        assert not result.rejected, result.rejected
        tokens.extend(result.tokens)
    assert not engine.has_work(), f"still at work after {steps} steps: {engine.load()}"
    return tokens


def tokens_of(tokens: Sequence[TokenOut], spec: RequestSpec) -> list[int]:
    """Token ids of one request; asserts that every index comes once and in order."""
    mine = [token for token in tokens if token.key == spec.key]
    first = len(spec.delivered)
    assert [token.index for token in mine] == list(range(first, first + len(mine))), mine
    assert all(token.finish is None for token in mine[:-1]), mine
    return [token.token_id for token in mine]


def prefill_and_transfer(
    source: Engine, runner: FakeRunner, target: FakeRunner, spec: RequestSpec, blocks: Sequence[int], held: int = 0
) -> int:
    """Compute `spec` on a prefill engine, copy its KV into `blocks` of `target`, and return the first token.

    `held`: tokens that are in `blocks` already, and are not copied.
    """
    source.add(spec, SequenceKind.PREFILL)
    tokens = run(source)
    table = source.block_table(spec.key)
    assert table is not None
    known = len(spec.known_tokens)
    half = (held + known) // 2  # two ranges, neither of them aligned to blocks of either side
    for start, count in ((held, half - held), (half, known - half)):
        for layer in range(runner.geometry.num_layers):
            values = runner.cache.gather(layer, 1, table, start, count)
            target.cache.scatter(layer, blocks, start, values)
    source.release_send(spec.key)
    assert source.block_table(spec.key) is None
    (first,) = tokens_of(tokens, spec)
    return first
