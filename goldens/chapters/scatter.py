"""Golden of adding rows: sums and their bounds, routed rows on a base, all gradients, and views that share bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import (
    EXPERT_SHAPES,
    Chapter,
    D,
    E,
    Oracle,
    draw_experts,
    draw_tokens,
    functions,
    given,
    gradients,
    leaf,
    named,
)
from moe_conformance.reference import experts
from moe_conformance.reference.scatter import addition, memory

# name: rows out, rows to add
SUMS: Mapping[str, tuple[int, int]] = {"repeats": (4, 9), "nothing-added": (3, 0), "no-rows": (0, 0)}
ROUNDOFFS = (2.0**-8, 2.0**-11, 2.0**-24)
TOKENS = {"tokens": 5, "no-token": 0}
MODES = ("enable_grad", "no_grad", "inference_mode")
NESTED = tuple(modes for depth in range(4) for modes in product(MODES, repeat=depth))
REQUIRING: Sequence[Sequence[bool]] = ((), (False,), (False, True))
# Address (-1: no data), sizes, strides and bytes per element of views that are not drawn.
VIEWS: Sequence[tuple[int, Sequence[int], Sequence[int], int]] = (
    (-1, (2, 2), (0, 3), 1),
    (32, (4,), (2,), 4),  # two that are interleaved
    (36, (3,), (2,), 4),
    (64, (2, 3), (3, 1), 2),  # two of which the second begins where the first ends
    (76, (3, 2), (-2, 0), 1),
    (40, (0, 3), (3, 1), 4),
    (50, (), (), 8),
)
DRAWN = 16


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return rows and repeated indices, tokens of which some are not routed, and views close to each other."""
    found: dict[str, Tensor] = {}
    for case, (N, J) in SUMS.items():
        rows = {name: rng.standard_normal((N, D)) for name in ("out_ND", "upstream_ND")}
        index_J = rng.integers(0, max(1, N - 1), size=J)  # the last row gets nothing
        found |= named(case, "in", {**rows, "src_JD": rng.standard_normal((J, D)), "index_J": index_J})
    found |= draw_experts(rng)
    for case, T in TOKENS.items():
        found |= draw_tokens(rng, case, T) | named(case, "in", {"base_TD": rng.standard_normal((T, D))})
    views = [*VIEWS, *(_drawn_view(rng) for _ in range(DRAWN))]
    # A size and a stride for each of two dims, of which the view has as many as the third number says.
    views_V7 = [[at, size, len(shape), *_two(shape), *_two(strides)] for at, shape, strides, size in views]
    return found | named("views", "in", {"views_V7": views_V7})


def _two(numbers: Sequence[int]) -> list[int]:
    return [*numbers, 0, 0][:2]


def _drawn_view(rng: np.random.Generator) -> tuple[int, Sequence[int], Sequence[int], int]:
    dims = int(rng.integers(1, 3))
    shape, strides = rng.integers(1, 4, dims).tolist(), rng.integers(-2, 4, dims).tolist()
    return int(rng.integers(40, 70)), shape, strides, int(rng.choice([1, 2, 4]))


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return sums, bounds and gradients, whether gradients are recorded, and the bytes of views."""
    found: dict[str, Tensor] = {}
    for case in SUMS:
        found |= named(case, "out", _added(given(inputs, case), oracle))
    for case in TOKENS:
        found |= named(case, "out", _routed(given(inputs, case), given(inputs, "experts"), oracle))
    recorded = [[oracle.records_gradient(modes, requiring) for requiring in REQUIRING] for modes in NESTED]
    found |= named("modes", "out", {"recorded_MR": recorded})
    views = [oracle.View(*view) for view in views_of(inputs["views/in/views_V7"].tolist())]
    return found | named("views", "out", {**_views(views, oracle), "slices": _slices(oracle)})


def _added(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, object]:
    leaves = {name: leaf(drawn[name]) for name in ("out_ND", "src_JD")}
    y_ND = oracle.scatter_add(leaves["out_ND"], drawn["index_J"], leaves["src_JD"])
    bounds = [oracle.scatter_add_bound(drawn["out_ND"], drawn["index_J"], drawn["src_JD"], u) for u in ROUNDOFFS]
    return {"y_ND": y_ND, "bounds_UND": bounds, **gradients([y_ND], leaves, [drawn["upstream_ND"]])}


def _routed(drawn: Mapping[str, Tensor], parameters: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    tokens = {name: drawn[name] for name in ("base_TD", "x_TD", "weights_TK")}
    leaves = {name: leaf(value) for name, value in {**tokens, **parameters}.items()}
    inputs = leaves["base_TD"], leaves["x_TD"], drawn["ids_TK"], leaves["weights_TK"]
    expert = oracle.swiglu_experts({(name, e): leaves[name][e] for name in EXPERT_SHAPES for e in range(E)})
    y_TD = oracle.add_routed(*inputs, expert)
    return {"y_TD": y_TD, **gradients([y_TD], leaves, [drawn["dy_TD"]])}


def views_of(
    rows_V7: Sequence[Sequence[int]],
) -> Iterator[tuple[int | None, tuple[int, ...], tuple[int, ...], int]]:
    """Yield address, sizes, strides and bytes per element of each stored view."""
    for address, itemsize, dims, *rest in rows_V7:
        yield None if address < 0 else address, tuple(rest[:2][:dims]), tuple(rest[2:][:dims]), itemsize


def _views(views: Sequence[memory.View], oracle: Oracle) -> dict[str, object]:
    """Return the bytes of each view, and what is true of each two."""
    found: dict[str, object] = {
        f"{name}_VV": [[judge(a, b) for b in views] for a in views]
        for name, judge in (
            ("share-bytes", oracle.share_bytes),
            ("in-place-is-lawful", oracle.in_place_is_lawful),
        )
    }
    on_bytes = [[byte in oracle.addresses(view) for byte in range(120)] for view in views]
    overlaps = [oracle.overlaps_itself(view) for view in views]
    return {**found, "bytes_VB": on_bytes, "overlaps-itself_V": overlaps}


def _slices(oracle: Oracle) -> list[list[int]]:
    """Return offset, sizes, strides and bytes per element of real tensors, in order."""
    buffer = torch.zeros(4, 6, dtype=torch.float64)
    found = []
    for tensor in (buffer[1:, 2::2], buffer.T[3:], buffer[2:3].expand(2, 6), buffer[1:, :0]):
        view = oracle.view_of(tensor)
        assert view.address is not None
        offset = view.address - buffer.data_ptr() if tensor.numel() else 0  # a tensor without elements has no address
        found.append([offset, *view.shape, *view.strides, view.itemsize])
    return found


REQUIREMENTS = ("ALIAS-01", "ALIAS-04", "ALIAS-05", "ALIAS-06", "ALIAS-07")

CHAPTER = Chapter(2408, REQUIREMENTS, functions(addition, memory, experts), draw, work_out)
