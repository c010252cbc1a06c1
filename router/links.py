"""How long KV takes from one worker to another, as transfers so far have shown. Pure.

Of a pair that has exchanged nothing yet the mean of all is believed.
"""

from __future__ import annotations

import math

import numpy as np

from router.fleet import Column

NEWS = 0.2
"""Weight of the newest transfer in a mean: a handful decide."""


class Links:
    """Milliseconds that the KV of one token takes, by the workers' numbers; means in which old news fade.

    Attributes:
        usual: of pairs that have exchanged nothing yet; 0 if nothing is known at all.
        rows_at, rows: for native code, good until something is changed: where the rows are, by prefill worker, and
            how many of them; ``struct link_row`` of routing.c.
    """

    def __init__(self) -> None:
        self.usual = 0.0
        self.rows_at = self.rows = 0
        self._mean = math.nan
        self._from: dict[int, Column] = {}  # by prefill worker; nan for those that it has sent nothing
        self._rows = np.zeros((0, 2), np.uint64)  # of each: address of its row and length, 0 if there is none

    def seen(self, prefill: int, decode: int, ms: float) -> None:
        """A transfer took so long for each of its tokens."""
        row = self._from.get(prefill)
        if row is None or decode >= len(row):
            longer = np.full(decode + 1, math.nan)
            if row is not None:
                longer[: len(row)] = row
            row = longer
            self._keep(prefill, row)
        row[decode] = _mean(float(row[decode]), ms)
        self.usual = self._mean = _mean(self._mean, ms)

    def _keep(self, prefill: int, row: Column) -> None:
        """In the place of its row so far."""
        if prefill >= self.rows:
            self._rows = np.concatenate([self._rows, np.zeros((prefill + 1 - self.rows, 2), np.uint64)])
            self.rows_at, self.rows = self._rows.ctypes.data, len(self._rows)
        self._from[prefill] = row
        self._rows[prefill] = row.ctypes.data, len(row)

    def forget(self, number: int) -> None:
        """The worker is gone, and another one may get its number. Idempotent."""
        if self._from.pop(number, None) is not None:
            self._rows[number] = 0
        for row in self._from.values():
            if number < len(row):
                row[number] = math.nan

    def of(self, prefill: int) -> Column | None:
        """From this worker to each, by number, nan for those that it has sent nothing; not to be changed. None if it
        has sent nothing to anybody."""
        return self._from.get(prefill)

    def token_ms(self, prefill: int | None, size: int) -> Column | float:
        """From this worker, or from any, to each of so many; a number if it is the same for all, 0 if nothing is
        known."""
        row = self.of(prefill) if prefill is not None else None
        if row is None:
            return self.usual
        column = np.full(size, self.usual)
        known = row[:size]
        np.copyto(column[: len(known)], known, where=~np.isnan(known))
        return column


def _mean(old: float, new: float) -> float:
    return new if math.isnan(old) else (1 - NEWS) * old + NEWS * new
