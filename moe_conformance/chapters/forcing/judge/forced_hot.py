"""Judges of routers that are forced to a hot rank, node or expert, and of refused strategies.

Expert parallel rank i of N experts each holds the experts i N to (i + 1) N - 1. The ranks of an exchange group are the
sources of its tokens. Any rank may be the hot one, but it is the same for all sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_conformance.chapters.forcing.judge.forced_routing import compared_routes
from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.comparisons import Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.script import answers, judge_refused
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import NotOffered, Tally, WrongSelection
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.hot import (
    Blocks,
    first_hot_ranks,
    hot_blocks,
    hot_by_ratio,
    hot_experts,
)
from moe_conformance.reference.forcing.imbalance import overload
from moe_conformance.scenarios.outcome import Outcome


def blocks_of(layout: Layout, experts: int, ranks: int = 1) -> Blocks:
    """Return the experts of every expert parallel rank, or of blocks of `ranks` ranks.

    >>> blocks_of(Layout(4, ep=4), 8, 2)
    [range(0, 4), range(4, 8)]
    """
    size = experts // layout.ep * ranks
    return [range(first, first + size) for first in range(0, experts, size)]


@judge(WrongSelection, "route")
def judge_hot_rank(reading: Reading) -> Comparisons:
    """Decide whether one expert parallel rank gets as many slots of every token as possible.

    Raises:
        WrongForm, WrongSelection: not the same rank, or fewer slots.
    """
    workload = reading.outcome.workload
    blocks = blocks_of(workload.layout, workload.config.experts)
    expected = _most(workload.config, "rank", len(blocks[0]))
    return _compare_hot(reading, lambda ids: hot_blocks(ids, blocks), expected)


@judge(WrongSelection, "route")
def judge_hot_node(reading: Reading) -> Comparisons:
    """Decide whether one node gets as many slots of every token as possible, evenly over its experts.

    Raises:
        WrongForm, WrongSelection: not the same node, fewer slots, or uneven loads.
    """
    workload = reading.outcome.workload
    ranks = int(workload.config.routing.forced[0][1] or 1)
    blocks = blocks_of(workload.layout, workload.config.experts, ranks)
    expected = _most(workload.config, f"node of {ranks} ranks", len(blocks[0])) + ", spread evenly"
    return _compare_hot(reading, lambda ids: hot_blocks(ids, blocks, even=True), expected)


@judge(WrongSelection, "route")
def judge_hot_expert(reading: Reading) -> Comparisons:
    """Decide whether one expert gets a slot of every token, and the other experts have equal loads.

    Raises:
        WrongForm, WrongSelection: not the same expert, not a slot of every token, or uneven loads of the others.
    """
    config = reading.outcome.workload.config
    expected = _most(config, "expert", 1) + ", and the others evenly"
    return _compare_hot(reading, lambda ids: hot_experts(ids, config.experts), expected)


@judge(WrongSelection, "route")
def judge_ratio(reading: Reading) -> Comparisons:
    """Decide whether one expert parallel rank gets `ratio` times the slots of each other rank.

    Raises:
        WrongForm, WrongSelection: not the same rank, another ratio, or uneven loads of the others.
    """
    workload = reading.outcome.workload
    blocks, ratio = blocks_of(workload.layout, workload.config.experts), workload.config.routing.forced[0][1]
    assert ratio is not None  # every workload with this strategy has one
    expected = f"one rank gets {ratio:g} times what each other rank gets, as far as its experts allow"
    return _compare_hot(reading, lambda ids: hot_by_ratio(ids, blocks, ratio), expected)


@judge(WrongSelection, "route")
def judge_alternating(reading: Reading) -> Comparisons:
    """Decide whether the hot rank moves to the next rank in every forward, and is the same on all source ranks.

    Raises:
        WrongForm, WrongSelection: it does not.
    """
    router = expected_of(reading)
    workload = router.workload
    blocks = blocks_of(workload.layout, workload.config.experts)
    forwards = range(len(workload.batches))
    findings = []
    for ranks in workload.layout.groups()["ep_etp"]:
        ids = [[router.ids[m, rank] for rank in ranks] for m in forwards]
        if first_hot_ranks(ids, blocks):
            continue
        hot = [hot_blocks(ids_of_forward, blocks) for ids_of_forward in ids]
        by_forward = "; ".join(f"forward {m}: {_ranks(hot_ranks)}" for m, hot_ranks in enumerate(hot))
        cause = (
            "likely cause: the hot rank stays"
            if all(hot_ranks == hot[0] for hot_ranks in hot)
            else _cause(router, ranks)
        )
        sentence = (
            f"the hot expert parallel rank on {_sources(ranks)} is {by_forward}; expected for alternating: one rank "
            f"on with every forward; {cause}"
        )
        findings.append(Finding("turns", sentence, ranks))
    return compared_routes(router, findings)


def judge_strategies_refused(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every rank refuses to build a router with two strategies, or with a parameter missing.

    A refusal by the adapter is no refusal by the library.

    Raises:
        Unrefused, Hung: some ranks built it.
        NotOffered: the adapter refused everything.
    """
    calls = range(len(outcome.workload.calls))
    by_adapter = [all(answer.error_by == "adapter" for answer in answers(outcome, call)) for call in calls]
    if all(by_adapter):
        raise NotOffered(answers(outcome, 0)[0].error)
    for number, call in enumerate(outcome.workload.calls):
        if by_adapter[number]:
            continue
        forced = call.given[0]["config"].routing.forced
        asked = f"a router forced by {' and '.join(f'{name} ({value})' for name, value in forced)}"
        judge_refused(outcome, number, tally, stage="run", asked=asked)


