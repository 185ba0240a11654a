"""Judges of the sizes for which a backend builds groups, and of their pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import SLIPS
from moe_conformance.judging.verdict import NotOffered, Raised, Tally, Unrefused, WrongGroups
from moe_conformance.reference.groups.members import valid
from moe_conformance.reference.groups.rules import mixed_groups
from moe_conformance.scenarios.outcome import GroupAnswer
from moe_conformance.workloads.records.workload import Wish

_AXES = ("world", "tp", "cp", "pp", "ep", "etp")
_OF_ONE_STAGE = ("tp", "cp", "dp", "dp_cp", "ep", "etp", "ep_etp", "edp")


def judge_sizes(answers: Mapping[Wish, GroupAnswer], tally: Tally) -> None:
    """Decide whether groups are built for the sizes of a layout, and refused for others.

    A refusal by the adapter is no refusal by the library. A world with data parallelism only must not be refused.
    Counts an element per result.

    Raises:
        WrongGroups: sizes of a layout raised an error that is not a refusal by a limit, or sizes of 1 were refused.
        Unrefused: sizes of no layout were accepted.
        Raised: sizes of no layout raised an internal error, such as a division by zero.
        NotOffered: the adapter refused all sizes that make no layout.
    """
    refused = [
        Finding("raised", f"{wish} {'raised' if answer.by == 'raised' else 'was refused:'} {answer.error}", ())
        for wish, answer in _layouts(answers, fits=True)
        if answer.by == "raised" or (answer.by == "library" and wish.layout == Layout(wish.layout.world))
    ]
    if refused:
        fail(WrongGroups, "groups", refused)
    impossible = _layouts(answers, fits=False)
    taken = [
        Finding("taken", f"{wish} was accepted, although {_problem(wish)}", ())
        for wish, answer in impossible
        if answer.lists is not None
    ]
    if taken:
        fail(Unrefused, "groups", taken)
    slip = "raised an internal error instead of refusing the sizes"
    stumbled = [
        Finding("stumbled", f"{wish} {slip}: {answer.error}; {_problem(wish)}", ())
        for wish, answer in impossible
        if answer.by == "raised" and f"builtins.{answer.error.partition(':')[0]}" in SLIPS
    ]
    if stumbled:
        fail(Raised, "groups", stumbled)
    if impossible and all(answer.by == "adapter" for _, answer in impossible):
        raise NotOffered(impossible[0][1].error)
    tally.add(elements=sum(answer.by != "adapter" for answer in answers.values()), rank=0)


@judge(WrongGroups, "groups")
def judge_stages(answers: Mapping[Wish, GroupAnswer]) -> Comparisons:
    """Decide whether all groups except those along pp have ranks of one pipeline stage only.

    The stage of a rank is its position in its group along pp.

    Raises:
        WrongGroups: a group along pp does not have pp ranks, or a rank is in none; dense and expert groups differ
            in their groups along pp, or another group holds ranks of two stages.
    """
    for wish, answer in answers.items():
        if answer.lists is None or "pp" not in answer.lists or _problem(wish):
            continue
        for name in ("pp", "expert_pp"):
            if name in answer.lists and not _staged(answer.lists[name], wish.layout):
                sentence = f"the {name} groups are {list(answer.lists[name])} with {wish}"
                yield Comparison(None, Finding(f"stages {name}", sentence, ()))
        stage_of = _stages(answer.lists["pp"], wish.layout.world)
        other = _stages(answer.lists.get("expert_pp", answer.lists["pp"]), wish.layout.world)
        if differing := [rank for rank in range(wish.layout.world) if stage_of[rank] != other[rank]]:
            rank = differing[0]
            both = f"stage {stage_of[rank]} of the dense groups and {other[rank]} of the expert groups"
            yield Comparison(rank, Finding("folds", f"rank {rank} is in {both} with {wish}", (rank,)))
        for name in _OF_ONE_STAGE:
            for group in mixed_groups(answer.lists.get(name, ()), stage_of):
                stages = [stage_of[rank] for rank in group]
                sentence = f"the {name} group {list(group)} has ranks of the stages {stages} with {wish}"
                yield Comparison(None, Finding(f"mixed {name}", sentence, group))
        yield Comparison(None, elements=wish.layout.world)


def _layouts(answers: Mapping[Wish, GroupAnswer], *, fits: bool) -> list[tuple[Wish, GroupAnswer]]:
    return [(wish, answer) for wish, answer in answers.items() if (_problem(wish) is None) is fits]


def _problem(wish: Wish) -> str | None:
    return valid(**{axis: getattr(wish.layout, axis) for axis in _AXES})


def _staged(groups: RankLists, layout: Layout) -> bool:
    """Return whether every rank is in one group, and every group has one rank of each stage."""
    ranks = sorted(rank for group in groups for rank in group)
    return ranks == list(range(layout.world)) and all(len(group) == layout.pp for group in groups)


def _stages(groups: RankLists, world: int) -> list[int]:
    """Return the stage of every rank, -1 for one that is in no group."""
    stages = [-1] * world
    for group in groups:
        for stage, rank in enumerate(sorted(group)):
            if 0 <= rank < world:
                stages[rank] = stage
    return stages
