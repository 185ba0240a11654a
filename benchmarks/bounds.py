"""How near correct arithmetic is to its bounds, and what wrong arithmetic they detect: `python -m benchmarks.bounds`.

Honest: everything is stored in the dtype of the tokens, products are added up in float32; weights multiply first, last
or inside the expert; sums are short (D = 32) and long (D = 256). At least 10^5 elements of each kind and dtype.

Wrong: one of the K terms of every token is dropped, doubled, or another expert's; a case is a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import click
import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.compare.bounded import compare
from self_tests.judging import bounds_compared
from self_tests.judging.simulated_experts import Arithmetic, own_workload, simulate_experts
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers

_DOCUMENT = Path(__file__).parent.parent / "docs" / "bounds.md"
_BEGIN, _END = "<!-- figures: written by benchmarks.bounds -->", "<!-- end of figures -->"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LEAST = 100_000
_FOUR, _PARTS = Layout(4, ep=2), Layout(4, ep=2, etp=2)
_WAYS = (
    Arithmetic(),
    Arithmetic(place="input", cast=True),
    Arithmetic(place="hidden", cast=True, fused=False),
    Arithmetic(convention="mean_over_dp"),
)
_WRONG = (bounds_compared.drop_a_slot, bounds_compared.double_a_slot, bounds_compared.change_an_expert)


@dataclass(frozen=True)
class Nearest:
    """The largest observed / allowed error of one kind of result in one dtype, of so many elements."""

    chapter: str
    what: str
    dtype: torch.dtype
    elements: int
    ratio: float


@dataclass(frozen=True)
class Seen:
    """In how many of how many tokens a wrong computation left its bounds."""

    wrong: str
    what: str
    tokens: int
    found: int


def correct(dtype: torch.dtype) -> list[Nearest]:
    """Measure until every kind of result has had 10^5 elements."""
    found = []
    for chapter, compared in (("experts", _experts), ("routing", _routing)):
        elements: dict[str, int] = defaultdict(int)
        ratios: dict[str, float] = defaultdict(float)
        for number in count():
            for what, actual, target in compared(dtype, f"bounds {number}"):
                elements[what] += actual.numel()
                ratios[what] = max(ratios[what], compare(actual, *target).ratio)
            if min(elements.values()) >= _LEAST:
                break
        found += [Nearest(chapter, what, dtype, elements[what], ratios[what]) for what in elements]
    return found


def _experts(dtype: torch.dtype, series: str) -> Iterator[bounds_compared.Compared]:
    for layout, fields in ((_FOUR, {"top_k": 4}), (_PARTS, {"top_k": 8, "hidden": 256, "ffn": 96})):
        work = own_workload(layout, tokens=100, microbatches=2, series=series, dtype=dtype, **fields)
        for how in _WAYS:
            yield from bounds_compared.experts_compared(simulate_experts(work, how))


def _routing(dtype: torch.dtype, series: str) -> Iterator[bounds_compared.Compared]:
    fields = {"experts": 32, "top_k": 4, "hidden": 64, "routing.score": "sigmoid", "routing.normalise": True}
    work = route_workload(_FOUR, tokens=400, microbatches=2, series=series, dtype=dtype, **fields)
    yield from bounds_compared.router_compared(simulate_routers(work, Formula(wide=False)))


def wrong(tokens: int) -> list[Seen]:
    """Make one term of each token wrong, at D = 1024, K = 8, in bfloat16, weights between 1/16 and 1."""
    work = own_workload(Layout(1), tokens=tokens, dtype=torch.bfloat16, hidden=1024, ffn=64, top_k=8, experts=16)
    found = []
    for change in _WRONG:
        batches = tuple(tuple(map(change, ranks)) for ranks in work.batches)
        outcome = replace(simulate_experts(replace(work, batches=batches)), workload=work)
        for what in ("y", "dx"):
            share = bounds_compared.share_found(bounds_compared.experts_compared(outcome), what)
            found.append(Seen(change.__name__.replace("_", " "), what, tokens, round(share * tokens)))
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--tokens", default=1000, metavar="N", help="cases of wrong arithmetic of each kind")
@click.option("--markdown", is_flag=True, help="write the tables into docs/bounds.md")
def main(tokens: int, markdown: bool) -> None:
    """Measure the bounds."""
    torch.set_num_threads(1)
    lines = ["| chapter | what | dtype | elements | largest observed / allowed |", "|---|---|---|---|---|"]
    for dtype in _DTYPES:
        for each in correct(dtype):
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| {each.chapter} | {each.what} | {name} | {each.elements} | {each.ratio:.3f} |")
    lines += ["", "| one term of a token | seen in | cases | outside their bounds |", "|---|---|---|---|"]
    for seen in wrong(tokens):
        lines.append(f"| {seen.wrong} | {seen.what} | {seen.tokens} | {seen.found} ({seen.found / seen.tokens:.2%}) |")
    click.echo("\n".join(lines))
    if markdown:
        before, _, rest = _DOCUMENT.read_text().partition(_BEGIN)
        _, _, after = rest.partition(_END)
        _DOCUMENT.write_text(before + "\n\n".join((_BEGIN, "\n".join(lines), _END)) + after)


if __name__ == "__main__":
    main()
