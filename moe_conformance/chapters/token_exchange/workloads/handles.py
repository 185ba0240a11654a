"""Scripts of the fused token exchange: handles that are used again, handles of others, biases in combine.

The signs of a row are a tag, so that it says whose it is in whatever order it lies; a combine is given back the rows
that a dispatch brought, so that its sum is the token times the number of ranks that it went to. All numbers are exact.
Those of dispatches with a handle have as many bits as such sums leave room for, so that no narrower type holds them.
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
MOST_COPIES = 8  # of a row in a sum: a token goes to no more ranks


@dataclass(frozen=True)
class Tokens:
    """The tokens of one dispatch on every rank."""

    batches: tuple[Batch, ...]

    def call(self, *, weights: bool = True, differentiable: tuple[str, ...] = ("x_TD",)) -> Call:
        """Dispatch them where their ids say."""
        given = tuple(
            {"x_TD": b.x_TD, "ids_TK": b.ids_TK} | ({"weights_TK": b.weights_TK} if weights else {})
            for b in self.batches
        )
        return Call("dispatch", given, differentiable)

    def again(self, first: int) -> Call:
        """Dispatch them by the layout of an earlier dispatch."""
        handle = Ref(first, "handle")
        return Call("dispatch", tuple({"x_TD": b.x_TD, "handle": handle} for b in self.batches), ("x_TD",))

    def combine(self, rows: int, handle: int) -> Call:
        """Combine the rows of a dispatch with the handle of one, and go backward."""
        given = {"rows_RD": Ref(rows, "rows_RD"), "handle": Ref(handle, "handle")}
        return Call("combine", (given,) * len(self.batches), upstream=tuple({"": b.upstream} for b in self.batches))

    def answered(self, sent: int) -> Call:
        """Combine what experts answer to the rows of a dispatch, and go backward."""
        rows = Answered(*(Ref(sent, field) for field in ("rows_RD", "ids_RK", "weights_RK")))
        given = {"rows_RD": rows, "handle": Ref(sent, "handle")}
        return Call("combine", (given,) * len(self.batches), upstream=tuple({"": b.upstream} for b in self.batches))


class Drawing:
    """Draws the tokens of a script: on other ranks and in other dispatches other ones."""

    def __init__(self, name: str, variant: str, layout: Layout, run: Script = RUN) -> None:
        """Choose the config; four experts for each ep coordinate."""
        self.name, self.layout, self.run = name, layout, run
        experts = 4 * layout.ep
        self.memory: Literal["plain", "filled"] = "plain"
        self.config = Config(variant, experts=experts, top_k=min(3, experts), hidden=40)

    def for_kernels(self, dtype: torch.dtype = torch.bfloat16) -> Drawing:
        """Draw what fused kernels take."""
        self.config = replace(self.config, hidden=48, dtype=dtype)
        return self

    def tokens(
        self, number: int, sizes: tuple[int, ...], route: routes.Route = routes.dropped, config: Config | None = None
    ) -> Tokens:
        """Draw the tokens of dispatch `number`, with it for a microbatch."""
        config = config or self.config
        made = []
        for rank in range(self.layout.world):
            generator = draw.generator(self.name, self.layout.name, number, rank)
            ids_TK = route(sizes[rank % len(sizes)], config, self.layout, generator)
            made.append(draw.probe_batch(rank, number, ids_TK, config, generator))
        return Tokens(tuple(made))

    def filled(self, number: int, sizes: tuple[int, ...]) -> Tokens:
        """Draw tokens, weights and upstream gradients of as many bits as the sum of a token's rows leaves room for."""
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
        """Draw so many biases."""
        generator = draw.generator(self.name, self.layout.name, "biases", number, rank)
        drawn = (torch.randint(-99, 99, shape, generator=generator) / 4 for _ in range(number))
        return tuple(bias_TD.to(self.config.dtype) for bias_TD in drawn)

    def workload(self, *calls: Call) -> Workload:
        """Return the script."""
        return Workload(self.name, self.run, self.config, self.layout, (), memory=self.memory, calls=calls)


