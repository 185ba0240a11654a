"""Calls the second oracle of the exchange as the recipe of its golden calls the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from self_tests.chapters.exchange.second import deliveries as second
from self_tests.chapters.exchange.second.deliveries import Pair, Placement
from self_tests.goldens.second_oracles import second_oracle


def deliveries(ids: Sequence[Any], exchange_groups: Any, held: Any) -> list[Pair]:
    """Every pair that must arrive."""
    return second.deliveries(ids, Placement(exchange_groups, held))


ORACLE = second_oracle(deliveries=deliveries)
