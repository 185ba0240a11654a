"""The suite against bugs that are known to be there: it must find each of them, and say what it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from moe_conformance.backends import registry
from moe_conformance.backends.native import Native
from moe_conformance.judging.verdict import Mismatch, NotOffered, Tally
from moe_conformance.plugin.alongside import Twins
from moe_conformance.scenarios.group_lists import group_lists
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.spec import load, places
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import scripts
from moe_conformance.workloads.corpus.groups import sizes
from moe_conformance.workloads.records.workload import Wish
from self_tests.checks import Check, checks, judge, unsized
from self_tests.lying_backends import lying, lying_costs
from self_tests.lying_backends.expected import LIARS
from self_tests.planted_bugs import Expectation, Plant, plants, plants_of_many_ranks
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2
from self_tests.plugin import plugin_runs
from self_tests.trial_runs import DEADLINE_S, Run, Runs

NATIVE = "native"


ONCE = {name for chapter in scripts.chapters() if chapter.variants == "first" for name in chapter.names}


def variant_for(plant: Plant, expected: Expectation) -> str:
    """Return the variant with which a plant is tried: the suite asks no other for what variants have in common."""
    return Native.variants[0] if expected.workload in ONCE else plant.variant


@dataclass(frozen=True)
class CheckedRuns:
    """Runs backends on ranks and calls the checks on the outcomes."""

    runs: Runs

    def verdicts(
        self, backend: str, requirement: str, variant: str, layout: Layout, workload: str
    ) -> list[Mismatch | Tally]:
        """Return what every check of a requirement makes of a run."""
        if not workload:
            return self._of_groups(checks()[requirement], backend, layout)
        run = Run(backend, variant, layout, workload)
        asked = readers(requirement, run)
        outcome = self.runs.outcome(run, alone=run_more(asked))
        step = partial(moe_step, self.runs.engine, backend, deadline_s=DEADLINE_S)
        twins = Twins(registry.load(backend), "cpu", lambda some: [step(each) for each in some], self.runs.renew)
        return [judge(check, outcome=outcome, twins=twins) for check in asked]

    def check_passes(self, backend: str, requirement: str, variant: str, layout: Layout, workload: str) -> None:
        """Require that every check of a requirement holds of a run, that there is one, that it compared."""
        verdicts = self.verdicts(backend, requirement, variant, layout, workload)
        assert verdicts, f"no check of {requirement} reads {workload}"
        for verdict in verdicts:
            assert isinstance(verdict, Tally), verdict
            assert not verdict.vacuous

    def _of_groups(self, asked: list[Check], backend: str, layout: Layout) -> list[Mismatch | Tally]:
        """Nothing runs: the backend is only asked which groups it would build."""
        world = layout.world
        wishes = tuple(Wish(each) for each in (*sizes.possible(world), *sizes.impossible(world)))
        self.runs.settle()
        told = dict(zip(wishes, group_lists(self.runs.engine, backend, wishes), strict=True))
        lists = {layout: told[Wish(layout)].lists}
        return [judge(check, group_lists=lists, group_answers=told, size_answers=told) for check in asked]


EXPECTED = [(plant, expected) for plant in plants() for expected in plant.expects]
PLACES = sorted({(e.requirement, p.variant, p.layout.name, p.layout, e.workload) for p, e in EXPECTED}, key=str)
# There the bug is a claim, without which the requirement does not apply to native.
CLAIMED = ("COST-04", "alltoall")


def readers(requirement: str, run: Run) -> list[Check]:
    """Return the checks of a requirement that read a run."""
    return [check for check in checks()[requirement] if check.reads(run.drawn())]


def run_more(asked: list[Check]) -> bool:
    """Whether checks run twins of what they are given."""
    return any("twins" in check.needs() for check in asked)


def faults() -> set[Run]:
    """Return the runs of plants that hang or end ranks, but for those whose twins follow on the same ranks."""
    expectations = [(e, Run(p.backend, variant_for(p, e), p.layout, e.workload)) for p, e in EXPECTED if e.workload]
    followed = {run for expected, run in expectations if run_more(readers(expected.requirement, run))}
    return {run for expected, run in expectations if "run" == expected.stage} - followed


def planned(item: pytest.Item) -> Run | None:
    """Return what a test will have run, if that can be told from its parameters."""
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if {"plant", "expected"} <= given.keys():
        plant, expected = given["plant"], given["expected"]
        run = Run(plant.backend, variant_for(plant, expected), plant.layout, expected.workload)
    elif {"requirement", "variant", "layout", "workload"} <= given.keys():
        run = Run(NATIVE, given["variant"], given["layout"], given["workload"])
    else:
        return None
    return run if run.workload else None  # else groups are only asked for


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all planted bugs."""
    items = [item for item in request.session.items if item.path == request.path]
    runs = Runs((run for item in items if (run := planned(item))), faults())
    yield CheckedRuns(runs)
    runs.close()


