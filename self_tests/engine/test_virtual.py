"""Virtual ranks compute what real ranks compute, in larger worlds, and their faults are blamed in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_conformance.engine import Engine, EngineError, Job, JobResult
from moe_conformance.engine.ledger.entry import Entry
from self_tests.engine import virtual_jobs

JOBS = "self_tests.engine.virtual_jobs"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file: each test also shows that it survived the tests before."""
    with Engine(virtual=True, preload=(JOBS,)) as engine:
        yield engine


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    """Real ranks, to hold the virtual ones against."""
    with Engine(preload=(JOBS,)) as real:
        yield real


def run(engine: Engine, function: str, payload: Any = None, world: int = 8, deadline_s: float = 60.0) -> JobResult:
    """Run a function with its ranks in pairs."""
    pairs = tuple((rank, rank + 1) for rank in range(0, world, 2))
    return engine.run(Job(f"{JOBS}:{function}", payload, world, {"pairs": pairs}, deadline_s))


def values(result: JobResult) -> list[Any]:
    """What the ranks returned, once all have."""
    assert [] == [rank.error for rank in result.ranks if rank.error]
    return [rank.value for rank in result.ranks]


def equal(one: Any, two: Any) -> bool:
    """Compare nested lists and tensors, bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(equal(*pair) for pair in zip(one, two, strict=True))
    return bool(one == two)


class TestSameAsReal:
    def test_every_collective_does_what_it_does_over_gloo(self, engine: Engine, real: Engine) -> None:
        """The same functions bring back the same bytes on four real ranks and on four virtual ones."""
        for function in virtual_jobs.SAME:
            expected = values(run(real, function.__name__, world=4))
            assert equal(expected, values(run(engine, function.__name__, world=4))), function.__name__

    @pytest.mark.parametrize("function", [function.__name__ for function in virtual_jobs.SAME])
    def test_every_collective_works_on_64_ranks(self, engine: Engine, function: str) -> None:
        """No collective is for small worlds only."""
        assert 64 == len(values(run(engine, function, world=64)))

    def test_rows_find_their_way_among_512_ranks(self, engine: Engine) -> None:
        """Uneven splits, some of them empty: every row is where its source meant it to be."""
        found = values(run(engine, "uneven_all_to_all", world=512))
        firsts = torch.tensor([[(r + 2 * s) % 4 for s in range(512)] for r in range(512)]).cumsum(1)
        for rank in (0, 255, 256, 511):
            expected = []
            for source in range(512):
                end = int(firsts[source, rank])
                for row in range(end - (source + 2 * rank) % 4, end):
                    expected += [3 * row + column + 100 * source for column in range(3)]
            assert expected == found[rank].reshape(-1).tolist()


class TestLedger:
    @pytest.mark.parametrize("function", ["uneven_all_to_all", "gathers", "reductions", "messages", "asynchronous"])
    def test_it_says_what_that_of_real_ranks_says(self, engine: Engine, real: Engine, function: str) -> None:
        """Calls, groups, shapes, bytes, reductions, roots and peers are the same, rank by rank."""
        expected = [[said(entry) for entry in rank.ledger] for rank in run(real, function, world=4).ranks]
        result = run(engine, function, world=4)
        assert () == result.disagreements
        assert expected == [[said(entry) for entry in rank.ledger] for rank in result.ranks]

    def test_a_disagreement_is_told_by_the_ledgers_too(self, engine: Engine) -> None:
        """It is the first one, and names whom the exception names."""
        result = run(engine, "disagreeing_splits", [(1, 2, 3)])
        assert (1, 2) == result.disagreements[0].blamed
        assert "all_to_all_single" == result.disagreements[0].op


def said(entry: Entry) -> tuple[object, ...]:
    """What an entry says of a call, but for the name of its group and splits that torch fills in."""
    call = (entry.order, entry.op, entry.ranks, entry.sequence, entry.reduce, entry.root, entry.peer, entry.tag)
    data = (entry.shapes_in, entry.shapes_out, entry.dtype, entry.bytes_in, entry.bytes_out)
    return (*call, *data, entry.state, entry.asynchronous, entry.where)


class TestOfTheirOwn:
    def test_random_generators(self, engine: Engine) -> None:
        """What a rank draws follows from its own seed, whoever draws in between."""
        eight = values(run(engine, "random_numbers", 5))
        four = values(run(engine, "random_numbers", 5, world=4))
        assert eight[:4] == four
        assert 8 * 6 == len({number for rank in eight for number in rank})

    def test_default_dtype(self, engine: Engine) -> None:
        """A default dtype that one rank sets is not there for others."""
        expected = ["torch.float32", "torch.float64"] * 4
        assert expected == values(run(engine, "default_dtype"))

    def test_what_is_kept(self, engine: Engine) -> None:
        """Ranks keep things for later jobs, each its own."""
        first = values(run(engine, "kept_counter", world=6))[0]
        assert [first + 1] * 6 == values(run(engine, "kept_counter", world=6))

    def test_what_is_left_behind(self, engine: Engine) -> None:
        """A rank that leaves another default dtype says so, and the next job does not see it."""
        assert [(), ("the default dtype",), (), ()] == [
            rank.left for rank in run(engine, "leaves_dtype", world=4).ranks
        ]
        assert ["torch.float32"] == values(run(engine, "default_dtype", world=4))[:1]


def told(result: JobResult) -> list[tuple[str, bool]]:
    """Status and whether it is secondary, by rank."""
    return [(rank.status, rank.secondary) for rank in result.ranks]


class TestFaults:
    @pytest.fixture(autouse=True)
    def works_again(self, engine: Engine) -> Iterator[None]:
        """After each of them the world computes again."""
        yield
        assert [28.0] * 8 == values(run(engine, "sums"))

    def test_an_exception(self, engine: Engine) -> None:
        """The rank that raised is blamed, and its peers are unblocked."""
        result = run(engine, "fails")
        assert [("raised", rank != 2) for rank in range(8)] == told(result)
        assert "LookupError: rank 2 is lost" == result.ranks[2].error
        assert "virtual_jobs.py" in result.ranks[2].traceback
        assert "rank 2 has failed: LookupError: rank 2 is lost" in result.ranks[0].error

    def test_a_collective_left_out(self, engine: Engine) -> None:
        """It is known at once that a rank waits for one that has returned."""
        result = run(engine, "leaves_one_out")
        assert (2,) == result.blamed
        assert ("hung", True) == told(result)[3]
        assert "returned while rank 3 waited in a collective: on group (2, 3) call 1" in result.ranks[2].error
        assert "waits in all_reduce (sum), call 0 on ranks 2, 3, for rank 2, and no rank can continue" == (
            result.ranks[3].error
        )
        assert "in leaves_one_out" in result.ranks[3].traceback
        assert result.seconds < 30

    def test_a_hang(self, engine: Engine) -> None:
        """The rank that runs is blamed at the deadline; who waits says for whom."""
        result = run(engine, "loops", deadline_s=1.0)
        assert (2,) == result.blamed
        assert {"hung"} == {rank.status for rank in result.ranks}
        assert "no answer within 1.0 s: in loops, from" in result.ranks[2].error
        assert "waits in barrier, call 1 on ranks 0..7, for ranks 2, 3, 4 and 3 more" in result.ranks[0].error
        assert "could continue, but rank 2 is running" in result.ranks[7].error

    def test_a_hang_that_holds_the_interpreter(self, engine: Engine) -> None:
        """It is blamed too, with its stack, though the process cannot answer."""
        result = run(engine, "holds_the_interpreter", deadline_s=1.0)
        assert (2,) == result.blamed
        assert "in holds_the_interpreter" in result.ranks[2].error

    def test_the_end_of_the_process(self, engine: Engine) -> None:
        """Who ran when the process ended is blamed, with what it printed."""
        result = run(engine, "ends_the_process")
        assert [("died", rank != 2) for rank in range(8)] == told(result)
        assert "exited with code 3 before it answered" == result.ranks[2].error
        assert "rank 2 has had enough\n" == result.ranks[2].output

    def test_a_result_that_cannot_be_sent(self, engine: Engine) -> None:
        """Only the rank that returned it is at fault."""
        result = run(engine, "unsendable")
        assert [("ok" if rank != 2 else "raised", False) for rank in range(8)] == told(result)
        assert "cannot be sent" in result.ranks[2].error

    def test_a_function_that_does_not_exist(self, engine: Engine) -> None:
        """It is the caller's mistake, not a rank's."""
        with pytest.raises(EngineError, match="no_such_function"):
            run(engine, "no_such_function")

    def test_a_thread_of_its_own_may_not_communicate(self, engine: Engine) -> None:
        """It would act while another rank runs."""
        assert 8 == sum("from its own thread only" in said for said in values(run(engine, "own_thread_only")))


class TestDisagreements:
    @pytest.mark.parametrize(
        ("wrong", "blamed", "words"),
        [
            ([(1, 2, 3)], (1, 2), "rank 1 sends 3 rows to rank 2, which expects 1"),
            ([(1, 2, 0), (1, 5, 2)], (1,), "rank 1 sends 0 rows to rank 2, which expects 1; rank 1 sends 2 rows to"),
            ([(1, 5, 2), (6, 5, 2)], (5,), "rank 6 sends 2 rows to rank 5"),
            ([(1, 2, 3), (3, 4, 0)], (1, 2, 3, 4), "rank 3 sends 0 rows to rank 4, which expects 1"),
        ],
    )
    def test_splits(
        self, engine: Engine, wrong: list[tuple[int, int, int]], blamed: tuple[int, ...], words: str
    ) -> None:
        """The pairs are named with their numbers; the rank in all of them is blamed, or else all."""
        result = run(engine, "disagreeing_splits", wrong)
        assert blamed == result.blamed
        assert words in result.ranks[blamed[0]].error
        assert words in result.ranks[7].error

    @pytest.mark.parametrize(
        ("function", "blamed", "words"),
        [
            ("other_collective", (3,), "ranks 0, 1, 2 and 4 more are in barrier, rank 3 is in all_reduce (sum)"),
            ("other_width", (3,), "rank 3 is in all_to_all_single with rows of 3 elements of float32"),
            ("other_size", (3,), "rank 3 is in all_reduce (sum) of 2 elements of float32"),
            ("long_message", (0, 1), "rank 0 sends 3 elements of float32 to rank 1, which expects 2 elements"),
            ("splits_that_do_not_sum", (1,), "input splits of 8 entries that sum to 9 for 8 rows and 8 ranks"),
        ],
    )
    def test_what_else_ranks_disagree_in(
        self, engine: Engine, function: str, blamed: tuple[int, ...], words: str
    ) -> None:
        """The minority is blamed, in words that say who wanted what."""
        result = run(engine, function)
        assert blamed == result.blamed
        assert words in result.ranks[blamed[-1]].error
