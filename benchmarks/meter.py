"""What native's load meter costs: `python -m benchmarks.meter`.

A report alone is timed on 2 and on 8 ranks, and its collectives are counted there and on 64 virtual ones.

A step on two ranks (ep = 2): microbatches through layers (exchange and experts; `--ffn 0`: the exchange alone),
forward and backward to x and the weights of slots, and a report. It runs with the meter on, with it off, and with it
off once more, round after round in changing order. The ratio of the two without it is what the machine's noise is.
Collectives go through gloo and are written down by the engine's ledger in all three.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median, quantiles

import click
import torch
import torch.distributed as dist

from moe_conformance.backends.native.meter import MeteredExchange
from moe_conformance.contract import Config, Experts, LoadMeter, MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.sessions import build, opened

_LAYOUT = Layout(2, ep=2)
_RUNS = {"on": True, "off": False, "off again": False}
_WARM = 3  # rounds that are not counted
_REPORTED = ((2, 2, False), (8, 2, False), (64, 8, True))  # ranks, ep, and whether ranks are virtual


@dataclass(frozen=True)
class Size:
    """How much a step is: T tokens on each rank in each microbatch, of D numbers, F in the experts, 0 without them."""

    rounds: int
    layers: int
    microbatches: int
    tokens: int
    hidden: int
    ffn: int


def passes(size: Size, rank: int) -> list[MeteredPass]:
    """Return the passes of one rank, one microbatch after the other."""
    generator = torch.Generator().manual_seed(rank)
    T, found = size.tokens, []
    for microbatch in range(size.microbatches):
        for layer in range(size.layers):
            ids_TK = torch.rand(T, 8, generator=generator).argsort(1)[:, :2]
            x_TD, upstream_TD = torch.randn(2, T, size.hidden, generator=generator)
            weights_TK = torch.rand(T, 2, generator=generator)
            padding_T = torch.zeros(T, dtype=torch.bool)
            found.append(MeteredPass("forward", layer, microbatch, ids_TK, padding_T, x_TD, weights_TK, upstream_TD))
        found += [MeteredPass("backward", layer, microbatch) for layer in reversed(range(size.layers))]
    return found


def steps(context: RankContext, sizes: tuple[int, ...]) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank, by what ran."""
    size = Size(*sizes)
    meter = _meter(context, size)
    own = passes(size, context.rank)
    seconds: dict[str, list[float]] = {name: [] for name in _RUNS}
    names = list(_RUNS)
    for number in range(_WARM + size.rounds):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            meter.switch(_RUNS[name])
            dist.barrier()
            began = time.perf_counter()
            meter.run(own)
            meter.report(number)
            if number >= _WARM:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def reports(context: RankContext, asked: tuple[int, ...]) -> tuple[list[float], int, int]:
    """Return the seconds of reports on this rank, and the calls of this job before and behind the last of them.

    Asked are ranks, ep, and how much a step is.
    """
    world, ep, *sizes = asked
    size, layout = Size(*sizes), Layout(world, ep=ep)
    meter, own = _meter(context, size, layout), passes(size, context.rank)
    seconds: list[float] = []
    before = 0
    for number in range(_WARM + size.rounds):
        meter.run(own)
        dist.barrier()
        before, began = context.calls(), time.perf_counter()
        meter.report(number)
        seconds.append(time.perf_counter() - began)
    return seconds[_WARM:], before, context.calls()


def _print_reports(size: Size) -> None:
    print("| ranks | a report, ms (quartiles) | collectives | bytes that a rank gives |\n| --- | --- | --- | --- |")
    size = replace(size, rounds=10, ffn=0)
    few = replace(size, layers=2, microbatches=2, tokens=8, hidden=8)
    for world, ep, virtual in _REPORTED:
        asked = few if virtual else size
        with Engine(virtual=virtual, preload=("moe_conformance.scenarios.script", "benchmarks.meter")) as engine:
            groups = Layout(world, ep=ep).groups()
            job = Job("benchmarks.meter:reports", (world, ep, *astuple(asked)), world, groups, deadline_s=600)
            ranks = engine.run(job).ranks
        low, middle, high = quantiles(
            [1000 * max(each) for each in zip(*(rank.value[0] for rank in ranks), strict=True)], n=4
        )
        _, before, behind = ranks[0].value
        calls = ranks[0].ledger[before:behind]
        given = sum(each.bytes_in for each in calls)
        named = f"{world} virtual" if virtual else f"{world}"
        print(f"| {named} | {middle:.2f} ({low:.2f} to {high:.2f}) | {len(calls)} | {given} |")


def ratios(seconds: Sequence[dict[str, list[float]]], name: str, base: str) -> list[float]:
    """Return, round by round, the slowest rank's step over that of another run in the same round."""
    slowest = {run: [max(of_round) for of_round in zip(*(rank[run] for rank in seconds), strict=True)] for run in _RUNS}
    return [mine / theirs for mine, theirs in zip(slowest[name], slowest[base], strict=True)]


def _meter(context: RankContext, size: Size, layout: Layout = _LAYOUT) -> LoadMeter:
    session = opened(context, "native", layout).session
    config = Config(variant="alltoall", experts=8, top_k=2, hidden=size.hidden, ffn=max(size.ffn, 1))
    meter: MeteredExchange = build(session, "load_meter", config)
    if size.ffn:
        experts: Experts = build(session, "experts", config)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        meter.expert = experts
    return meter


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=30, metavar="N", help="times that each of the three runs")
@click.option("--layers", default=4, metavar="N")
@click.option("--microbatches", default=4, metavar="N")
@click.option("--tokens", default=256, metavar="N", help="on each rank in each microbatch")
@click.option("--hidden", default=256, metavar="N")
@click.option("--ffn", default=512, metavar="N", help="0: no experts")
def main(rounds: int, layers: int, microbatches: int, tokens: int, hidden: int, ffn: int) -> None:
    """Measure, and print a table."""
    size = Size(rounds, layers, microbatches, tokens, hidden, ffn)
    groups = _LAYOUT.groups()
    with Engine(preload=("moe_conformance.scenarios.script", "benchmarks.meter")) as engine:
        timed = engine.run(Job("benchmarks.meter:steps", astuple(size), _LAYOUT.world, groups, deadline_s=600))
        seconds = [rank.value for rank in timed.ranks]
    what = f"{microbatches} microbatches of {tokens} tokens of {hidden} numbers, {ffn} in the experts"
    print(f"{layers} layers, {what}, {rounds} rounds")
    print("| step over step | median | quartiles |\n| --- | --- | --- |")
    for name, base in (("on", "off"), ("off again", "off")):
        found = ratios(seconds, name, base)
        low, _, high = quantiles(found, n=4)
        print(f"| {name} over {base} | {median(found):.3f} | {low:.3f} to {high:.3f} |")
    step_ms = 1000 * median(max(of_round) for of_round in zip(*(rank["off"] for rank in seconds), strict=True))
    print(f"A step without the meter: {step_ms:.1f} ms.\n")
    _print_reports(size)


if __name__ == "__main__":
    main()
