"""PACK-07 to -10, PACK-15, ROUTE-22: packed sequences (THD), with gaps between them."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.chapters.thd.judge.padding_mask import judge_masked_router
from moe_conformance.chapters.thd.judge.thd import judge_empty_sequences, judge_lengths, judge_shares, judge_tokens
from moe_conformance.chapters.token_padding.workloads import EMPTY_SEQUENCES, LENGTHS_OF_PACKS
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import RESULTS
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.experts.experts import EXPERT_RESULTS
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import has_lost_tokens, shows
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, Script
from moe_conformance.workloads.records.workload import Workload


def asks_for(method: str) -> Callable[[Workload], bool]:
    """Select scripts that call a method."""
    return lambda workload: any(call.method == method for call in workload.calls)


class TestSequences:
    test_sums_are_those_of_lengths_and_of_their_multiples = Row(
        "PACK-07", Script("packing"), judge_lengths, when=shows(LENGTHS_OF_PACKS)
    )
    """Lengths are unchanged, and every padded length is a multiple of what parallelism divides it by."""

    test_empty_sequences_change_nothing_else = Row(
        "PACK-10", Script("packing"), judge_empty_sequences, when=shows(EMPTY_SEQUENCES)
    )
    """Sequences of length zero are equal neighbours in cu_seqlens, and shift no other."""

    test_gaps_are_told_from_tokens = Row("PACK-08", Script("packing"), judge_tokens, when=asks_for("tokens"))
    """The first rows of every sequence are its tokens, and nothing else is one."""

    test_context_ranks_share_every_row = Row("PACK-15", Script("packing"), judge_shares, when=asks_for("share"))
    """Every row of a pack is on one cp rank, that of its chunk, and in its order."""

    test_padding_changes_no_route_and_no_load = Row(
        ("PACK-08", "ROUTE-22"), Script("masked_router"), judge_masked_router
    )
    """Tokens have the same experts and weights as without the gaps, and gaps are not counted."""

    test_gaps_are_routed_nowhere = Row("PACK-08", ExchangeStep(), (judge_deliveries, *RESULTS), when=has_lost_tokens)
    """No row of a gap is delivered; its output and gradients are zero, and those of tokens are unchanged."""

    test_gaps_of_packed_sequences_are_routed_nowhere = Row(
        "PACK-08", ExchangeStep(option="packing"), (judge_deliveries, *RESULTS), when=has_lost_tokens
    )
    """With an exchange for packed sequences too, gaps have zeros, and tokens their own outputs and gradients."""

    test_outputs_return_to_the_rank_of_their_share = Row(
        "PACK-15",
        ExchangeStep(),
        (judge_deliveries, judge_outputs),
        when=lambda workload: workload.layout.cp > 1 and has_lost_tokens(workload),
    )
    """Each rank of a cp group has the outputs of its own rows, in their places."""


class TestOwnExperts:
    test_gaps_give_nothing_to_experts = Row("PACK-08", ExpertsStep(), EXPERT_RESULTS, when=has_lost_tokens)
    """With the backend's experts, outputs and all gradients are those of the tokens alone."""
