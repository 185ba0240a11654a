"""Planted bugs: small, named changes to native that the suite must catch, and say why. One module per chapter."""

from __future__ import annotations

from self_tests.planted_bugs import (
    capacity,
    capacity_ends,
    capacity_exchange,
    config_rules,
    cost,
    dispatch_layout,
    exchange,
    exchange_back,
    exchange_ends,
    exchange_misuse,
    exchange_spoilt,
    experts,
    first_steps,
    flex,
    forcing,
    gradients,
    groups,
    identity,
    many_ranks,
    narrow_wires,
    overflow_drops,
    overlap,
    packed_sequences,
    packing,
    packing_ends,
    padding_gradients,
    permute,
    repetition,
    routing,
    routing_ends,
    routing_extremes,
    row_blocks,
    settings,
    shared_biases,
    shared_experts,
    sizes,
    token_copies,
    token_exchange,
    twin_ends,
    twins,
)
from self_tests.planted_bugs.plant import Expectation, Plant

__all__ = ["Expectation", "Plant", "find", "plants", "plants_of_many_ranks"]


def plants() -> tuple[Plant, ...]:
    """Return all plants, chapter by chapter."""
    exchanges = (exchange, repetition, exchange_back, exchange_ends, twins, twin_ends, exchange_spoilt, exchange_misuse)
    drops = (capacity, capacity_ends, capacity_exchange, overflow_drops, row_blocks)
    routers = (routing, routing_ends, routing_extremes, forcing)
    chapters = (first_steps, sizes, *routers, *drops, *exchanges, experts, gradients, groups, overlap, cost)
    laws = (identity, padding_gradients, settings, config_rules)
    shared = (shared_experts, shared_biases)
    wires = (token_exchange, narrow_wires)
    surfaces = (*laws, flex, permute, dispatch_layout, *wires, packing, packing_ends, packed_sequences, *shared)
    return tuple(plant for chapter in (*chapters, token_copies, *surfaces) for plant in chapter.PLANTS)


def plants_of_many_ranks() -> tuple[Plant, ...]:
    """Return those that show on virtual ranks only."""
    return many_ranks.PLANTS


def find(name: str) -> Plant:
    """Return the plant of that name.

    Raises:
        LookupError: there is none; lists those that there are.
    """
    for plant in (*plants(), *plants_of_many_ranks()):
        if plant.name == name:
            return plant
    raise LookupError(f"no plant {name!r}; known: {', '.join(plant.name for plant in plants())}")
