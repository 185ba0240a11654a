"""Scripts of padded token counts: how many rows the ranks of an exchange pad to, and bounds that some T breaks.

T tokens of a rank, P rows that it is padded to, A the alignment, B the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_conformance.contract import Config, Routing
from moe_conformance.topology import Layout
from moe_conformance.workloads import draw
from moe_conformance.workloads.corpus import Profile
from moe_conformance.workloads.records import Call, Workload

ALIGNMENTS = (1, 16, 64, 128)
BOUND = 23

# T of every rank, call by call: entry r modulo the length. The largest T is on one rank, moves, is aligned, is gone.
_COUNTED = ((5, 0, 70, 3), (64, 64, 64, 64), (0,), (0, 1, 0, 0), (65, 64, 3, 129), (17, 70), (0, 2, 16, 0, 128))
_BOUNDED = ((5, 0, 23, 3), (23,), (0,), (0, 1, 0, 0))
# Within the bound, broken by one rank, by another, by all, and within it again.
_BREACHES = ((5, 0, 23, 3), (5, 29, 0, 3), (37, 0, 1, 23), (24, 25, 26, 27), (23, 1, 0, 7))


def _each(tokens: tuple[int, ...], layout: Layout) -> list[int]:
    return [tokens[rank % len(tokens)] for rank in range(layout.world)]


def _counts(name: str, config: Config, layout: Layout, asked: tuple[tuple[int, ...], ...]) -> Workload:
    calls = tuple(Call("count", tuple({"tokens": T} for T in _each(tokens, layout))) for tokens in asked)
    return Workload(name, "token_padding", config, layout, (), calls=calls)


def _breaches(config: Config, layout: Layout) -> Workload:
    def given(call: int, rank: int, T: int) -> dict[str, Any]:
        generator = draw.generator("bound-broken", layout.name, call, rank)
        batch = draw.probe_batch(rank, call, draw.choose(T, config, generator), config, generator)
        return {"x": batch.x_TD, "routing": Routing(batch.ids_TK, batch.weights_TK, config.experts)}

    calls = tuple(
        Call("dispatch", tuple(given(n, r, T) for r, T in enumerate(_each(tokens, layout))), may_raise=True)
        for n, tokens in enumerate(_BREACHES)
    )
    return Workload("bound-broken", "exchange", config, layout, (), calls=calls)


def token_counts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of `TOKEN_COUNTS`."""
    E = Config.experts if Config.experts % layout.ep == 0 else 3 * layout.ep
    for A in ALIGNMENTS:
        config = Config(variant, experts=E, pad_tokens="group_max", token_alignment=A)
        yield _counts(f"padded-counts-{A}", config, layout, _COUNTED)
    bounded = Config(variant, experts=E, pad_tokens="bound", token_alignment=8, token_bound=BOUND)
    yield _counts("padded-counts-bound", bounded, layout, _BOUNDED)
    yield _breaches(bounded, layout)


TOKEN_COUNTS = (*(f"padded-counts-{A}" for A in ALIGNMENTS), "padded-counts-bound", "bound-broken")
