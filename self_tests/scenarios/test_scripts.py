"""Scripts: calls on one surface of a backend, their answers as data, their handles on the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_conformance.contract import Config, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.observed.script import judge_refused, values
from moe_conformance.judging.verdict import Raised, Tally, Unrefused
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import scripts
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Ref, Workload

BACKEND = "self_tests.scenarios.script_backend:HalverBackend"
ROWS = (torch.arange(6.0).reshape(3, 2), torch.zeros(0, 2))
UPSTREAM = (torch.randn(3, 2, generator=torch.Generator().manual_seed(5)), torch.zeros(0, 2))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One pool of ranks."""
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.scenarios.script_backend")) as engine:
        yield engine


def run(engine: Engine, *calls: Call, top_k: int = 1) -> Outcome:
    """Follow a script on two ranks."""
    return moe_step(
        engine, BACKEND, Workload("script", Script("halver"), Config(top_k=top_k), Layout(2), (), calls=calls)
    )


def halve(**more: object) -> Call:
    """Halve the rows of every rank."""
    return Call("halve", tuple({"rows_RD": rows_RD} for rows_RD in ROWS), **more)  # type: ignore[arg-type]


class TestAnswers:
    def test_data_comes_back_by_field_and_handles_stay(self, engine: Engine) -> None:
        """Tensors and numbers of every rank come back under their names; what is no data does not."""
        outcome = run(engine, halve())
        first, second = outcome.ranks
        assert {"rows_RD", "rank"} == set(first.answers[0].values)
        assert torch.equal(ROWS[0] / 2, first.answers[0].values["rows_RD"])
        assert (0, 1) == values(outcome, 0, "rank")
        assert (0, 2) == second.answers[0].values["rows_RD"].shape
        assert {"halver": "Halver"} == first.resolved

    def test_a_later_call_gets_what_an_earlier_one_returned(self, engine: Engine) -> None:
        """A reference leads to the object itself, on its own rank, also to what never left it."""
        undo = {"halved_RD": Ref(0, "rows_RD"), "handle": Ref(0, "handle")}
        whole = values(run(engine, halve(differentiable=("rows_RD",)), Call("undo", (undo, undo))), 1)
        assert all(torch.equal(given, got) for given, got in zip(ROWS, whole, strict=True))

    def test_gradients_go_back_through_references(self, engine: Engine) -> None:
        """A backward from a later call reaches the arguments of an earlier one, and their gradients come back."""
        undo = {"halved_RD": Ref(0, "rows_RD"), "handle": Ref(0, "handle")}
        upstream = tuple({"": each} for each in UPSTREAM)
        outcome = run(engine, halve(differentiable=("rows_RD",)), Call("undo", (undo, undo), upstream=upstream))
        for rank, expected in zip(outcome.ranks, UPSTREAM, strict=True):
            assert torch.equal(expected, rank.answers[0].gradients["rows_RD"])

    def test_records_are_handed_over_with_their_leaves(self, engine: Engine) -> None:
        """A field of a record can ask for a gradient, and ranks meet in a collective."""
        given = tuple({"routing": Routing(torch.zeros(2, 1).long(), torch.full((2, 1), 1.0 + r), 1)} for r in range(2))
        upstream = tuple({"": torch.tensor(1.0)} for _ in range(2))
        outcome = run(engine, Call("total", given, ("routing.weights_TK",), upstream))
        assert [6.0, 6.0] == [float(total) for total in values(outcome, 0)]
        assert torch.equal(torch.zeros(2, 1), outcome.ranks[1].answers[0].gradients["routing.weights_TK"])

    def test_arguments_that_were_written_to_are_named(self, engine: Engine) -> None:
        """An argument whose bytes changed, in its own call or later, is told."""
        given = tuple({"halved_RD": rows_RD + 1, "handle": Ref(0, "handle")} for rows_RD in ROWS)
        outcome = run(engine, halve(), Call("undo", given))
        assert ((), ("halved_RD",)) == tuple(answer.changed for answer in outcome.ranks[0].answers)