# ---- how -----------------------------------------------------------------------------------------------------


def _compare_hot(reading: Reading, hot: Callable[[Sequence[Tensor]], tuple[int, ...]], expected: str) -> Comparisons:
    """Decide whether one block can have been hot, for each exchange group and forward."""
    router, findings = expected_of(reading), []
    E, ep = router.workload.config.experts, router.workload.layout.ep
    for m in range(len(router.workload.batches)):
        for ranks in router.workload.layout.groups()["ep_etp"]:
            ids = [router.ids[m, rank] for rank in ranks]
            if hot(ids):
                continue
            name = router.workload.config.routing.forced[0][0]
            total_E = torch.stack([loads(ids_TK, E) for ids_TK in ids]).sum(0)
            by_rank = total_E.reshape(ep, -1).sum(1).tolist()
            sentence = (
                f"{_sources(ranks)} together route {total_E.tolist()} tokens to the experts and {by_rank} to the "
                f"expert parallel ranks in forward {m}; expected for {name}: {expected}; "
                f"{_cause(router, ranks, m)}"
            )
            findings.append(Finding("hot", sentence, ranks, float(max(by_rank))))
    return compared_routes(router, findings)


def _most(config: Config, block: str, size: int) -> str:
    """Return what is expected of a block of `size` experts that is as hot as possible."""
    slots, times = min(config.top_k, size), overload(config.top_k, config.experts, size)
    return f"one {block} gets {slots} of the {config.top_k} slots of every token, {times:g} times the mean load"


def _cause(router: RouterExpected, ranks: Sequence[int], forward: int = 0) -> str:
    if all(bool(router.legal((forward, rank)).all()) for rank in ranks):
        return "likely cause: the strategy was accepted and ignored: every token goes where its own logits send it"
    blocks = blocks_of(router.workload.layout, router.workload.config.experts)
    alone = [hot_blocks([router.ids[forward, rank]], blocks) for rank in ranks]
    if all(alone) and not set(alone[0]).intersection(*alone[1:]):
        return f"likely cause: each source rank has another hot rank: {', '.join(map(_ranks, alone))}"
    return "likely cause: not all slots that could go to the hot experts do, or the others are dealt unevenly"


def _ranks(ranks: tuple[int, ...]) -> str:
    return "none" if not ranks else " or ".join(map(str, ranks))


def _sources(ranks: Sequence[int]) -> str:
    return f"the ranks {list(ranks)}"
