"""Several faults of one request, told at once."""

from __future__ import annotations

from types import TracebackType

from pdcore.errors import InvalidRequest


class Violations:
    """Collects what is wrong with a request. Each block is one check, whose InvalidRequest is kept::

    wrong = Violations()
    with wrong:
        check_this()
    with wrong:
        check_that()
    wrong.check()  # raises one InvalidRequest with all of them
    """

    def __init__(self) -> None:
        self._found: list[InvalidRequest] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, InvalidRequest):
            return False
        self.add(error)
        return True

    def add(self, error: InvalidRequest) -> None:
        self._found.append(error)

    def check(self) -> None:
        """Raises InvalidRequest, which names every violation in the order of the checks."""
        if not self._found:
            return
        first, *others = [violation for error in self._found for violation in error.violations]
        facts = {name: value for error in self._found for name, value in error.facts.items()}
        raise InvalidRequest(*first, more=others).with_facts(**facts)
