"""What is promised to each class of requests, and what each tenant may ask for.

A class says how urgent a request is (`pdcore.types.PriorityClass`); its objectives say what its clients should see. A
tenant is whom a request is for; its weight is the queue's business (`pdcore.config.QueueConfig`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcore.errors import ConfigError
from pdcore.types import PriorityClass

OTHERS = "*"
"""Stands for each tenant that has no entry of its own."""


@dataclass(frozen=True, slots=True)
class ClassObjective:
    """Of one class.

    Attributes:
        ttft_ms: time to first token that is aimed at; what cannot meet it is shed before its prompt is computed
            (`router.shedding`). 0 is none.
        itl_ms: time between two tokens that is aimed at; batch requests are held back where they would break it
            (`router.gaps`). 0 is none.
        max_queue: requests of the class that may wait; None for the router's.
    """

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    max_queue: int | None = None


@dataclass(frozen=True, slots=True)
class ClassObjectives:
    """Of all classes. Defaults are for small models on CPUs; only who asks to be served at once is refused for it."""

    interactive: ClassObjective = ClassObjective(ttft_ms=5_000.0, itl_ms=200.0)
    standard: ClassObjective = ClassObjective(itl_ms=500.0)
    batch: ClassObjective = ClassObjective()

    def __post_init__(self) -> None:
        for priority in PriorityClass:
            name, objective = priority.name.lower(), self.of(priority)
            for key in ("ttft_ms", "itl_ms"):
                value = getattr(objective, key)
                if not 0 <= value < float("inf"):
                    raise ConfigError(f"router.classes.{name}.{key}", value, "a number >= 0")
            if objective.max_queue is not None and objective.max_queue < 1:
                raise ConfigError(f"router.classes.{name}.max_queue", objective.max_queue, "an integer >= 1")

    def of(self, priority: PriorityClass) -> ClassObjective:
        """The class's."""
        return (self.interactive, self.standard, self.batch)[priority]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may ask of one router.

    Attributes:
        tenant: its name; `OTHERS` for each tenant that has no entry, each with limits of its own.
        requests_per_minute, tokens_per_minute: 0 is no limit. Tokens are those of prompts and outputs.
        max_concurrent: requests that have not ended; 0 is no limit.
        default_class: of its requests that name none.
    """

    tenant: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    default_class: PriorityClass = PriorityClass.STANDARD

    def __post_init__(self) -> None:
        for key in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            if getattr(self, key) < 0:
                raise ConfigError(f"router.tenants.{self.tenant}.{key}", getattr(self, key), "an integer >= 0")

    @property
    def limited(self) -> bool:
        """Whether there is anything to count."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)
