"""Searches on two real ranks: every kind of fault is shrunk by itself, to the same smallest batch every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.contract import Limit
from moe_conformance.engine import Engine
from moe_conformance.plugin.drawing import MOST_REFUSED
from moe_conformance.workloads.drawn.example import describe, to_json
from moe_conformance.workloads.records.runs import ExchangeStep, RouterStep
from moe_conformance.workloads.records.workload import Workload
from self_tests.planted_bugs import find
from self_tests.planted_bugs.plant import SINGLE
from self_tests.workloads.drawn_searches import Found, search

BACKENDS = "self_tests.workloads.drawn_backends"

# plant: the requirement that it violates, and what its smallest batch looks like
SMALLEST = {
    "last-slot-wins": ("EXCH-05", "E = 2, K = 2, D = 32, float32, schedule F0 B0", [[], [[0, 1]]]),
    "uninitialised-outputs": ("EXCH-05", "E = 2, K = 1, D = 32, float32, schedule F0 B0", [[], [[-1]]]),
    "duplicates-kept": ("EXCH-01", "E = 2, K = 1, D = 32, float32, schedule F0 B0", [[], [[0]]]),
    "output-upcast": ("EXCH-07", "E = 2, K = 1, D = 32, bfloat16, schedule F0 B0", [[], []]),
    "early-return-without-tokens": ("EXCH-09", "E = 2, K = 1, D = 32, float32, schedule F0 B0", [[], [[0]]]),
}
ROUTERS = {
    "best-twice": ("ROUTE-01", "E = 2, K = 2, D = 32, float32, softmax, schedule F0 B0"),
    "not-normalised": ("ROUTE-05", "E = 1, K = 1, D = 32, float32, sigmoid, normalised, schedule F0 B0"),
    "scaled-twice": ("ROUTE-06", "E = 1, K = 1, D = 32, float32, softmax, scale 2.5, schedule F0 B0"),
    "bias-in-weights": ("ROUTE-03", "E = 1, K = 1, D = 32, float32, sigmoid, balancing bias, schedule F0 B0"),
    "router-not-reduced": ("ROUTE-08", "E = 2, K = 1, D = 32, float32, softmax, schedule F0 B0"),
}

# backend: by words of each of its two faults, the smallest batch
SEVERAL = {
    "OutputAndCrash": {"one token": [[], [[0]]], "answer": [[], [[0, 1], [0, 1]]]},
    "TwoCrashes": {"one token": [[], [[0]]], "two tokens": [[], [[0], [0]]]},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One pool of ranks for all searches."""
    with Engine(preload=("moe_conformance.scenarios.moe_step", BACKENDS)) as engine:
        yield engine


def ids(workload: Workload) -> list[list[list[int]]]:
    """Return the ids of the first microbatch, rank by rank."""
    return [batch.ids_TK.tolist() for batch in workload.batches[0]]


class TestSmallest:
    @pytest.mark.parametrize("plant", SMALLEST)
    def test_of_an_exchange(self, engine: Engine, plant: str) -> None:
        """Few tokens, the first experts, one microbatch; nothing that the fault does not need."""
        requirement, asked, expected = SMALLEST[plant]
        example = search(engine, find(plant).backend).examples[requirement]
        assert (f"drawn: {asked}", expected) == (describe(example)[0], ids(example))

    @pytest.mark.parametrize("plant", ROUTERS)
    def test_of_a_router(self, engine: Engine, plant: str) -> None:
        """Nothing is configured that the fault does not need, so that the requirement is that of the fault."""
        requirement, asked = ROUTERS[plant]
        found = search(engine, find(plant).backend, RouterStep())
        assert (requirement,) == found.ended.violated
        assert f"drawn: {asked}" == describe(found.examples[requirement])[0]

    def test_it_is_the_same_every_time(self, engine: Engine) -> None:
        """Bit for bit."""
        first, second = (search(engine, find("map-of-nonzero-weights").backend).examples for _ in range(2))
        assert ["EXCH-01"] == list(first)
        assert to_json(first["EXCH-01"]) == to_json(second["EXCH-01"])


class TestSeveralFaults:
    @pytest.mark.parametrize("backend", SEVERAL)
    def test_one_is_not_shrunk_to_the_other(self, engine: Engine, backend: str) -> None:
        """The way to the smallest batch of one leads through the other: both are told, each with its own."""
        found = search(engine, f"{BACKENDS}:{backend}")
        assert {type(mismatch) for mismatch in found.seen} == {type(mismatch) for mismatch in found.ended.failed}
        told = {str(mismatch): ids(mismatch.outcome.workload) for mismatch in found.ended.failed}
        for words, smallest in SEVERAL[backend].items():
            assert [smallest] == [batch for sentence, batch in told.items() if words in sentence]

    def test_breakdowns_are_not_looked_for_without_end(self, engine: Engine) -> None:
        """Each costs new ranks: after a while shrinking has to do with what it has, which is small all the same."""
        found = search(engine, f"{BACKENDS}:Dying", layout=SINGLE)
        assert ("crash", "Died") == (found.ended.verdict, found.ended.kind)
        assert [[]] == ids(found.examples["EXCH-09"])
        assert found.trial.drawn["batches"] < 40


class TestDistribution:
    def test_everything_that_can_be_drawn_is(self, engine: Engine) -> None:
        """Every feature that nothing forbids is in some batch, and what was decided is known."""
        for run in (ExchangeStep(), RouterStep()):
            found = search(engine, "native", run)
            assert "pass" == found.ended.verdict
            assert [] == lacking(found)
            assert {"EXCH-05", "GRAD-03"} <= found.trial.tally.decided or "ROUTE-03" in found.trial.tally.decided

    def test_what_limits_forbid_is_not_asked_for(self, engine: Engine) -> None:
        """Nor drawn."""
        limits = (
            Limit("zero_tokens", (False,), "none"), Limit("dropped_slots", (False,), "none"),
            Limit("in_flight", (1,), "none"), Limit("dtype", ("float32",), "none"),
        )  # fmt: skip
        drawn = search(engine, "native", limits=limits[:3]).trial.drawn
        assert not {"idle rank", "all ranks idle", "token without slots", "two in flight"} & drawn.keys()
        assert drawn["uneven tokens"] > 0

    def test_what_the_backend_refuses_is_not_asked_for(self, engine: Engine) -> None:
        """It is refused, not failed; everything else is drawn."""
        found = search(engine, f"{BACKENDS}:Refusing")
        assert "pass" == found.ended.verdict
        assert "float16" not in found.trial.drawn
        assert [] == lacking(found)

    def test_a_backend_that_refuses_everything_is_not_asked_without_end(self, engine: Engine) -> None:
        """After so many refusals no more is run, and the item says what was refused."""
        found = search(engine, f"{BACKENDS}:RefusingAll")
        assert ("refused", MOST_REFUSED) == (found.ended.verdict, found.refusals)
        assert "every drawn workload was refused: refused by the library: nothing here" == found.ended.message

    def test_what_is_left_out_is_not_drawn(self, engine: Engine) -> None:
        """The search goes on beside a fault that is known: native passes where only its plant's batches are missing."""
        found = search(engine, find("output-upcast").backend, left_out=("bfloat16", "float16"))
        assert "pass" == found.ended.verdict
        assert not {"bfloat16", "float16"} & found.trial.drawn.keys()
        assert [] == lacking(found)


def lacking(found: Found) -> list[str]:
    """Return the features that were required and not drawn."""
    return [name for name, batches in found.trial.drawn.items() if not batches]
