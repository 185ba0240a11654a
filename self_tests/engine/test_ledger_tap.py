"""Every call of a collective is recorded once, from whichever code it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_conformance.engine import Engine, Job, JobResult
from self_tests.engine.ledger_jobs import CALLS

JOBS = "self_tests.engine.ledger_jobs"

EXPECTED = {
    "imported early": ["all_reduce"],
    "asynchronous": ["all_reduce"],
    "polled": ["all_reduce"],
    "future": ["all_reduce"],
    "method of the group": ["all_reduce"],
    "uneven": ["all_to_all_single"],
    "all_gather_object": ["all_gather", "all_gather"],  # sizes, then bytes
    "broadcast_object_list": ["broadcast", "broadcast"],
    "coalesced": ["all_reduce_coalesced"],
    "functional": ["all_reduce"],
    "raw functional": ["all_reduce"],
    "functional with gradient": ["all_to_all_single", "all_to_all_single"],
    "in a backward pass": ["all_reduce"],
    "on a thread": ["all_reduce"],
    "DTensor": ["all_gather_into_tensor"],  # coalesced with nothing else since torch 2.13
    "scattered DTensor": ["scatter"],
    "FSDP": ["all_gather_into_tensor", "reduce_scatter_tensor"],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file."""
    with Engine(preload=(JOBS, "torch._dynamo")) as engine:  # functional collectives import it
        yield engine


@pytest.fixture
def run(engine: Engine) -> Callable[..., JobResult]:
    """Runs a function of ledger_jobs on two ranks and asserts that the result is ok."""

    def run(function: str, payload: Any = None, world: int = 2, groups: Any = None) -> JobResult:
        result = engine.run(Job(f"{JOBS}:{function}", payload, world, groups or {}))
        assert [] == [rank.error for rank in result.ranks if rank.error]
        assert () == result.disagreements
        return result

    return run


class TestCoverage:
    @pytest.mark.parametrize("name", [name for name in CALLS if name not in ("message", "batch of messages", "DDP")])
    def test_each_kind_of_call_is_recorded_once(self, run: Callable[..., JobResult], name: str) -> None:
        """One entry per call on every rank, waited for, with the line of the caller."""
        for rank in run("call", name).ranks:
            ops = [entry.op if name != "DTensor" else entry.op.removesuffix("_coalesced") for entry in rank.ledger]
            assert EXPECTED.get(name, [name]) == ops
            assert list(range(len(rank.ledger))) == [entry.order for entry in rank.ledger]
            assert {"waited"} == {entry.state for entry in rank.ledger}
            assert all("self_tests/engine/ledger_jobs.py:" in entry.where for entry in rank.ledger)

    def test_messages_are_recorded_with_their_peers(self, run: Callable[..., JobResult]) -> None:
        """A send records its destination; a receive from any rank records no source."""
        zero, one = run("call", "message").ranks
        assert [("send", 1, 7, None)] == [(e.op, e.peer, e.tag, e.sequence) for e in zero.ledger]
        assert [("recv", None, 7, None)] == [(e.op, e.peer, e.tag, e.sequence) for e in one.ledger]

    def test_batches_of_messages_are_recorded_one_by_one(self, run: Callable[..., JobResult]) -> None:
        """Every send and receive of a batch has an entry."""
        for rank in run("call", "batch of messages").ranks:
            other = 1 - rank.rank
            assert [("send", other, 0), ("recv", other, 0)] == [(e.op, e.peer, e.tag) for e in rank.ledger]

    def test_the_gradients_of_ddp_are_recorded(self, run: Callable[..., JobResult]) -> None:
        """Collectives that DDP's C++ reducer issues are recorded."""
        for rank in run("call", "DDP").ranks:
            assert "all_reduce" == rank.ledger[-1].op
            assert {"waited"} == {entry.state for entry in rank.ledger}


class TestDetails:
    def test_an_uneven_exchange_is_told_in_full(self, run: Callable[..., JobResult]) -> None:
        """Splits, shapes, dtype and bytes of both sides are recorded."""
        zero, one = (rank.ledger[0] for rank in run("call", "uneven").ranks)
        assert ((1, 2), (1, 2)) == (zero.in_splits, zero.out_splits)
        assert ((2, 2), (2, 2)) == (one.in_splits, one.out_splits)
        assert (((4, 2),), ((4, 2),)) == (one.shapes_in, one.shapes_out)
        assert ("float32", 24, 24, False) == (zero.dtype, zero.bytes_in, zero.bytes_out, zero.asynchronous)

    def test_even_splits_are_none(self, run: Callable[..., JobResult]) -> None:
        """A call without splits has none in its entry."""
        assert [(None, None)] * 2 == [
            (rank.ledger[0].in_splits, rank.ledger[0].out_splits) for rank in run("call", "all_to_all_single").ranks
        ]

    def test_reductions_and_roots_are_named(self, run: Callable[..., JobResult]) -> None:
        """The reduction by its name, the root by its rank; only at the root is there a result of a reduction."""
        assert ["MAX", "MAX"] == [rank.ledger[0].reduce for rank in run("call", "all_reduce").ranks]
        zero, one = (rank.ledger[0] for rank in run("call", "reduce").ranks)
        assert (1, "SUM", ()) == (zero.root, zero.reduce, zero.shapes_out)
        assert (1, "SUM", ((3,),)) == (one.root, one.reduce, one.shapes_out)

    def test_only_calls_with_a_handle_are_asynchronous(self, run: Callable[..., JobResult]) -> None:
        """Blocking calls are not, functional ones and messages are."""
        names = ("all_reduce", "asynchronous", "functional", "batch of messages")
        found = [run("call", name).ranks[0].ledger[0].asynchronous for name in names]
        assert [False, True, True, True] == found

    def test_groups_count_their_own_calls(self, run: Callable[..., JobResult]) -> None:
        """Sequence numbers run per group; ranks and roots are global."""
        result = run("call_on_a_group", world=4, groups={"pair": ((0, 2), (1, 3))})
        for rank in result.ranks:
            pair = (0, 2) if rank.rank in (0, 2) else (1, 3)
            expected = [(pair, 1, None), ((0, 1, 2, 3), 1, None), (pair, 2, pair[1])]
            assert expected == [(entry.ranks, entry.sequence, entry.root) for entry in rank.ledger]

    def test_a_ledger_begins_anew_with_each_job(self, run: Callable[..., JobResult]) -> None:
        """Numbers begin at the same value in every job of the same ranks."""
        first, second = (run("call", "barrier").ranks[0].ledger for _ in range(2))
        assert [(0, 1)] == [(entry.order, entry.sequence) for entry in first]
        assert first == second
