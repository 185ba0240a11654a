"""What native's fast paths save: `python -m benchmarks.fast_paths`.

Every path runs beside the plain one that gives the same result, round after round in changing order, at three sizes, on
one rank and on four (ep = 4). A ratio is taken within a round, of the slowest rank's times; above 1 the fast path is
slower. Collectives go through gloo, on CPU.

T tokens of a rank, K = 2 slots, E = 2 ep experts, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

import click
import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Delivery, ExpertFn, Routing, Session, whole
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.parameters import coverage
from moe_conformance.scenarios.sessions import build, opened

SIZES = {"small": (64, 64), "medium": (512, 256), "large": (2048, 512)}  # T and D
K, PER_RANK = 2, 2
_WARM = 3  # rounds that are not counted

Call = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """A fast path and the plain one."""

    name: str
    fast: Call
    plain: Call


def pairs(session: Session, rank: int, layout: Layout, T: int, D: int) -> Iterator[Pair]:
    """Yield what is compared, with inputs of this rank."""
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, D, generator=generator)
    weights_TK = torch.rand(T, K, generator=generator)
    E = PER_RANK * layout.ep
    dealt_TK = (torch.arange(T * K) % E).reshape(T, K)
    uneven_TK = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    yield _experts(session, Config(variant="alltoall", experts=E, top_k=K, hidden=D, ffn=D), x_TD)
    config = Config(variant="alltoall", experts=E, top_k=K, hidden=D)
    robin = config.changed({"routing.forced": (("round_robin", None),)})
    yield _exchange("round robin by slices", session, (robin, config), x_TD, Routing(dealt_TK, weights_TK, E))
    equal = config.changed({"padding.splits": "equal"})
    yield _exchange("equal splits", session, (equal, config), x_TD, Routing(uneven_TK, weights_TK, E))
    yield _combine_add(session, config, x_TD, uneven_TK[:, 0] % T)


def _experts(session: Session, config: Config, x_TD: Tensor) -> Pair:
    """Compare batched products with kept weights and a loop over experts, without gradients, of as many rows each."""
    fast = build(session, "experts", config)
    with session.without_optional():
        plain = build(session, "experts", config)
    for experts in (fast, plain):
        assert not coverage(experts)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    delivery = Delivery.grouped(x_TD, [len(x_TD) // PER_RANK] * PER_RANK)

    def forward(experts: ExpertFn) -> Tensor:
        with torch.no_grad():
            return experts(delivery)

    return Pair("batched experts, no gradients", lambda: forward(fast), lambda: forward(plain))


def _exchange(name: str, session: Session, configs: tuple[Config, Config], x_TD: Tensor, routing: Routing) -> Pair:
    """Compare two exchanges of the same tokens, forward and backward."""

    def step(exchange: Callable[[Tensor, Routing, ExpertFn], Tensor]) -> None:
        x = x_TD.detach().requires_grad_()
        exchange(x, routing, lambda delivery: (2 * delivery.rows_RD).reshape(delivery.shape)).sum().backward()  # type: ignore[no-untyped-call]

    fast, plain = (whole(build(session, "exchange", config)) for config in configs)
    return Pair(name, lambda: step(fast), lambda: step(plain))


def _combine_add(session: Session, config: Config, x_TD: Tensor, index_T: Tensor) -> Pair:
    """Compare rows added in place with rows added out of place, without gradients."""
    in_place, sums = build(session, "combine_add", config), build(session, "scatter_add", config)
    out_TD = torch.zeros_like(x_TD)
    far_TD = x_TD.clone()

    def fast() -> Tensor:
        with torch.no_grad():
            added: Tensor = in_place.add(out_TD, index_T, x_TD, far_TD)
            return added

    def plain() -> Tensor:
        with torch.no_grad():
            added: Tensor = sums.add(out_TD, index_T, x_TD)
            return added

    return Pair("rows added in place", fast, plain)


def timed(context: RankContext, asked: tuple[int, int, int, int]) -> dict[str, tuple[list[float], ...]]:
    """Return this rank's seconds of every round, fast and plain, by path; asked are ranks, rounds, T and D."""
    world, rounds, *size = asked
    layout = Layout(world, ep=world)
    session = opened(context, "native", layout).session
    found: dict[str, tuple[list[float], ...]] = {}
    for pair in pairs(session, context.rank, layout, *size):
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(_WARM + rounds):
            calls = [(0, pair.fast), (1, pair.plain)]
            for which, call in calls if number % 2 else reversed(calls):
                dist.barrier()
                began = time.perf_counter()
                call()
                if number >= _WARM:
                    seconds[which].append(time.perf_counter() - began)
        found[pair.name] = seconds
    return found


def ratios(of_ranks: Sequence[tuple[list[float], ...]]) -> list[float]:
    """Return, round by round, the slowest rank's time of the fast path over that of the plain one."""
    fast, plain = (
        [max(of_round) for of_round in zip(*(rank[which] for rank in of_ranks), strict=True)] for which in (0, 1)
    )
    return [mine / theirs for mine, theirs in zip(fast, plain, strict=True)]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=20, metavar="N", help="times that each path and its plain one run")
def main(rounds: int) -> None:
    """Measure, and print a table."""
    print("| fast path over the plain one, median (quartiles) | ranks | " + " | ".join(SIZES) + " |")
    print("| --- | --- | " + "--- | " * len(SIZES))
    with Engine(preload=("moe_conformance.scenarios.script", "benchmarks.fast_paths")) as engine:
        for world in (1, 4):
            cells: dict[str, list[str]] = {}
            for size in SIZES.values():
                job = Job(
                    "benchmarks.fast_paths:timed",
                    (world, rounds, *size),
                    world,
                    Layout(world, ep=world).groups(),
                    deadline_s=300,
                )
                ranks = [rank.value for rank in engine.run(job).ranks]
                for name in ranks[0]:
                    low, middle, high = quantiles(ratios([rank[name] for rank in ranks]), n=4)
                    cells.setdefault(name, []).append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            for name, row in cells.items():
                print(f"| {name} | {world} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