class TestDetection:
    @pytest.mark.parametrize(("plant", "expected"), EXPECTED, ids=[f"{p.name}-{e.requirement}" for p, e in EXPECTED])
    def test_a_planted_bug_is_detected_and_named(
        self, checked: CheckedRuns, plant: Plant, expected: Expectation
    ) -> None:
        """The checks of the requirement fail at the right stage, in words that name the cause."""
        variant = variant_for(plant, expected)
        verdicts = checked.verdicts(plant.backend, expected.requirement, variant, plant.layout, expected.workload)
        (mismatch,) = [verdict for verdict in verdicts if isinstance(verdict, Mismatch)]
        assert expected.stage == mismatch.stage, mismatch.sentence
        missing = [words for words in expected.words if words not in mismatch.sentence]
        assert not missing, f"not in: {mismatch.sentence}"
        assert [] == unsized(mismatch)

    @pytest.mark.parametrize(
        ("requirement", "variant", "layout", "workload"),
        [(requirement, variant, layout, workload) for requirement, variant, _, layout, workload in PLACES],
        ids=[f"{requirement}-{variant}-{name}-{workload}" for requirement, variant, name, _, workload in PLACES],
    )
    def test_native_passes_where_its_planted_bugs_are_detected(
        self, checked: CheckedRuns, requirement: str, variant: str, layout: Layout, workload: str
    ) -> None:
        """The same checks on the same workload pass without the bug, and have compared something."""
        if (requirement, variant) == CLAIMED:
            with pytest.raises(NotOffered):
                checked.verdicts(NATIVE, requirement, variant, layout, workload)
        else:
            checked.check_passes(NATIVE, requirement, variant, layout, workload)

    @pytest.mark.parametrize("workload", ["copies-even", "copies-rank-without-tokens", "copies-own-uneven"])
    def test_parts_that_are_said_to_be_parts_are_added_up(self, checked: CheckedRuns, workload: str) -> None:
        """A backend whose tp ranks have parts of the gradients, and which says so, passes."""
        backend = "self_tests.planted_bugs.tp_duplicated_tokens:Parts"
        for verdict in checked.verdicts(backend, "EXCH-36", "alltoall", TP2_EP2, workload):
            assert isinstance(verdict, Tally), verdict

    def test_whole_maps_that_are_said_to_be_sent_may_be(self, checked: CheckedRuns) -> None:
        """A backend that gathers whole maps, and says so, passes."""
        for workload in ("even", "rank-without-tokens"):
            checked.check_passes("self_tests.planted_bugs.cost.calls:Maps", "COST-06", "allgather", EP2, workload)

    def test_gradients_may_be_reduced_in_backwards(self, checked: CheckedRuns) -> None:
        """What lies in `grad` is the sum over replicas then, and no more what hooks were passed."""
        backend = "self_tests.planted_bugs.gradients.in_backward:ReducesInBackward"
        with pytest.raises(NotOffered, match="reduced over replicas in backwards"):
            checked.verdicts(backend, "GRAD-11", "alltoall", EP2_EDP2, "own-hooked-even")
        checked.check_passes(backend, "GRAD-05", "alltoall", EP2_EDP2, "own-even")

    def test_weights_may_have_a_wider_dtype(self, checked: CheckedRuns) -> None:
        """A router that computes in bfloat16, and ends in float32, may err as bfloat16 does."""
        backend = "self_tests.planted_bugs.routing.extreme_logits:Narrow"
        for requirement in ("ROUTE-02", "ROUTE-14"):
            checked.check_passes(backend, requirement, "alltoall", EP2, "extreme-bfloat16")

    @pytest.mark.parametrize("layout", [EP2, EP2_ETP2], ids=lambda layout: layout.name)
    def test_budgets_count_what_fills_blocks(self, checked: CheckedRuns, layout: Layout) -> None:
        """A backend that pads every expert's rows to a multiple, says so, and counts what that adds passes."""
        backend, judged = "self_tests.planted_bugs.capacity.row_blocks:Blocks", 0
        for workload in ("budget-exact-even", "budget-by-turns", "overfull-by-turns-even", "budget-filled-even"):
            for requirement in ("DROP-14", "DROP-15", "DROP-16", "EXCH-22", "EXCH-25"):
                for verdict in checked.verdicts(backend, requirement, "hybridep", layout, workload):
                    assert isinstance(verdict, Tally), verdict
                    judged += 1
        assert 9 == judged

    @pytest.mark.parametrize("workload", ["even", "duplicates-even", "two-dims-even", "inference-even"])
    def test_combine_may_write_into_expert_outputs(self, checked: CheckedRuns, workload: str) -> None:
        """A backend that scales the experts' outputs in place passes; its gradients are those that are checked."""
        for requirement in ("EXCH-05", "GRAD-01", "GRAD-02", "GRAD-03"):
            backend = "self_tests.correct_backends.unusual:InPlace"
            checked.check_passes(backend, requirement, "alltoall", EP2, workload)

    @pytest.mark.parametrize("requirement", ["EXCH-05", "EXCH-07", "GRAD-02"])
    def test_an_output_is_lent_until_its_backward_has_ended(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that uses the memory of an output again after its backward passes."""
        backend = "self_tests.correct_backends.unusual:Lending"
        checked.check_passes(backend, requirement, "alltoall", EP2, "one-by-one-uneven")

    @pytest.mark.parametrize("requirement", ["EXCH-22", "EXCH-25"])
    def test_a_buffer_need_not_hold_more_than_can_come(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that sends a token once to a rank passes with one row for each token, whatever the factor."""
        backend = "self_tests.correct_backends.unusual:Buffered"
        checked.check_passes(backend, requirement, "deepep", EP2, "budget-roomy-even")

    @pytest.mark.parametrize("workload", ["budget-exact-even", "budget-one-short-even", "budget-in-flight-even"])
    def test_a_budget_counts_the_rows_that_there_are(self, checked: CheckedRuns, workload: str) -> None:
        """A backend that refuses more rows than its buffer has passes, with one row for each token as well."""
        for requirement in ("DROP-14", "DROP-15"):
            checked.check_passes("self_tests.correct_backends.unusual:Buffered", requirement, "deepep", EP2, workload)

    def test_first_slots_may_come_first(self, checked: CheckedRuns) -> None:
        """A backend that keeps first slots before second ones, and says so, passes."""
        backend, workload = "self_tests.correct_backends.unusual:ByChoices", "capacity-tight-position"
        checked.check_passes(backend, "DROP-06", "alltoall", EP2, workload)

    @pytest.mark.parametrize(
        ("requirement", "workload"),
        [("ROUTE-01", "route-softmax"), ("ROUTE-02", "route-softmax"), ("GRAD-18", "layer-even")],
    )
    def test_noise_in_training_may_be_claimed(self, checked: CheckedRuns, requirement: str, workload: str) -> None:
        """A router that is noisy in training, and says so, is judged in evaluation mode and passes."""
        backend = "self_tests.correct_backends.unusual:Noisy"
        checked.check_passes(backend, requirement, "alltoall", EP2, workload)

    @pytest.mark.parametrize(
        ("backend", "workload"),
        [
            ("ByScores", "capacity-biased"),
            ("ByScores", "layer-dropped-normalised-even"),
            ("RoundedDown", "capacity-fraction"),
            ("RoundedDown", "layer-dropped-even"),
            ("OverTheKept", "capacity-normalised"),
            ("OverTheKept", "layer-dropped-normalised-even"),
            ("ByChoices", "layer-dropped-position-even"),
        ],
    )
    def test_what_is_dropped_may_be_claimed(self, checked: CheckedRuns, backend: str, workload: str) -> None:
        """A backend with another rule of dropping that it claims passes in its router and in its layer."""
        in_layer = ("DROP-09", "DROP-10", "DROP-11")
        of_router = ("DROP-01", "DROP-03", "DROP-05", "DROP-09", "DROP-11")
        for requirement in in_layer if workload.startswith("layer") else of_router:
            path = f"self_tests.correct_backends.unusual:{backend}"
            checked.check_passes(path, requirement, "alltoall", EP2, workload)

    @pytest.mark.parametrize(
        ("backend", "workload", "layout", "requirements"),
        [
            ("Summed", "losses-attached", EP2, ("LOSS-10", "LOSS-17", "LOSS-19")),
            ("Summed", "losses-auxiliary", TP2_EP2, ("LOSS-04", "LOSS-11", "LOSS-12")),
            ("Summed", "losses-global", EP2, ("LOSS-07", "LOSS-08")),
            ("Returned", "losses-attached", SINGLE, ("LOSS-10", "LOSS-17", "LOSS-19")),
            ("Returned", "losses-layers", SINGLE, ("LOSS-18", "LOSS-19")),
            ("OfTokens", "losses-auxiliary", EP2, ("LOSS-01", "LOSS-04", "LOSS-11")),
            ("OfTokens", "losses-global", EP2, ("LOSS-07", "LOSS-08")),
            ("Forgetful", "losses-global", EP2, ("LOSS-07", "LOSS-08")),
            ("OwnZ", "losses-z", TP2_EP2, ("LOSS-09", "LOSS-12")),
        ],
    )
    def test_conventions_of_losses_may_be_claimed(
        self, checked: CheckedRuns, backend: str, workload: str, layout: Layout, requirements: tuple[str, ...]
    ) -> None:
        """Losses of another convention, which is claimed, pass."""
        for requirement in requirements:
            path = f"self_tests.correct_backends.unusual_losses:{backend}"
            checked.check_passes(path, requirement, "alltoall", layout, workload)

    @pytest.mark.parametrize(
        ("backend", "requirement", "workload", "words"),
        [
            (
                "SaysSummed",
                "LOSS-11",
                "losses-z",
                "averaged over microbatches and data parallel groups, and Claims",
            ),
            ("SaysSummed", "LOSS-08", "losses-global", "and Claims.loss_gradients is 'sum'"),
            ("SaysOfTokens", "LOSS-01", "losses-auxiliary", "add up to 1, and Claims.loss_fractions is 'tokens'"),
        ],
    )
    def test_a_wrong_claim_about_losses_is_named(
        self, checked: CheckedRuns, backend: str, requirement: str, workload: str, words: str
    ) -> None:
        """Losses of another convention than is claimed fail, in words that name the claim."""
        path = f"self_tests.correct_backends.unusual_losses:{backend}"
        (mismatch,) = checked.verdicts(path, requirement, "alltoall", EP2, workload)
        assert isinstance(mismatch, Mismatch)
        assert words in mismatch.sentence

    @pytest.mark.parametrize(
        ("backend", "workload", "layout", "requirements"),
        [
            ("Centred", "bias-microbatches", TP2_EP2, ("BIAS-01", "BIAS-02", "BIAS-03", "BIAS-04", "BIAS-08")),
            ("Centred", "bias-bfloat16", SINGLE, ("BIAS-09",)),
            ("AfterDrops", "bias-dropped", SINGLE, ("BIAS-05",)),
            ("AfterDrops", "bias-dropped-padded", SINGLE, ("BIAS-05",)),
            ("ForcedToo", "bias-forced-dealt", EP2, ("BIAS-07",)),
            ("ForcedToo", "bias-forced-random", SINGLE, ("BIAS-07",)),
            ("ReducedAtOnce", "bias-microbatches", TP2_EP2, ("BIAS-02", "BIAS-04")),
            ("ReducedAtOnce", "bias-padding", EP2, ("BIAS-05",)),
            ("Frozen", "bias-microbatches", EP2, ("BIAS-01", "BIAS-03", "BIAS-08", "BIAS-10")),
            ("Frozen", "bias-bfloat16", SINGLE, ("BIAS-09",)),
            ("Frozen", "bias-layers", SINGLE, ("BIAS-11",)),
        ],
    )
    def test_conventions_of_balancing_may_be_claimed(
        self, checked: CheckedRuns, backend: str, workload: str, layout: Layout, requirements: tuple[str, ...]
    ) -> None:
        """A balance bias of another convention passes, and says so where loads differ."""
        for requirement in requirements:
            path = f"self_tests.correct_backends.unusual_balance:{backend}"
            checked.check_passes(path, requirement, "alltoall", layout, workload)

    @pytest.mark.parametrize(
        ("requirement", "workload", "words"),
        [
            ("BIAS-05", "bias-dropped", "loads are counted before drops, and Claims.balance_loads is 'kept'"),
            ("BIAS-07", "bias-forced-dealt", "forced loads are ignored, and Claims.forced_loads is 'counted'"),
        ],
    )
    def test_a_wrong_claim_about_balancing_is_named(
        self, checked: CheckedRuns, requirement: str, workload: str, words: str
    ) -> None:
        """Loads of another convention than is claimed fail, in words that name the claim."""
        path = "self_tests.correct_backends.unusual_balance:SaysAfterDrops"
        (mismatch,) = checked.verdicts(path, requirement, "alltoall", SINGLE, workload)
        assert isinstance(mismatch, Mismatch)
        assert words in mismatch.sentence

    @pytest.mark.parametrize(
        ("backend", "workload", "layout", "requirements"),
        [
            ("Single", "load-steps", EP2, ("LOAD-06", "LOAD-07", "LOAD-08", "LOAD-14", "LOAD-24")),
            ("Single", "load-entries", EP2, ("LOAD-01", "LOAD-14")),
            ("LeavesOutEmpty", "load-entries", EP2, ("LOAD-01", "LOAD-14")),
            ("LeavesOutEmpty", "load-received-nothing", EP2, ("LOAD-15",)),
            ("RecordsRepeated", "load-recomputed", EP2, ("LOAD-16", "LOAD-29", "LOAD-30")),
            ("RefusesUneven", "load-uneven-ranks", EP2_EDP2, ("LOAD-12",)),
        ],
    )
    def test_what_meters_may_do_otherwise(
        self, checked: CheckedRuns, backend: str, workload: str, layout: Layout, requirements: tuple[str, ...]
    ) -> None:
        """Meters that round, leave out entries without tokens, record a repeated forward, or refuse, pass."""
        for requirement in requirements:
            path = f"self_tests.correct_backends.unusual_meters:{backend}"
            checked.check_passes(path, requirement, "alltoall", layout, workload)

    @pytest.mark.parametrize("requirement", ["LOAD-29", "LOAD-30"])
    def test_a_meter_may_have_no_counters(self, checked: CheckedRuns, requirement: str) -> None:
        """Then nothing is said of them."""
        backend = "self_tests.correct_backends.unusual_meters:WithoutCounters"
        with pytest.raises(NotOffered, match="this meter has no"):
            checked.verdicts(backend, requirement, "alltoall", EP2, "load-recomputed")

    @pytest.mark.parametrize("requirement", ["DROP-08", "DROP-12"])
    def test_a_lossless_capacity_may_divide_over_tp(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that rounds it up for that passes."""
        backend = "self_tests.correct_backends.unusual:RoundedUp"
        checked.check_passes(backend, requirement, "alltoall", TP2_EP2, "lossless-one-expert")

    @pytest.mark.parametrize("requirement", ["COST-03", "EXCH-05", "PACK-13"])
    def test_a_capacity_is_no_token_count(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that reduces the capacity that it sends, and says that it sends it, reduces no token count."""
        backend = "self_tests.correct_backends.unusual:FullWire"
        checked.check_passes(backend, requirement, "alltoall", EP2, "uneven")

    def test_another_policy_is_no_matter_of_other_ranks(self, checked: CheckedRuns) -> None:
        """A backend that keeps the last slots instead of the first passes: it ignores other ranks' tokens."""
        backend, place = (
            "self_tests.correct_backends.unusual:FromBehind",
            ("alltoall", EP2, "capacity-of-own-tokens-position"),
        )
        (first,) = checked.verdicts(backend, "DROP-06", *place)
        assert isinstance(first, Mismatch)
        checked.check_passes(backend, "DROP-07", *place)

    def test_what_fails_alone_takes_no_turns(self, checked: CheckedRuns) -> None:
        """A backend that never multiplies float64 is not blamed for what it does between others."""
        backend = "self_tests.planted_bugs.equivalence.twins:WithoutDouble"
        checked.check_passes(backend, "EXCH-40", "alltoall", EP2, "own-even-bfloat16")

    @pytest.mark.parametrize(
        ("requirement", "workload"), [("DET-05", "own-even-bfloat16"), ("GRAD-11", "own-accumulated-even-bfloat16")]
    )
    def test_sums_in_place_are_no_fault(self, checked: CheckedRuns, requirement: str, workload: str) -> None:
        """Experts whose gradients of two steps that are not cleared are not twice those of one pass."""
        backend = "self_tests.planted_bugs.determinism.repetition:InPlace"
        checked.check_passes(backend, requirement, "alltoall", EP2_EDP2, workload)

    @pytest.mark.parametrize("requirement", ["DET-01", "DET-06", "GRAD-15"])
    def test_what_is_deterministic_if_asked_passes(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that gives other bits in every run, but not with deterministic algorithms, passes."""
        backend = "self_tests.planted_bugs.determinism.repetition:DeterministicIfAsked"
        checked.check_passes(backend, requirement, "alltoall", EP2_EDP2, "own-even-bfloat16")

    def test_gradients_may_be_sent_in_eight_bits(self, checked: CheckedRuns) -> None:
        """A backend whose backward of combine quantises, and says so, passes."""
        backend = "self_tests.planted_bugs.token_exchange.fp8_wire:RoundedGradients"
        checked.check_passes(backend, "EXCH-30", "alltoall", EP2, "float8-rows")

    def test_what_a_backend_keeps_from_another_layout_is_detected(self, checked: CheckedRuns) -> None:
        """A backend that returns the session of its first layout passes there, and fails on the next."""
        backend = "self_tests.planted_bugs.groups.members:FirstSessionForAll"
        checked.check_passes(backend, "EXCH-01", "alltoall", Layout(4, ep=4), "even")
        (mismatch,) = checked.verdicts(backend, "EXCH-01", "alltoall", EP2_EDP2, "even")
        assert isinstance(mismatch, Mismatch)
        assert "rank 0 token 0 slot" in mismatch.sentence

    @pytest.mark.parametrize(
        ("liar", "requirement", "layout", "workload", "words"),
        LIARS,
        ids=lambda value: value.__name__ if isinstance(value, type) else None,
    )
    def test_a_liar_is_detected(
        self, checked: CheckedRuns, liar: type, requirement: str, layout: Layout, workload: str, words: str
    ) -> None:
        """What an adapter reports wrongly of a correct computation is detected as well."""
        backend = f"{liar.__module__}:{liar.__name__}"
        verdicts = checked.verdicts(backend, requirement, "alltoall", layout, workload)
        (mismatch,) = [verdict for verdict in verdicts if isinstance(verdict, Mismatch)]
        assert words in mismatch.sentence


RUNS = {  # plant: requirement, workload, words
    "swapped-sources": ("EXCH-01", "even", "rank 0 token 0 slot 1 and rank 1 token 1 slot 1 are exchanged"),
    "expert-gradients-times-ep": ("GRAD-05", "own-even", "every expert gradient is 2.000 x the expected value"),
    "early-return-without-tokens": ("EXCH-09", "rank-without-tokens", "rank 1 hung: returned while rank 0 waited"),
    "unweighted": ("EXCH-05", "even", "EXCH-05: fail in combine"),
}


class TestCommandLine:
    def test_a_planted_bug_fails_the_run(self) -> None:
        """`moe-conformance run --plant NAME` exits with 1 and prints the sentence."""
        started = {
            name: subprocess.Popen(
                [
                    *(sys.executable, "-m", "moe_conformance.cli", "run", "--ranks", "2"),
                    *("--plant", name, "--only", requirement, "--", "-k", f"alltoall-ep2-{workload}]"),
                ],
                cwd=Path(__file__).parents[2],
                env={**plugin_runs.environment(), "COLUMNS": "200"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, (requirement, workload, _) in RUNS.items()
        }
        for name, process in started.items():
            output, _ = process.communicate(timeout=plugin_runs.LIMIT_S)
            assert f"native with the planted bug {name}" in output
            assert RUNS[name][2] in output
            assert 1 == process.returncode


class TestCollection:
    def test_every_requirement_is_violated_by_a_plant(self) -> None:
        """A requirement that nothing has ever violated is not yet trusted."""
        checked = {id: load()[id].profile for id in places.checked()}
        of_many_ranks = {each.requirement for plant in plants_of_many_ranks() for each in plant.expects}
        assert {name for name, profile in checked.items() if profile == "virtual"} <= of_many_ranks
        assert {name for name, profile in checked.items() if profile != "virtual"} == {
            expected.requirement for _, expected in EXPECTED
        }

    def test_every_plant_expects_something(self) -> None:
        """A plant that nobody looks for shows nothing."""
        assert [] == [plant.name for plant in plants() if not plant.expects]

    def test_every_liar_is_tried(self) -> None:
        """None of the lying backends is left out."""
        named = [each for module in (lying, lying_costs) for each in vars(module).values()]
        shipped = {each for each in named if isinstance(each, type) and issubclass(each, lying.Liar)}
        assert shipped - {lying.Liar} == {liar for liar, *_ in LIARS}

    def test_names_are_unique(self) -> None:
        """A name on the command line means one plant."""
        names = [plant.name for plant in plants()]
        assert sorted(set(names)) == sorted(names)

    @pytest.mark.parametrize("plant", plants(), ids=lambda plant: plant.name)
    def test_a_plant_can_be_loaded_and_says_what_it_is(self, plant: Plant) -> None:
        """Its path leads to a backend of its name, and it has a mechanism in words."""
        backend = registry.load(plant.backend)
        assert plant.mechanism.endswith(".")
        assert isinstance(backend, plant.native)
