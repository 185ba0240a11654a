"""Scripts that build: with sizes that do not divide, all of which must be refused, and one exchange several times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, Chapter
from moe_conformance.workloads.records.runs import ON_SESSION
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

EXPERTS, NO_EXPERTS, WIDTH = "indivisible-experts", "no-experts", "indivisible-width"
NAMES = (EXPERTS, NO_EXPERTS, WIDTH)
AGAIN = "exchange-built-again"
_WIDEST = 6  # ranks: more ranks would show nothing else


def corpus(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of a layout: too many experts, fewer than ep, and none; widths likewise."""
    del profile
    if layout.world > _WIDEST:
        return
    ep, etp = layout.ep, layout.etp
    if ep > 1:
        counts = dict.fromkeys((ep + 1, 3 * ep - 1, ep - 1))
        configs = [Config(variant=variant, experts=count, top_k=1) for count in counts]
        yield _workload(EXPERTS, configs, ("exchange", "experts"), layout)
        yield _workload(NO_EXPERTS, [Config(variant=variant, experts=0, top_k=1)], ("exchange", "experts"), layout)
    if etp > 1:
        configs = [Config(variant=variant, experts=2 * ep, top_k=1, ffn=width) for width in (8 * etp + 1, etp - 1)]
        yield _workload(WIDTH, configs, ("experts",), layout)


def _workload(name: str, configs: list[Config], surfaces: tuple[str, ...], layout: Layout) -> Workload:
    builds: list[tuple[str, Mapping[str, Config]]] = [
        (surface, {"config": config}) for config in configs for surface in surfaces
    ]
    calls = tuple(Call(surface, (given,) * layout.world, may_raise=True) for surface, given in builds)
    config = Config(variant=configs[0].variant)
    return Workload(name, ON_SESSION, config, layout, (), calls=calls, shows=frozenset({"sizes that do not divide"}))


def again(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the script that builds one exchange three times."""
    del profile
    if 1 < layout.world <= _WIDEST:
        config = Config(variant=variant)
        config = config if config.experts % layout.ep == 0 else Config(variant=variant, experts=2 * layout.ep)
        calls = (Call("exchange", ({"config": config},) * layout.world, may_raise=True),) * 3
        yield Workload(AGAIN, ON_SESSION, config, layout, (), calls=calls, shows=frozenset({"built again"}))


CHAPTERS = (
    Chapter((ON_SESSION,), NAMES, corpus, variants="every"),
    Chapter((ON_SESSION,), (AGAIN,), again, variants="every", quick=(EP2,)),
)
