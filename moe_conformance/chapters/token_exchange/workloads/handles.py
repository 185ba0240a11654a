"""Scripts of the fused token exchange: reused handles, wrong handles, biases in combine.

The signs of a row are a tag, which identifies it in any order. A combine gets the rows of a dispatch unchanged, so that
its result is the token times the number of ranks that it was sent to. All numbers are exact. Those of dispatches with a
reused handle have as many bits as such sums leave room for, so that a narrower dtype would round them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import recipes
from moe_conformance.workloads.chapter import SMALL, Chapter
from moe_conformance.workloads.records import draw, routes
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Answered, Batch, Call, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = Script("token_exchange")
MOST_COPIES = 8  # the most ranks that a token is sent to


@dataclass(frozen=True)
class Tokens:
    """The tokens of one dispatch on every rank."""

    batches: tuple[Batch, ...]

    def call(self, *, weights: bool = True, differentiable: tuple[str, ...] = ("x_TD",)) -> Call:
        """Return the dispatch of the tokens by their ids."""
        given = tuple(
            {"x_TD": b.x_TD, "ids_TK": b.ids_TK} | ({"weights_TK": b.weights_TK} if weights else {})
            for b in self.batches
        )
        return Call("dispatch", given, differentiable)

    def again(self, first: int) -> Call:
        """Return the dispatch of the tokens with the handle of an earlier dispatch."""
        handle = Ref(first, "handle")
        return Call("dispatch", tuple({"x_TD": b.x_TD, "handle": handle} for b in self.batches), ("x_TD",))

    def combine(self, rows: int, handle: int) -> Call:
        """Return the combine of the rows of one dispatch with the handle of another, with a backward."""
        given = {"rows_RD": Ref(rows, "rows_RD"), "handle": Ref(handle, "handle")}
        return Call("combine", (given,) * len(self.batches), upstream=tuple({"": b.upstream} for b in self.batches))

    def answered(self, sent: int) -> Call:
        """Return the combine of the expert outputs for the rows of a dispatch, with a backward."""
        rows = Answered(*(Ref(sent, field) for field in ("rows_RD", "ids_RK", "weights_RK")))
        given = {"rows_RD": rows, "handle": Ref(sent, "handle")}
        return Call("combine", (given,) * len(self.batches), upstream=tuple({"": b.upstream} for b in self.batches))


class Drawing:
    """Draws the tokens of a script, which differ between ranks and dispatches."""

    def __init__(self, name: str, variant: str, layout: Layout, run: Script = RUN) -> None:
        """Set the config: four experts for each ep coordinate."""
        self.name, self.layout, self.run = name, layout, run
        experts = 4 * layout.ep
        self.memory: Literal["plain", "filled"] = "plain"
        self.config = Config(variant, experts=experts, top_k=min(3, experts), hidden=40)

    def for_kernels(self, dtype: torch.dtype = torch.bfloat16) -> Drawing:
        """Set a hidden size and dtype that fused kernels support."""
        self.config = replace(self.config, hidden=48, dtype=dtype)
        return self

    def tokens(
        self, number: int, sizes: tuple[int, ...], route: routes.Route = routes.dropped, config: Config | None = None
    ) -> Tokens:
        """Draw the tokens of dispatch `number`, which is the microbatch in their tags."""
        config = config or self.config
        made = []
        for rank in range(self.layout.world):
            generator = draw.generator(self.name, self.layout.name, number, rank)
            ids_TK = route(sizes[rank % len(sizes)], config, self.layout, generator)
            made.append(draw.probe_batch(rank, number, ids_TK, config, generator))
        return Tokens(tuple(made))

    def filled(self, number: int, sizes: tuple[int, ...]) -> Tokens:
        """Draw tokens, weights and upstream gradients with as many bits as sums of a token's rows leave room for."""
        bits = significant_bits(self.config.dtype) - math.ceil(math.log2(MOST_COPIES))
        made = []
        for rank, batch in enumerate(self.tokens(number, sizes).batches):
            generator = draw.generator(self.name, self.layout.name, "filled", number, rank)
            x_TD, upstream, weights_TK = (
                draw.fill_mantissas(signs, room, generator)
                for signs, room in (
                    (batch.x_TD, bits),
                    (batch.upstream.sign(), bits),
                    (torch.ones_like(batch.weights_TK), significant_bits(batch.weights_TK.dtype)),
                )
            )
            made.append(Batch(x_TD, batch.ids_TK, weights_TK, upstream))
        return Tokens(tuple(made))

    def biases(self, number: int, rank: int, shape: torch.Size) -> tuple[Tensor, ...]:
        """Draw `number` biases for a rank."""
        generator = draw.generator(self.name, self.layout.name, "biases", number, rank)
        drawn = (torch.randint(-99, 99, shape, generator=generator) / 4 for _ in range(number))
        return tuple(bias_TD.to(self.config.dtype) for bias_TD in drawn)

    def workload(self, *calls: Call) -> Workload:
        """Return the script with these calls."""
        return Workload(self.name, self.run, self.config, self.layout, (), memory=self.memory, calls=calls)


