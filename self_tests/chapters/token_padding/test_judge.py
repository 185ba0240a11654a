"""Which reductions before rows travel are told as those of a capacity, and which are left alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe_conformance.chapters.capacity.judge.capacity_padding import judge_reduced_once
from moe_conformance.chapters.token_padding.judge import judge_no_maximum
from moe_conformance.contract import Claims
from moe_conformance.contract.topology import Layout
from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.verdict import WrongCollectives
from moe_conformance.scenarios.outcome import Outcome
from self_tests.judging.breaking import broken, caught, judged
from self_tests.judging.simulated_exchange import workload

LAYOUT = Layout(4, ep=2)


def call(op: str, ranks: tuple[int, ...], *shape: int, dtype: str = "int64", reduce: str | None = "MAX") -> Entry:
    """Make a call among some ranks, which gives one tensor."""
    size = math.prod(shape) * (8 if dtype == "int64" else 4)
    given: dict[str, Any] = {
        "order": 0, "op": op, "group": "g", "ranks": ranks, "sequence": 1, "in_splits": None, "out_splits": None,
        "shapes_in": (shape,), "shapes_out": (), "dtype": dtype, "bytes_in": size, "bytes_out": 0, "reduce": reduce,
        "root": None, "peer": None, "tag": None, "asynchronous": False, "where": "",
    }  # fmt: skip
    return Entry(**given)


def group(rank: int) -> tuple[int, ...]:
    """Return the ranks that a rank exchanges rows with."""
    return (0, 1) if rank < 2 else (2, 3)


DEFAULT = Claims()


def largest(ranks: tuple[int, ...], *shape: int, **fields: Any) -> Entry:
    """Ask some ranks for the largest of some numbers."""
    return call("all_reduce", ranks, *(shape or (1,)), **fields)


def rows(ranks: tuple[int, ...]) -> Entry:
    """Let rows travel."""
    return call("all_to_all_single", ranks, 6, 32, dtype="float32", reduce=None)


def dispatching(*ledgers: Sequence[Entry], claims: Claims = DEFAULT) -> Outcome:
    """Let every rank call this in its dispatch, and claim something of the exchange."""
    outcome = broken(workload(LAYOUT))
    ranks = [
        replace(
            rank,
            ledger=tuple(ledger),
            phases=(("forward:0", 0), ("answered:0", len(ledger)), ("done", len(ledger))),
            claims=claims,
        )
        for rank, ledger in zip(outcome.ranks, ledgers, strict=True)
    ]
    return replace(outcome, ranks=tuple(ranks))


def everywhere(*kinds: Any, claims: Claims = DEFAULT) -> Outcome:
    """Let every rank make these calls among the ranks that it exchanges rows with."""
    return dispatching(*([kind(group(rank)) for kind in kinds] for rank in range(4)), claims=claims)


def pair(ranks: tuple[int, ...]) -> Entry:
    """Ask for the largest of two numbers each."""
    return largest(ranks, 2)


def flag(ranks: tuple[int, ...]) -> Entry:
    """Ask whether any rank refuses."""
    return largest(ranks, dtype="int32")


def summed(ranks: tuple[int, ...]) -> Entry:
    """Add something up."""
    return largest(ranks, reduce="SUM")


class TestReducedOnce:
    @pytest.mark.parametrize(
        "kinds",
        [(rows,), (largest, rows), (pair, largest, flag, rows), (summed, summed, rows), (largest, rows, largest)],
        ids=["nothing", "once", "forms", "sums", "behind"],
    )
    def test_one_reduction_of_a_form_is_right(self, kinds: Sequence[Any]) -> None:
        """None is right too, and so are sums, and what is agreed upon behind the rows or in another form."""
        assert {0, 1, 2, 3} == judged(judge_reduced_once, everywhere(*kinds)).ranks

    def test_a_second_of_the_form_is_told(self) -> None:
        """An exchange with as many places on every rank may have two, and no third."""
        found = caught(judge_reduced_once, everywhere(largest, pair, largest, rows))
        assert isinstance(found, WrongCollectives)
        assert (
            "before the rows of forward:0 are sent, rank 0 all-reduces (MAX) numbers of one shape and dtype 2 times"
            in found.sentence
        )
        judged(judge_reduced_once, everywhere(largest, largest, rows, claims=Claims(handed="static")))
        assert (
            "3 times"
            in caught(judge_reduced_once, everywhere(*3 * [largest], rows, claims=Claims(handed="static"))).sentence
        )

    def test_the_group_of_the_rows_is_asked(self) -> None:
        """A reduction over others is wrong unless there is one over the right group."""
        everyone = (0, 1, 2, 3)
        found = caught(judge_reduced_once, dispatching(*([largest(everyone), rows(group(r))] for r in range(4))))
        assert "over group (0, 1, 2, 3) instead of group (0, 1), in which its rows are exchanged" in found.sentence
        both = ([largest(everyone, 2), largest(group(r)), rows(group(r))] for r in range(4))
        judged(judge_reduced_once, dispatching(*both))


class TestNoMaximum:
    def test_a_sum_over_replicas_is_no_largest_number(self) -> None:
        """What ranks add up with others than those of their exchange tells nothing of these; a sum with them may."""
        replicas = ([summed(((0, 2), (1, 3))[r % 2]), summed((r,)), rows(group(r))] for r in range(4))
        assert {0, 1, 2, 3} == judged(judge_no_maximum, dispatching(*replicas)).ranks
        assert "instead of not at all" in caught(judge_no_maximum, everywhere(summed, rows)).sentence

    def test_a_largest_number_of_other_ranks_is_told(self) -> None:
        """The largest number of replicas is one of tokens all the same."""
        replicas = ([largest(((0, 2), (1, 3))[r % 2]), rows(group(r))] for r in range(4))
        assert "for a largest number" in caught(judge_no_maximum, dispatching(*replicas)).sentence
