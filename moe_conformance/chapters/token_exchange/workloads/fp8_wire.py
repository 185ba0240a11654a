"""Scripts of the token exchange with fp8 dispatch: the signs of rows are tags, which survive rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.chapters.token_exchange.workloads.handles import RUN, Drawing, Tokens
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import recipes
from moe_conformance.workloads.chapter import SMALL, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile

SIGNED = 32  # columns whose values are large enough to keep their signs
BLOCKS = 272  # columns: two blocks of 128 and a short one
ONE_BLOCK = 40  # columns


def magnitudes(tokens: int, hidden: int, generator: torch.Generator) -> Tensor:
    """Draw |x| (T, D) such that neighbouring blocks, in a row or a column, have clearly different scales.

    Columns after the first `SIGNED` have values from the largest of their block down to zero. Of four tokens one has a
    block of zeros, one has inf or NaN, and one a block whose largest value, times a power of two, is the largest value
    of e4m3 or slightly above it.
    """
    starts = range(0, hidden, 128)
    size_TD = torch.zeros(tokens, hidden)
    for t in range(tokens):
        order = torch.randperm(len(starts), generator=generator).tolist()
        for start, place in zip(starts, order, strict=True):
            width = min(128, hidden - start)
            near = (1 + torch.rand(width, generator=generator)) / 2
            far = 2.0 ** -(20 * torch.rand(width, generator=generator))
            drawn = torch.where(torch.rand(width, generator=generator) < 0.1, 0.0, far)
            drawn[:1] = 1.0
            if start == 0:
                drawn[:SIGNED] = near[:SIGNED]
            size_TD[t, start : start + width] = drawn * 3.0 ** (3 * place + t % 3 - 2)
        if t % 4 == 0 and hidden > 128:
            edge = 448.0 if t % 8 == 0 else 450.0
            edge *= 2.0 ** round(math.log2(float(size_TD[t, 128]) / edge))
            size_TD[t, 128:256] *= edge / float(size_TD[t, 128])
            size_TD[t, 128] = edge
        if t % 4 == 2:
            size_TD[t, 128:256] = 0.0
        if t % 4 == 3:
            size_TD[t, min(200, hidden - 1)] = torch.inf if t % 8 == 3 else torch.nan
    return size_TD


def rounded(drawing: Drawing, sizes: Sequence[int], hidden: int) -> Workload:
    """Return the script that dispatches no token, then some, and combines the received rows.

    The first dispatch shows what is sent even without tokens. Upstream gradients have more bits than an fp8 format.
    """
    drawing.config = replace(drawing.config, hidden=hidden, wire="float8")
    none, some = drawing.tokens(0, (0,)), drawing.tokens(1, tuple(sizes))
    filled, made = drawing.filled(1, tuple(sizes)), []
    for rank, (batch, with_bits) in enumerate(zip(some.batches, filled.batches, strict=True)):
        generator = draw.generator(drawing.name, drawing.layout.name, "magnitudes", rank)
        x_TD = batch.x_TD * magnitudes(len(batch.x_TD), hidden, generator)
        made.append(replace(batch, x_TD=x_TD, upstream=with_bits.upstream))
    tokens = Tokens(tuple(made))
    return drawing.workload(none.call(), tokens.call(), tokens.combine(1, 1))


SCRIPTS: dict[str, Callable[[Drawing], Workload]] = {
    "float8-rows": lambda drawing: rounded(drawing, recipes.UNEVEN, BLOCKS),
    "float8-rows-without-tokens": lambda drawing: rounded(drawing, recipes.ONE_WITHOUT, BLOCKS),
    "float8-rows-of-one-block": lambda drawing: rounded(drawing, recipes.ONE_WITHOUT, ONE_BLOCK),
}


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of a variant on a layout."""
    for name, write in SCRIPTS.items():
        yield write(Drawing(name, variant, layout, RUN))


CHAPTERS = (Chapter((RUN,), tuple(SCRIPTS), scripts, quick=SMALL),)
