"""What native's overlapped step gains: `python -m benchmarks.overlapped_step`.

A step takes microbatches through layers (router, exchange, experts), forward and backward, on 2 and on 4 ranks (ep).
Sequentially one microbatch follows the other; overlapped, the forward of one runs while rows of the backward of the
one before it are under way. Both are taken of the same layers, round after round in changing order.

On one machine nothing is under way for long. So the wire is slowed: every all-to-all, awaited at once or later, arrives
a delay after it was started, and who waits for it sleeps until then, without the use of a core. A delay of 0 shows what
overlap itself costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, OverlappedStep
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.sessions import build, opened

_RUNS = ("sequential", "overlapped", "overlapped, deferred")
_WARM = 2  # rounds that are not counted
_WORLDS = (2, 4)


@dataclass(frozen=True)
class Size:
    """How much a step is: T tokens on each rank in each microbatch, of D numbers, F in the experts."""

    rounds: int
    layers: int
    microbatches: int
    tokens: int
    hidden: int
    ffn: int
    delay_ms: float


@dataclass(frozen=True)
class _Slow:
    """Work that is done a while after it was started."""

    work: Any
    until: float

    def wait(self) -> None:
        """Wait for the work, and sleep until it would have arrived."""
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


@contextmanager
def slow_wire(delay_s: float) -> Iterator[None]:
    """Deliver every all-to-all a while after it was started."""
    plain = dist.all_to_all_single

    def call(*tensors: Any, async_op: bool = False, **options: Any) -> _Slow | None:
        slow = _Slow(plain(*tensors, async_op=True, **options), time.perf_counter() + delay_s)
        if async_op:
            return slow
        slow.wait()
        return None

    dist.all_to_all_single = call
    try:
        yield
    finally:
        dist.all_to_all_single = plain


def steps(context: RankContext, asked: tuple[Any, ...]) -> dict[str, list[float]]:
    """Return the seconds of every step on this rank, by what ran; asked are the ranks, and how much a step is."""
    world, *sizes = asked
    size = Size(*sizes)
    calls = _calls(context, size, world)
    xs, upstreams = _microbatches(context, size)
    seconds: dict[str, list[float]] = {name: [] for name in _RUNS}
    with slow_wire(size.delay_ms / 1000):
        for number in range(_WARM + size.rounds):
            shift = number % len(_RUNS)
            for name in (*_RUNS[shift:], *_RUNS[:shift]):
                dist.barrier()
                began = time.perf_counter()
                calls[name]([x.detach().requires_grad_() for x in xs], upstreams)
                if number >= _WARM:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def _calls(context: RankContext, size: Size, world: int) -> dict[str, Callable[..., Any]]:
    session = opened(context, "native", Layout(world, ep=world)).session
    plain = Config(variant="alltoall", experts=8, top_k=2, hidden=size.hidden, ffn=size.ffn)
    found: dict[str, Callable[..., Any]] = {}
    for name, deferred in ((_RUNS[1], False), (_RUNS[2], True)):
        changes = {"overlap.layers": size.layers, "overlap.deferred_weights": deferred}
        step: OverlappedStep = build(session, "overlapped_step", plain.changed(changes))
        for layer in step.layers:
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
        found[name] = step.run
        if not deferred:
            found[_RUNS[0]] = partial(_sequential, step)
    return found


def _sequential(step: OverlappedStep, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> None:
    for x, upstream in zip(xs, upstreams, strict=True):
        for layer in step.layers:
            x = layer(x)
        torch.autograd.backward(x, upstream)


def _microbatches(context: RankContext, size: Size) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(context.rank)
    xs = torch.randn(size.microbatches, size.tokens, size.hidden, generator=generator)
    upstreams = torch.randn(size.microbatches, size.tokens, size.hidden, generator=generator)
    return list(xs), list(upstreams)


def _slowest(ranks: Sequence[dict[str, list[float]]], run: str) -> list[float]:
    return [max(of_round) for of_round in zip(*(rank[run] for rank in ranks), strict=True)]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=10, metavar="N", help="times that each of the runs is taken")
@click.option("--layers", default=2, metavar="N")
@click.option("--microbatches", default=4, metavar="N")
@click.option("--tokens", default=128, metavar="N", help="on each rank in each microbatch")
@click.option("--hidden", default=128, metavar="N")
@click.option("--ffn", default=256, metavar="N")
@click.option("--delay", "delays", default=(0.0, 5.0, 20.0), multiple=True, metavar="MS", help="may be given again")
def main(
    rounds: int, layers: int, microbatches: int, tokens: int, hidden: int, ffn: int, delays: tuple[float, ...]
) -> None:
    """Measure, and print a table."""
    print(f"{layers} layers, {microbatches} microbatches of {tokens} tokens of {hidden} numbers, {ffn} in the experts")
    print("| ranks | delay | sequential | overlapped over it | with deferred weight gradients |")
    print("| --- | --- | --- | --- | --- |")
    with Engine(preload=("moe_conformance.scenarios.script", "benchmarks.overlapped_step")) as engine:
        for world in _WORLDS:
            for delay_ms in delays:
                size = Size(rounds, layers, microbatches, tokens, hidden, ffn, delay_ms)
                asked = (world, *astuple(size))
                groups = Layout(world, ep=world).groups()
                job = Job("benchmarks.overlapped_step:steps", asked, world, groups, deadline_s=600)
                ranks: list[Any] = [rank.value for rank in engine.run(job).ranks]
                base = _slowest(ranks, _RUNS[0])
                cells = [f"{world}", f"{delay_ms:g} ms", f"{1000 * median(base):.0f} ms"]
                for run in _RUNS[1:]:
                    found = [mine / theirs for mine, theirs in zip(_slowest(ranks, run), base, strict=True)]
                    low, middle, high = quantiles(found, n=4)
                    cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
                print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
