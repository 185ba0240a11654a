"""Scripts of the low-latency token exchange: filled buffers, and more tokens than `tokens_max`.

The signs of a row are a tag. All numbers are exact in float32: combine sums weights, multiples of 1/16, times numbers
of `BITS` bits, and a weight's gradient is a sum over columns of products of a number of these bits and a tag or a
quarter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moe_conformance.chapters.token_exchange.workloads.handles import Drawing, Tokens
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import recipes
from moe_conformance.workloads.chapter import SMALL, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Filled, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = Script("places_exchange")
BITS = 12  # more than bfloat16 and float16 have


def dispatch(tokens: Tokens, tokens_max: int, *, may_raise: bool = False) -> Call:
    """Return the dispatch of tokens with the given `tokens_max`."""
    given = tuple({"x_TD": b.x_TD, "ids_TK": b.ids_TK, "tokens_max": tokens_max} for b in tokens.batches)
    return Call("dispatch", given, ("x_TD",), may_raise=may_raise)


def combine(tokens: Tokens, first: int) -> Call:
    """Return the combine of the rows of a dispatch, with NaN in unfilled places, and its backward."""
    rows = Filled(Ref(first, "rows_NCD"), Ref(first, "counts_N"))
    came = {"rows_NCD": rows, "handle": Ref(first, "handle")}
    given = tuple({"weights_TK": b.weights_TK, **came} for b in tokens.batches)
    return Call("combine", given, ("weights_TK",), tuple({"": b.upstream} for b in tokens.batches))


def filled(drawing: Drawing, sizes: Sequence[int], others: Sequence[int]) -> Workload:
    """Return the script of two dispatches in flight at the same time; uninitialised memory is NaN.

    The tokens of the first and the upstream gradients of the second have many bits.
    """
    drawing.memory = "filled"
    generator = draw.generator(drawing.name, drawing.layout.name, "filled")
    first = Tokens(
        tuple(
            replace(batch, x_TD=draw.fill_mantissas(batch.x_TD, BITS, generator))
            for batch in drawing.tokens(0, tuple(sizes)).batches
        )
    )
    second = Tokens(
        tuple(
            replace(batch, upstream=draw.fill_mantissas(batch.upstream.sign(), BITS, generator))
            for batch in drawing.tokens(1, tuple(others)).batches
        )
    )
    most = [max(len(batch.x_TD) for batch in tokens.batches) for tokens in (first, second)]
    calls = (dispatch(first, most[0]), dispatch(second, most[1] + 3), combine(second, 1), combine(first, 0))
    return drawing.workload(*calls)


def over_limit(drawing: Drawing) -> Workload:
    """Return the script of `tokens_max` tokens, one more on all ranks, one more on one rank per group, none on it."""
    last = {group[-1] for group in drawing.layout.groups()["ep_etp"]}
    world = range(drawing.layout.world)
    limit = 6
    full, over = drawing.tokens(0, (limit,)), drawing.tokens(1, (limit + 1,))
    one_over = drawing.tokens(2, tuple(limit + 1 if rank in last else rank % limit for rank in world))
    few = drawing.tokens(4, tuple(0 if rank in last else limit for rank in world))
    return drawing.workload(
        dispatch(full, limit),
        combine(full, 0),
        dispatch(over, limit, may_raise=True),
        dispatch(one_over, limit, may_raise=True),
        dispatch(few, limit),
        combine(few, 4),
    )


SCRIPTS: dict[str, Callable[[Drawing], Workload]] = {
    "places": lambda drawing: filled(drawing, recipes.UNEVEN, (3,)),
    "places-without-tokens": lambda drawing: filled(drawing, recipes.ONE_WITHOUT, (0, 6)),
    "tokens-over-limit": over_limit,
}


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of a variant on a layout."""
    for name, write in SCRIPTS.items():
        yield write(Drawing(name, variant, layout, RUN))


CHAPTERS = (Chapter((RUN,), tuple(SCRIPTS), scripts, quick=SMALL),)