def significant_bits(dtype: torch.dtype) -> int:
    """Return how many significant bits a type has.

    >>> significant_bits(torch.bfloat16), significant_bits(torch.float32)
    (8, 24)
    """
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def everywhere(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """One expert of every ep coordinate, so that a token goes to all ranks; K is ep."""
    held = config.experts // layout.ep
    local_TK = torch.randint(0, held, (T, layout.ep), generator=generator)
    return local_TK + held * torch.arange(layout.ep)


def reused(drawing: Drawing, sizes: tuple[int, ...], others: tuple[int, ...]) -> Workload:
    """Dispatch, dispatch something else, and use the first handle twice more; each is combined, the last ones first."""
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
    """Return the tokens, which go where others went."""
    pairs = zip(tokens.batches, routing.batches, strict=True)
    return Tokens(tuple(replace(own, ids_TK=its.ids_TK, weights_TK=its.weights_TK) for own, its in pairs))


def combined_before(drawing: Drawing, sizes: tuple[int, ...], others: tuple[int, ...]) -> Workload:
    """Dispatch twice and combine twice, and go backward behind both."""
    first, other = drawing.filled(0, sizes), drawing.filled(1, others)
    late = (replace(call, late=True) for call in (first.combine(0, 0), other.combine(1, 1)))
    return drawing.workload(first.call(), other.call(weights=False), *late)


def reused_behind(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Use a handle again behind the backward of its own dispatch."""
    first = drawing.filled(0, sizes)
    again = replace_routing(drawing.filled(2, sizes), first)
    return drawing.workload(first.call(), first.combine(0, 0), again.again(0), again.combine(2, 0))


def wrong_handle(drawing: Drawing) -> Workload:
    """Combine the rows of two dispatches with each other's handle, then with their own; each has its number of rows."""
    drawing.config = replace(drawing.config, top_k=drawing.layout.ep)
    few = drawing.tokens(0, tuple(range(2, 2 + drawing.layout.world)), everywhere)
    more = drawing.tokens(1, tuple(range(4, 4 + drawing.layout.world)), everywhere)
    wrong = (replace(call, upstream=(), may_raise=True) for call in (few.combine(0, 1), more.combine(1, 0)))
    return drawing.workload(few.call(), more.call(), *wrong, more.combine(1, 1), few.combine(0, 0))


def biases(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Combine with one bias, with two and with none, each time what was dispatched afresh."""
    calls: list[Call] = []
    for number in (1, 2, 0):
        tokens = drawing.tokens(number, sizes)
        combine = tokens.combine(len(calls), len(calls))
        given = tuple(
            {**combine.given[rank], "biases": drawing.biases(number, rank, batch.x_TD.shape)}
            for rank, batch in enumerate(tokens.batches)
        )
        named = tuple(f"biases.{each}" for each in range(number))
        calls += [tokens.call(weights=False), replace(combine, given=given, differentiable=named)]
    return drawing.workload(*calls)


def weighed(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Dispatch twice with weights that ask for gradients, and combine what experts answer, the last one first.

    Weights are a quarter or a half: their sums over experts, times an upstream gradient, are exact in bfloat16 too.
    """
    first, second = (_light(drawing.tokens(number, sizes)) for number in (0, 1))
    both = ("x_TD", "weights_TK")
    return drawing.workload(
        first.call(differentiable=both), second.call(differentiable=both), second.answered(1), first.answered(0)
    )


def asked_apart(drawing: Drawing, sizes: tuple[int, ...]) -> Workload:
    """Do as `weighed`; in the first dispatch the weights alone ask for gradients, in the second the tokens alone."""
    first, second = (_light(drawing.tokens(number, sizes)) for number in (0, 1))
    calls = first.call(differentiable=("weights_TK",)), second.call(differentiable=("x_TD",))
    return drawing.workload(*calls, second.answered(1), first.answered(0))


def _light(tokens: Tokens) -> Tokens:
    """Return the tokens with weights of a quarter and a half, in place of smaller and of larger ones."""
    halves = (torch.where(own.weights_TK < 0.5, 0.25, 0.5).to(own.weights_TK.dtype) for own in tokens.batches)
    return Tokens(tuple(replace(own, weights_TK=each) for own, each in zip(tokens.batches, halves, strict=True)))


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
    # As kernels want rows: bfloat16, of a multiple of 16 columns.
    "reused-handle-bfloat16": lambda drawing: reused(drawing.for_kernels(), recipes.UNEVEN, (5, 12, 3)),
    "reused-handle-bfloat16-without-tokens": lambda drawing: reused(drawing.for_kernels(), recipes.ONE_WITHOUT, (0, 6)),
    "handle-of-another-bfloat16": lambda drawing: wrong_handle(drawing.for_kernels()),
    "weighed-bfloat16": lambda drawing: weighed(drawing.for_kernels(), recipes.UNEVEN),
    "biases-bfloat16": lambda drawing: biases(drawing.for_kernels(), recipes.UNEVEN),
}

# In the full profile.
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
