"""Which all-reduces a training's next iteration has: those of the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

#: Element types whose averages take keystream that was made ahead of time.
_COMMON = ("float32", "float16", "bfloat16")


def parts(count: int, size: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and length, in elements of ``size`` bytes, of the all-reduces of up to ``max_bytes`` that ``count`` elements take."""
    longest = max_bytes // size
    for start in range(0, count, longest):
        yield start, min(longest, count - start)


class Maker(Protocol):
    """A communicator as seen from here."""

    def make_keystream(self, lengths: Sequence[int]) -> int: ...


class Foresight:
    """Has the keystream of an iteration's all-reduces made when the one before has ended.

    A wrong guess, as where DDP arranges its buckets anew after the first iteration, costs the making alone.
    """

    def __init__(self, communicator: Maker, max_bytes: int) -> None:
        """All-reduces longer than ``max_bytes`` are done in :func:`parts`."""
        self._communicator, self._max_bytes = communicator, max_bytes
        self._lengths: list[int] = []

    def reduced(self, count: int, size: int, dtype: str, ends_iteration: bool) -> None:
        """Notes an all-reduce of ``count`` elements of ``size`` bytes; after an iteration's last, has keystream made."""
        # Of a type that takes none, the place is kept: keystream is bound to a collective's number.
        common = dtype in _COMMON
        self._lengths += [size * length if common else 0 for _, length in parts(count, size, self._max_bytes)]
        if ends_iteration:
            lengths, self._lengths = self._lengths, []
            self._communicator.make_keystream(lengths)

    def forget(self) -> None:
        """Drops what was noted of an iteration that failed."""
        self._lengths = []
