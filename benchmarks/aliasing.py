"""How often native's guard takes two tensors for aliases, over random strided pairs: `python -m benchmarks.aliasing`.

The truth is found byte by byte (`self_tests.backends.strided_pairs`). A pair that shares a byte and is called safe is a
bug; one that shares none and is called an alias costs a copy.
"""

from __future__ import annotations

from collections import Counter

import click

from moe_conformance.backends.native.row_ops.combine_add import may_overlap
from self_tests.backends.strided_pairs import KINDS, pairs


@click.command()
@click.option("--pairs", "count", default=1_000_000, show_default=True, help="how many pairs to draw")
def main(count: int) -> None:
    """Count and print, by kind of memory."""
    found: Counter[tuple[str, bool, bool]] = Counter()
    for pair in pairs(count, seed=0):
        found[pair.kind, pair.share, not may_overlap(pair.out, pair.x)] += 1
    print("| memory | share a byte | called safe | share none | called an alias |\n| --- | --- | --- | --- | --- |")
    for kind in KINDS:
        share, none = (sum(found[kind, each, safe] for safe in (True, False)) for each in (True, False))
        print(f"| {kind} | {share} | {found[kind, True, True]} | {none} | {found[kind, False, False]} |")


if __name__ == "__main__":
    main()