def significant_bits(dtype: torch.dtype) -> int:
    """Return the number of significant bits of a dtype.

    >>> significant_bits(torch.bfloat16), significant_bits(torch.float32)
    (8, 24)
    """
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def everywhere(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route every token to one expert of every ep coordinate, and so to all ranks; K is ep."""
    held = config.experts // layout.ep
    local_TK = torch.randint(0, held, (T, layout.ep), generator=generator)
    return local_TK + held * torch.arange(layout.ep)


def reused(drawing: Drawing, sizes: tuple[int, ...], others: tuple[int, ...]) -> Workload:
    """Return the script of two dispatches and two more with the first handle, combined in reverse order."""
    first, other = drawing.filled(0, sizes), drawing.filled(1, others)
    second, third = (replace_routing(drawing.filled(number, sizes), first) for number in (2, 3))
    return drawing.workload(
        first.call(),
        other.call(weights=False),
        second.again(0),
        third.again(0),
        third.combine(3, 0),
        second.combine(2, 0),
        other.combine(1, 1),
        first.combine(0, 0),
    )


def replace_routing(tokens: Tokens, routing: Tokens) -> Tokens:
    """Return the tokens with the routing of others."""
    pairs = zip(tokens.batches, routing.batches, strict=True)
    return Tokens(tuple(replace(batch, ids_TK=other.ids_TK, weights_TK=other.weights_TK) for batch, other in pairs))


def combined_before(drawing: Drawing, sizes: tuple[int, ...], others: tuple[int, ...]) -> Workload:
    """Return the script of two dispatches and two combines, with the backwards after both."""
    first, other = drawing.filled(0, sizes), drawing.filled(1, others)
    late = (replace(call, late=True) for call in (first.combine(0, 0), other.combine(1, 1)))
    return drawing.workload(first.call(), other.call(weights=False), *late)


def reused_behind(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Return the script that reuses a handle after the backward of its combine."""
    first = drawing.filled(0, sizes)
    again = replace_routing(drawing.filled(2, sizes), first)
    return drawing.workload(first.call(), first.combine(0, 0), again.again(0), again.combine(2, 0))


def wrong_handle(drawing: Drawing) -> Workload:
    """Return the script that combines the rows of two dispatches with swapped handles, then with the right ones.

    The numbers of rows differ.
    """
    drawing.config = replace(drawing.config, top_k=drawing.layout.ep)
    few = drawing.tokens(0, tuple(range(2, 2 + drawing.layout.world)), everywhere)
    more = drawing.tokens(1, tuple(range(4, 4 + drawing.layout.world)), everywhere)
    wrong = (replace(call, upstream=(), may_raise=True) for call in (few.combine(0, 1), more.combine(1, 0)))
    return drawing.workload(few.call(), more.call(), *wrong, more.combine(1, 1), few.combine(0, 0))


def biases(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Return the script of combines with one bias, with two and with none, each after a new dispatch."""
    calls: list[Call] = []
    for number in (1, 2, 0):
        tokens = drawing.tokens(number, sizes)
        combine = tokens.combine(len(calls), len(calls))
        given = tuple(
            {**combine.given[rank], "biases": drawing.biases(number, rank, batch.x_TD.shape)}
            for rank, batch in enumerate(tokens.batches)
        )
        named = tuple(f"biases.{index}" for index in range(number))
        calls += [tokens.call(weights=False), replace(combine, given=given, differentiable=named)]
    return drawing.workload(*calls)


def weighed(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Return the script of two dispatches with weights that require grad, and combines in reverse order.

    Weights are 1/4 or 1/2: their sums over experts, times an upstream gradient, are exact in bfloat16 too.
    """
    first, second = (_light(drawing.tokens(number, sizes)) for number in (0, 1))
    both = ("x_TD", "weights_TK")
    return drawing.workload(
        first.call(differentiable=both), second.call(differentiable=both), second.answered(1), first.answered(0)
    )


def asked_apart(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Return the script of `weighed` in which weights require grad in the first dispatch, tokens in the second."""
    first, second = (_light(drawing.tokens(number, sizes)) for number in (0, 1))
    calls = first.call(differentiable=("weights_TK",)), second.call(differentiable=("x_TD",))
    return drawing.workload(*calls, second.answered(1), first.answered(0))


def _light(tokens: Tokens) -> Tokens:
    """Return the tokens with weights of 1/4 in place of those below 1/2, and 1/2 in place of others."""
    halves = (torch.where(batch.weights_TK < 0.5, 0.25, 0.5).to(batch.weights_TK.dtype) for batch in tokens.batches)
    return Tokens(
        tuple(replace(batch, weights_TK=light_TK) for batch, light_TK in zip(tokens.batches, halves, strict=True))
    )


SCRIPTS: dict[str, Callable[[Drawing], Workload]] = {
    "reused-handle": lambda drawing: reused(drawing, recipes.UNEVEN, (5, 12, 3)),
    "reused-handle-without-tokens": lambda drawing: reused(drawing, recipes.ONE_WITHOUT, (0, 6)),
    "reused-handle-late": lambda drawing: combined_before(drawing, recipes.UNEVEN, (5, 12, 3)),
    "reused-handle-behind": lambda drawing: reused_behind(drawing, recipes.UNEVEN),
    "handle-of-another": wrong_handle,
    "biases": lambda drawing: biases(drawing, recipes.UNEVEN),
    "biases-without-tokens": lambda drawing: biases(drawing, recipes.ONE_WITHOUT),
    "weighed": lambda drawing: weighed(drawing, recipes.UNEVEN),
    "weighed-without-tokens": lambda drawing: weighed(drawing, recipes.ONE_WITHOUT),
    "weights-asked-apart": lambda drawing: asked_apart(drawing, recipes.UNEVEN),
    # As kernels need rows: bfloat16, with a multiple of 16 columns.
    "reused-handle-bfloat16": lambda drawing: reused(drawing.for_kernels(), recipes.UNEVEN, (5, 12, 3)),
    "reused-handle-bfloat16-without-tokens": lambda drawing: reused(drawing.for_kernels(), recipes.ONE_WITHOUT, (0, 6)),
    "handle-of-another-bfloat16": lambda drawing: wrong_handle(drawing.for_kernels()),
    "weighed-bfloat16": lambda drawing: weighed(drawing.for_kernels(), recipes.UNEVEN),
    "biases-bfloat16": lambda drawing: biases(drawing.for_kernels(), recipes.UNEVEN),
}

# Scripts of the full profile.
IN_FLOAT16: dict[str, Callable[[Drawing], Workload]] = {
    "reused-handle-float16": lambda drawing: reused(drawing.for_kernels(torch.float16), recipes.UNEVEN, (5, 12, 3)),
    "weighed-float16": lambda drawing: weighed(drawing.for_kernels(torch.float16), recipes.UNEVEN),
    "biases-float16": lambda drawing: biases(drawing.for_kernels(torch.float16), recipes.UNEVEN),
}


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of a variant on a layout."""
    for name, write in {**SCRIPTS, **(IN_FLOAT16 if profile == "full" else {})}.items():
        yield write(Drawing(name, variant, layout))


CHAPTERS = (Chapter((RUN,), (*SCRIPTS, *IN_FLOAT16), scripts, quick=SMALL),)
