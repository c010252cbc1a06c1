"""What the log is told of an error that nobody meant: where it happened, and not what it says.

The words of such an error may hold anything that the code had in hand, a prompt or an answer above all, and logs have
neither. Its type and its frames, which show code and no values, are what a bug is found by.
"""

from __future__ import annotations

import errno

_DEPTH = 16
"""Of causes, and of groups in groups: there are rings of causes."""


def wordless(error: BaseException, depth: int = _DEPTH) -> BaseException:
    """Like `error` and all that it came from, but without words: for ``exc_info`` of a logger. OSErrors keep the name
    of their number."""
    likeness: BaseException
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions if depth else ()
        likeness = BaseExceptionGroup("", [wordless(member, depth - 1) for member in members] or [Exception()])
    else:
        kind = type(error)
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        likeness = type(kind.__name__, (Exception,), named)(*_number(error))
    if depth:
        # Never None to __cause__: that would suppress the context.
        if error.__cause__ is not None:
            likeness.__cause__ = wordless(error.__cause__, depth - 1)
        elif error.__context__ is not None and not error.__suppress_context__:
            likeness.__context__ = wordless(error.__context__, depth - 1)
    return likeness.with_traceback(error.__traceback__)


def _number(error: BaseException) -> tuple[str, ...]:
    known = isinstance(error, OSError) and error.errno in errno.errorcode
    return (errno.errorcode[error.errno],) if known else ()  # type: ignore[attr-defined]
