"""EXCH: metamorphic checks: two runs with permuted, split or rescaled inputs must give the same."""

from __future__ import annotations

import torch

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.judging.shared.equivalence.refusals import judge_strided
from moe_conformance.judging.shared.equivalence.runs import judge_across, judge_alike, judge_scaled
from moe_conformance.spec.row import Row
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.features import all_alike, likened, likened_once
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def in_one_stage(workload: Workload) -> bool:
    """Whether twins are compared with it, and every rank holds the parameters of the same experts."""
    return likened(workload) and workload.layout.pp == 1


def cast_to(workload: Workload) -> bool:
    """Whether a run under autocast is compared with it: its tokens have a dtype that autocast casts to."""
    return likened_once(workload) and workload.config.dtype in (torch.bfloat16, torch.float16)


class TestNames:
    test_the_order_of_tokens_and_slots_means_nothing = Row(
        "EXCH-13", ExchangeStep(), judge_alike, when=likened, twins=laws.reordered
    )
    """Permuted tokens and slots have the same outputs and gradients."""

    test_the_order_means_nothing_to_experts = Row(
        "EXCH-13", ExpertsStep(), judge_alike, when=likened, twins=laws.reordered
    )
    """With the backend's experts too; parameters have the same gradients."""

    test_the_numbers_of_experts_mean_nothing = Row(
        "EXCH-14", ExchangeStep(), judge_alike, when=likened, twins=laws.relabelled
    )
    """Permuted expert ids, and so experts on other ranks, give the same outputs and gradients."""

    test_the_numbers_mean_nothing_to_experts = Row(
        "EXCH-14", ExpertsStep(), judge_alike, when=likened, twins=laws.relabelled
    )
    """With the backend's experts too; parameters and their gradients are permuted alike."""


class TestPlaces:
    test_where_tokens_lie_means_nothing = Row(
        "EXCH-15", ExchangeStep(), judge_alike, when=in_one_stage, twins=laws.spread
    )
    """The same tokens on other ranks, on fewer ranks and in other layouts have the same outputs and gradients."""

    test_where_tokens_lie_means_nothing_to_experts = Row(
        "EXCH-15", ExpertsStep(), judge_alike, when=in_one_stage, twins=laws.spread
    )
    """With the backend's experts too; their gradients are the same on whichever rank they are."""

    test_exchanges_agree = Row("EXCH-43", ExchangeStep(), judge_across, when=likened)
    """All variants of a backend give the same outputs and gradients for the same batch."""

    test_exchanges_agree_behind_experts = Row("EXCH-43", ExpertsStep(), judge_across, when=likened)
    """With the backend's experts too."""

    test_packs_mean_nothing = Row("PACK-09", ExchangeStep(), judge_alike, when=likened, twins=laws.packed)
    """Packed sequences in another order and in several microbatches give tokens the same output and gradient."""

    test_packs_mean_nothing_to_experts = Row("PACK-09", ExpertsStep(), judge_alike, when=likened, twins=laws.packed)
    """With the backend's experts too; their gradients are the sum over all packs."""


class TestHistory:
    test_exchanges_take_turns = Row("EXCH-40", ExchangeStep(), judge_alike, when=likened, twins=determinism.in_turn)
    """An exchange used in turn with others of other sizes gives the bytes that it gives alone."""

    test_experts_take_turns = Row("EXCH-40", ExpertsStep(), judge_alike, when=likened, twins=determinism.in_turn)
    """Steps in turn with those of others give what they give alone, gradients of parameters too."""


class TestInference:
    test_training_behind_inference = Row(
        "EXCH-38", ExpertsStep(), judge_alike, when=likened_once, twins=determinism.behind_inference
    )
    """What the first forward of a process caches, in inference mode, can be used in training."""


class TestAutograd:
    test_autocast_changes_nothing = Row("EXCH-46", ExpertsStep(), judge_alike, when=cast_to, twins=laws.under_autocast)
    """Under autocast to the tokens' dtype exchange and experts give the same values in the same dtypes."""


class TestWeights:
    test_powers_of_two_pass_through = Row("EXCH-16", ExchangeStep(), judge_scaled, when=likened, twins=laws.scaled)
    """Weights times a power of two give outputs and input gradients times that power, to the bit."""

    test_powers_of_two_pass_through_experts = Row(
        "EXCH-16", ExpertsStep(), judge_scaled, when=likened, twins=laws.scaled
    )
    """With the backend's experts too: a power of two changes exponents only."""


class TestMemory:
    test_strides_mean_nothing = Row("EXCH-17", ExchangeStep(), judge_strided, when=likened, twins=laws.strided)
    """Strided inputs give the same bytes as contiguous ones, or are refused."""

    test_strides_mean_nothing_to_experts = Row(
        "EXCH-17", ExpertsStep(), judge_strided, when=likened, twins=laws.strided
    )
    """With the backend's experts too."""

    test_what_is_there_once_counts_for_all = Row(
        "EXCH-17", ExchangeStep(), judge_strided, when=all_alike, twins=laws.expanded
    )
    """Expanded ids, weights and upstream gradients (one row in memory, stride 0) are used for every token."""