class TestMemory:
    @pytest.mark.parametrize(("first", "expected"), [(0, "same tensor"), (1, "shared"), (4, "apart")])
    def test_how_an_answer_lies_to_its_arguments(self, engine: Engine, first: int, expected: str) -> None:
        """Whether it is an argument, has a byte in common with one, or neither: nothing is left after four rows."""
        given = ({"rows_RD": torch.ones(4, 2), "first": first},) * 2
        outcome = run(engine, Call("rest", given))
        assert [{"rows_RD": expected}] * 2 == [rank.answers[0].memory for rank in outcome.ranks]

    def test_what_nobody_has_written_is_filled_where_asked(self, engine: Engine) -> None:
        """A script of filled memory finds NaN in new tensors, on every rank."""
        calls = (Call("unwritten", ({"numbers": 5},) * 2),)
        script = Workload("script", Script("halver"), Config(top_k=1), Layout(2), (), memory="filled", calls=calls)
        for found in values(moe_step(engine, BACKEND, script), 0):
            assert bool(found.isnan().all())


class TestExceptions:
    def test_one_that_may_come_is_an_answer(self, engine: Engine) -> None:
        """The script goes on behind it."""
        refuse = Call("refuse", ({"on": (0, 1)},) * 2, may_raise=True)
        outcome = run(engine, refuse, halve())
        tally = Tally()
        assert ("rank 0 refuses", "rank 1 refuses") == judge_refused(outcome, 0, tally, stage="run", asked="anything")
        assert 2 == tally.pairs
        assert (0, 1) == values(outcome, 1, "rank")

    def test_a_rank_that_does_not_refuse_is_named(self, engine: Engine) -> None:
        """Refusing on some ranks only is no refusal."""
        outcome = run(engine, Call("refuse", ({"on": (1,)},) * 2, may_raise=True))
        with pytest.raises(Unrefused, match="refuse accepted a wish on rank 0; expected: an error on every rank"):
            judge_refused(outcome, 0, Tally(), stage="run", asked="a wish")

    def test_values_of_a_refused_call_are_a_failure(self, engine: Engine) -> None:
        """Who needs the answer of a call that raised learns what it raised."""
        outcome = run(engine, Call("refuse", ({"on": (1,)},) * 2, may_raise=True))
        with pytest.raises(Raised, match=r"refuse on rank 1 raised builtins\.ValueError: rank 1 refuses"):
            values(outcome, 0)

    def test_one_that_may_not_come_ends_the_run(self, engine: Engine) -> None:
        """It is the rank's own, at the call that it was in."""
        outcome = run(engine, Call("refuse", ({"on": (1,)},) * 2))
        assert [("raised", "refuse:0")] == [(rank.status, rank.reached) for rank in outcome.blamed]

    def test_a_surface_that_cannot_be_built_is_refused(self, engine: Engine) -> None:
        """As everywhere, a refusal while building is no failure."""
        refusal = run(engine, halve(), top_k=2).refusal
        assert refusal is not None
        assert "top_k = 2: this halves one row at a time" == refusal.error


class TestChapters:
    def test_no_two_chapters_have_a_script_of_the_same_name(self) -> None:
        """A name means one script of a variant on a layout, and no chapter stands in the list twice."""
        named = [name for chapter in scripts.chapters() for name in chapter.names]
        assert sorted(set(named)) == sorted(named)

    def test_every_script_goes_under_a_name_of_its_chapter(self) -> None:
        """Waivers can name each of them, checks ask for its runs, and no name or run is left without a script."""
        two = Layout(2, ep=2), Layout(4, tp=2, ep=2), Layout(4, ep=2, etp=2), Layout(4, pp=2, ep=2)
        parts = Layout(4, ep=2), Layout(4, tp=2, cp=2), Layout(4, cp=2, ep=2)
        layouts = (Layout(1), *two, *parts, Layout(4, ep=4))
        for chapter in scripts.chapters():
            drawn = [work for layout in layouts for work in chapter.draw("alltoall", layout, "full")]
            assert set(chapter.names) == {work.name for work in drawn}
            assert set(chapter.runs) == {work.run for work in drawn}
