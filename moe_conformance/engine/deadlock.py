"""Finds out that ranks wait for each other in collectives and always will."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from . import stacks
from .host import Host, RankProcess
from .stillness import Stillness

_STILL_S = 0.25  # before stacks are asked for, and again afterwards


class DeadlockWatch:
    """Proves a deadlock in about half a second, on a crowded machine in a few.

    The proof: no rank moves; then the stack of each rank without an answer, for which it is woken, stands in a
    collective; then still no rank moves. If a stack stands elsewhere, the next is asked for after twice the time.
    """

    def __init__(self, host: Host, ranks: Sequence[RankProcess]) -> None:
        self._host = host
        self._look = partial(host.turns, ranks)
        self._patience_s = _STILL_S
        self._in_collectives = False
        self._mains = self._look(True)
        self._stillness: Stillness | None = None  # it looks at all threads: not before the main ones are still

    def proves(self, pending: Collection[RankProcess]) -> bool:
        """Looks at the ranks, of which some have not answered; to be called every INTERVAL_S."""
        if self._stillness is None or not self._stillness.holds():
            self._in_collectives = False
            before, self._mains = self._mains, self._look(True)
            self._stillness = Stillness(self._look) if before == self._mains else None
        if self._stillness is None or not self._stillness.lasts(self._patience_s):
            return False
        if not self._in_collectives:
            texts = self._host.stacks(tuple(pending))
            self._in_collectives = all(stacks.waits_in_collective(text) for text in texts.values())
            self._patience_s = _STILL_S if self._in_collectives else 2 * self._patience_s
            self._stillness = Stillness(self._look)
            return False
        return True
