"""Blocks that come free as sequences give theirs up, one after another. Pure.

Samples of one prompt hold its blocks together, and so do requests that begin alike. Such a block comes free with the
last of those that hold it::

    a  [b0][b1][b2]             a alone    frees b2
    c  [b0][b1]    [b3]         c after a  frees b0, b1 and b3
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler imports this module
    from engine.scheduler import SequenceView


class Releases:
    """What has come free so far. Not thread-safe; lives as long as one decision.

    Attributes:
        blocks: that came free. places: how many of those that have given theirs up had credit.

    Args:
        holders: how many hold each of the blocks in `SequenceView.shared`. What is missing never comes free.
        growth: blocks that are kept free for a sequence, and come free with it.
        kept: blocks that somebody else will hold, and that do not count as coming free.
    """

    def __init__(
        self,
        holders: Mapping[int, int],
        *,
        growth: Callable[[SequenceView], int] = lambda view: 0,
        kept: Container[int] = frozenset(),
    ) -> None:
        self.blocks = 0
        self.places = 0
        self._holders = holders
        self._growth = growth
        self._gone: dict[int, int] = {}  # of a block's holders
        self._kept = kept

    def is_free(self, block: int) -> bool:
        """Whether all that hold a block of some `shared` have given it up."""
        return self._gone.get(block, 0) == self._holders.get(block)

    def last(self, view: SequenceView) -> list[int]:
        """Of its `shared`, the blocks that come free if it goes next."""
        holders, gone, kept = self._holders, self._gone, self._kept
        return [block for block in view.shared if gone.get(block, 0) + 1 == holders.get(block) and block not in kept]

    def gain(self, view: SequenceView) -> int:
        """Blocks that come free if it goes next."""
        return view.own_blocks + len(self.last(view)) + self._growth(view)

    def take(self, view: SequenceView) -> None:
        """It gives its blocks up."""
        self.blocks += self.gain(view)
        self.places += view.has_credit
        for block in view.shared:
            self._gone[block] = self._gone.get(block, 0) + 1

    def put_back(self, view: SequenceView) -> None:
        """It holds them still: takes back a `take`, of whichever."""
        for block in view.shared:
            self._gone[block] -= 1
        self.blocks -= self.gain(view)
        self.places -= view.has_credit

    def fewest(self, candidates: Iterable[SequenceView], blocks: int, places: int = 0) -> list[SequenceView] | None:
        """Take candidates in order until so many blocks and places have come free, and put back those without which
        it is enough too, the last ones first. Returns the others, in order; None, and takes nobody, if all of them
        are not enough."""

        def enough() -> bool:
            return self.blocks >= blocks and self.places >= places

        taken: list[SequenceView] = []
        for view in candidates:
            if enough():
                break
            self.take(view)
            taken.append(view)
        if not enough():
            for view in taken:
                self.put_back(view)
            return None
        needed: list[SequenceView] = []
        for view in reversed(taken):
            self.put_back(view)
            if not enough():
                self.take(view)
                needed.append(view)
        return needed[::-1]
