"""Correct backends of other conventions, claimed or free, pass; a claim that is not true is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.chapters.experts.workloads import OF_ACTIVATIONS
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Mismatch, NotOffered, Tally, WrongLoss
from self_tests.checked_runs import CheckedRuns, opened
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all tests of this module."""
    yield from opened(request)


class TestConventions:
    @pytest.mark.parametrize("workload", ["copies-even", "copies-rank-without-tokens", "copies-own-uneven"])
    def test_parts_that_are_said_to_be_parts_are_added_up(self, checked: CheckedRuns, workload: str) -> None:
        """A backend whose tp ranks have parts of the gradients, and which says so, passes."""
        backend = "self_tests.chapters.tp_duplicated_tokens.plants:Parts"
        for verdict in checked.verdicts(backend, "EXCH-36", "alltoall", TP2_EP2, workload):
            assert isinstance(verdict, Tally), verdict

    def test_whole_maps_that_are_said_to_be_sent_may_be(self, checked: CheckedRuns) -> None:
        """A backend that gathers whole maps, and says so, passes."""
        for workload in ("even", "rank-without-tokens"):
            checked.check_passes("self_tests.chapters.cost.plants.calls:Maps", "COST-06", "allgather", EP2, workload)

    def test_gradients_may_be_reduced_in_backwards(self, checked: CheckedRuns) -> None:
        """What lies in `grad` is the sum over replicas then, and no more what hooks were passed."""
        backend = "self_tests.chapters.gradients.plants.in_backward:ReducesInBackward"
        with pytest.raises(NotOffered, match="reduced over replicas in backwards"):
            checked.verdicts(backend, "GRAD-11", "alltoall", EP2_EDP2, "own-hooked-even")
        checked.check_passes(backend, "GRAD-05", "alltoall", EP2_EDP2, "own-even")

    def test_weights_may_have_a_wider_dtype(self, checked: CheckedRuns) -> None:
        """A router that computes in bfloat16, and ends in float32, may err as bfloat16 does."""
        backend = "self_tests.chapters.routing.plants.extreme_logits:Narrow"
        for requirement in ("ROUTE-02", "ROUTE-14"):
            checked.check_passes(backend, requirement, "alltoall", EP2, "extreme-bfloat16")

    @pytest.mark.parametrize("layout", [EP2, EP2_ETP2], ids=lambda layout: layout.name)
    def test_budgets_count_what_fills_blocks(self, checked: CheckedRuns, layout: Layout) -> None:
        """A backend that pads every expert's rows to a multiple, says so, and counts what that adds passes."""
        backend, judged = "self_tests.chapters.capacity.plants.row_blocks:Blocks", 0
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
            ("ReturnedAlone", "losses-attached", SINGLE, ("LOSS-10", "LOSS-17")),
            ("ReturnedAlone", "losses-auxiliary", SINGLE, ("LOSS-01", "LOSS-04", "LOSS-11")),
            ("ReturnedAlone", "losses-layers", SINGLE, ("LOSS-18",)),
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

    def test_losses_that_are_only_returned_have_no_report(self, checked: CheckedRuns) -> None:
        """LOSS-19 is reported as not offered, and a wrong value that is returned fails."""
        path = "self_tests.correct_backends.unusual_losses:"
        with pytest.raises(NotOffered, match="returns its losses, and reports none"):
            checked.verdicts(f"{path}ReturnedAlone", "LOSS-19", "alltoall", SINGLE, "losses-attached")
        with pytest.raises(NotOffered, match="what ranks return of a microbatch that they share is free"):
            checked.verdicts(f"{path}ReturnedAlone", "LOSS-01", "alltoall", TP2_EP2, "losses-auxiliary")
        (wrong,) = checked.verdicts(f"{path}ReturnedTwice", "LOSS-01", "alltoall", SINGLE, "losses-auxiliary")
        assert isinstance(wrong, WrongLoss)
        assert "returns as the loss of microbatch 0" in wrong.sentence

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
            ("QuantilesOfParts", "bias-quantile", EP2, ("BIAS-12",)),
            ("QuantilesOfParts", "bias-quantile", SINGLE, ("BIAS-12",)),
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

    def test_experts_may_be_placed_unevenly(self, checked: CheckedRuns) -> None:
        """A backend that accepts numbers that ep does not divide passes if exchange and experts hold all of them."""
        backend = "self_tests.correct_backends.gathered_tokens:Gathered"
        checked.check_passes(backend, "GROUP-03", "default", EP2, "indivisible-experts")
        backend = "self_tests.correct_backends.gathered_tokens:FewerParameters"
        (mismatch,) = checked.verdicts(backend, "GROUP-03", "default", EP2, "indivisible-experts")
        assert isinstance(mismatch, Mismatch)
        assert "experts accepted a configuration with E = 3 experts over ep = 2" in mismatch.sentence
        assert "and expert 2 is on no rank" in mismatch.sentence

    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    def test_a_step_may_run_all_forwards_first(self, checked: CheckedRuns, layout: Layout) -> None:
        """A backend that overlaps nothing, and says so, passes; deferral it refuses."""
        backend = "self_tests.correct_backends.unusual_overlap:AllForwardsFirst"
        for requirement in ("OVLP-04", "OVLP-05", "OVLP-14"):
            for workload in ("overlap-even", "overlap-rank-without-tokens"):
                checked.check_passes(backend, requirement, "alltoall", layout, workload)
        with pytest.raises(NotOffered, match="overlap = 'no'"):
            checked.verdicts(backend, "OVLP-12", "alltoall", layout, "overlap-even")

    def test_a_step_may_overlap_with_ep_alone(self, checked: CheckedRuns) -> None:
        """A backend that gathers over etp, and waits, passes on a layout with ep = 1 if it claims no overlap there."""
        layout, backend = Layout(2, etp=2), "self_tests.correct_backends.unusual_overlap:ClaimsMore"
        with pytest.raises(NotOffered, match="overlap = 'no'"):
            checked.verdicts("native", "OVLP-12", "alltoall", layout, "overlap-even")
        (mismatch,) = checked.verdicts(backend, "OVLP-12", "alltoall", layout, "overlap-even")
        assert isinstance(mismatch, Mismatch)
        assert "rank 0 has 0 collectives in flight while it computes" in mismatch.sentence

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
        backend = "self_tests.chapters.equivalence.plants.twins:WithoutDouble"
        checked.check_passes(backend, "EXCH-40", "alltoall", EP2, "own-even-bfloat16")

    @pytest.mark.parametrize(
        ("requirement", "workload"), [("DET-05", "own-even-bfloat16"), ("GRAD-11", "own-accumulated-even-bfloat16")]
    )
    def test_sums_in_place_are_no_fault(self, checked: CheckedRuns, requirement: str, workload: str) -> None:
        """Experts whose gradients of two steps that are not cleared are not twice those of one pass."""
        backend = "self_tests.chapters.determinism.plants.repeated_steps:InPlace"
        checked.check_passes(backend, requirement, "alltoall", EP2_EDP2, workload)

    @pytest.mark.parametrize("requirement", ["DET-01", "DET-06", "GRAD-15"])
    def test_what_is_deterministic_if_asked_passes(self, checked: CheckedRuns, requirement: str) -> None:
        """A backend that gives other bits in every run, but not with deterministic algorithms, passes."""
        backend = "self_tests.chapters.determinism.plants.repetition:DeterministicIfAsked"
        checked.check_passes(backend, requirement, "alltoall", EP2_EDP2, "own-even-bfloat16")

    def test_gradients_may_be_sent_in_eight_bits(self, checked: CheckedRuns) -> None:
        """A backend whose backward of combine quantises, and says so, passes."""
        backend = "self_tests.chapters.token_exchange.plants.fp8_wire:RoundedGradients"
        checked.check_passes(backend, "EXCH-30", "alltoall", EP2, "float8-rows")

    @pytest.mark.parametrize("backend", ["BiasInShares", "BiasOfTheFirst"])
    def test_who_adds_an_output_bias_is_free(self, checked: CheckedRuns, backend: str) -> None:
        """Each rank of etp a share of it, or the first one all of it, which then alone names it."""
        path = f"self_tests.correct_backends.unusual_experts:{backend}"
        for workload in ("own-biased-even", "own-biased-input-weights-even"):
            checked.check_passes(path, "EXPT-06", "alltoall", EP2_ETP2, workload)

    def test_how_activations_are_computed_is_free(self, checked: CheckedRuns) -> None:
        """Weights may multiply hidden units and biases apart, and activations be made of single operations."""
        path = "self_tests.correct_backends.unusual_experts:ByHand"
        for workload in ("own-biased-even", "own-biased-gpt-oss-even"):
            checked.check_passes(path, "EXPT-06", "deepep", EP2, workload)
        for recipe in OF_ACTIVATIONS:
            checked.check_passes(path, "EXPT-07", "alltoall", EP2, recipe.name)

    def test_an_exchange_may_rely_on_the_start_of_a_round_robin(self, checked: CheckedRuns) -> None:
        """If it says so, it is judged by ids that begin there, and not by others."""
        path = "self_tests.correct_backends.unusual_experts:FromZero"
        checked.check_passes(path, "FAST-14", "alltoall", EP2, "dealt-whole-even")
        with pytest.raises(NotOffered, match="begins at expert 0"):
            checked.verdicts(path, "FAST-14", "alltoall", EP2, "dealt-shifted-even")

    def test_a_shortcut_need_not_be_taken(self, checked: CheckedRuns) -> None:
        """Counters that count calls with gradients too, and see no shortcut taken, pass."""
        path = "self_tests.correct_backends.unusual_experts:NeverTaken"
        checked.check_passes(path, "FAST-16", "alltoall", SINGLE, "shortcuts-counted")
