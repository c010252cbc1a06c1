"""From the bytes of a request's body to a checked message, or an error that names the field.

Types and names are checked here; what values are allowed, and together, is said by `router.validation` for all
protocols.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from pdcore.errors import InvalidRequest
from router.json_size import check_json_size
from router.openai.errors import BODY

MAX_NAME_CHARS = 64
MAX_TOLD = 8
UNKNOWN = "unknown_field"
_SHOULD = re.compile(r"^(Input|Value|List|String|Dictionary) should ")


class Message(BaseModel):
    """A JSON object of a request: no conversion of types, no unknown fields. A field that is null is not set.

    `refused`: fields of OpenAI's, or of servers like this one, that are known and not supported, and why.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
    )
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _only_known_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                problem = self.refused.get(name, "is not a field that is known here")
                raise PydanticCustomError(UNKNOWN, "{problem}", {"field": name[:MAX_NAME_CHARS], "problem": problem})
        return self


def check_names(given: Mapping[str, Any], known: Collection[str], *path: str | int) -> None:
    """What `Message` does, for an object that is read by hand. `path`: where it stands in the field."""
    for name, value in given.items():
        if value is not None and name not in known:
            told = {"field": [*path, name], "problem": "is not a field that is known here"}
            raise PydanticCustomError(UNKNOWN, "{problem}", told)


M = TypeVar("M", bound=Message)


def parse(kind: type[M], body: bytes) -> M:
    """Read a message. Raises InvalidRequest, which shows nothing of what is in the body but names."""
    check_json_size(BODY, body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise problem_of(error) from None


def problem_of(error: ValidationError) -> InvalidRequest:
    """What is wrong with a message: the first `MAX_TOLD` fields."""
    first, *others = [
        _violation(detail) for detail in error.errors(include_url=False, include_input=False)[:MAX_TOLD]
    ]
    return InvalidRequest(*first, more=others)


def _violation(detail: ErrorDetails) -> tuple[str, str]:
    if detail["type"] == "json_invalid":
        return BODY, f"is not valid JSON: {detail.get('ctx', {}).get('error', '')}"
    path = list(detail["loc"])
    if detail["type"] == UNKNOWN:
        name = detail["ctx"]["field"]
        path += name if isinstance(name, list) else [name]
    return _dotted(path), _sentence(detail)


def _dotted(path: list[Any]) -> str:
    """``messages[0].content``. What pydantic adds for itself is left out, as are tags that begin with a bracket."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not str(step).startswith("["):
            text += f".{str(step)[:MAX_NAME_CHARS]}" if text else str(step)[:MAX_NAME_CHARS]
    return text or BODY


def _sentence(detail: ErrorDetails) -> str:
    """Pydantic's words as the rest of a sentence that the field's name begins."""
    kind, message = detail["type"], detail["msg"]
    if kind == "missing":
        return "must be set"
    if kind == "literal_error":
        message = message.replace("True", "true").replace("False", "false")
    return _SHOULD.sub("must ", message.replace(" after validation", ""))
