"""The goldens of adding rows are what the longhand makes of the stored inputs, row by row and byte by byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from moe_conformance.goldens.chapters.scatter import NESTED, REQUIRING, ROUNDOFFS, SUMS, TOKENS, views_of
from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.scatter import second as scatter
from self_tests.goldens.golden_layer import experts_of, stacked, tokens_of
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def of_sums(own: Mapping[str, Any]) -> dict[str, Any]:
    """Sums, bounds, and gradients."""
    out_ND, index_J, src_JD = own["out_ND"], own["index_J"], own["src_JD"]
    dout_ND, dsrc_JD = scatter.scatter_add_backward(index_J, own["upstream_ND"])
    return {
        "y_ND": scatter.scatter_add(out_ND, index_J, src_JD),
        "bounds_UND": [scatter.scatter_add_bound(out_ND, index_J, src_JD, u) for u in ROUNDOFFS],
        "dout_ND": dout_ND,
        "dsrc_JD": dsrc_JD,
    }


def of_routed(own: Mapping[str, Any], experts: Sequence[SwiGLU]) -> dict[str, Any]:
    """Routed rows on a base, and what comes back."""
    dbase_TD, made = scatter.add_routed_backward(tokens_of(own), experts, own["dy_TD"])
    answers = {"y_TD": scatter.add_routed(own["base_TD"], tokens_of(own), experts), "dbase_TD": dbase_TD}
    return {**answers, "dx_TD": made.dx[0], "dweights_TK": made.dweights[0], **stacked(made.experts)}


def of_views(views: Sequence[scatter.View]) -> dict[str, Any]:
    """Bytes painted, and what is true of each two."""
    return {
        "ranges-meet_VV": [[scatter.ranges_meet(a, b) for b in views] for a in views],
        "share-bytes_VV": [[scatter.share_bytes(a, b) for b in views] for a in views],
        "in-place-is-lawful_VV": [[scatter.in_place_is_lawful(a, b) for b in views] for a in views],
        "overlaps-itself_V": [scatter.overlaps_itself(view) for view in views],
        "range_V2": [scatter.byte_range(view) or (-1, -1) for view in views],
        "bytes_VB": [[byte in scatter.paint(view) for byte in range(120)] for view in views],
    }


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored sum, bound, gradient and byte; where real tensors lie is told below."""
        values = stored("scatter")
        recorded = [[scatter.records_gradient(modes, requiring) for requiring in REQUIRING] for modes in NESTED]
        answers = told("modes", {"recorded_MR": recorded})
        for case in SUMS:
            answers |= told(case, of_sums(given(values, case)))
        for case in TOKENS:
            answers |= told(case, of_routed(given(values, case), experts_of(values)))
        views = views_of(values["views/in/views_V7"].tolist())
        answers |= told("views", of_views([scatter.View(*view) for view in views]))
        assert_twins("scatter", answers, unanswered=["views/out/slices"])

    def test_real_tensors_lie_where_their_strides_say(self):
        """Of a 4 x 6 buffer, 8 bytes an element: offset, two sizes, two strides, bytes."""
        by_hand = [
            [8 * (6 + 2), 3, 2, 6, 2, 8],  # rows from 1 on, every second column from 2 on
            [8 * 3, 3, 4, 1, 6, 8],  # columns from 3 on, as rows
            [8 * 12, 2, 6, 0, 1, 8],  # row 2 twice
            [0, 3, 0, 6, 1, 8],  # rows from 1 on, no column
        ]
        assert np.array_equal(by_hand, stored("scatter")["views/out/slices"])

    def test_gradients_are_recorded_as_torch_records_them(self):
        """In every stored nesting of modes, where an input requires a gradient and where none does."""
        recorded = []
        for modes in NESTED:
            x, y = torch.ones(1, requires_grad=True), torch.ones(1)
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(getattr(torch, mode)())
                recorded.append([False, (2 * y).requires_grad, (x * y).requires_grad])
        assert np.array_equal(recorded, stored("scatter")["modes/out/recorded_MR"])
