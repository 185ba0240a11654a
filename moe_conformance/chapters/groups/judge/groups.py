"""Judges of the groups of ranks that a backend would build for a layout, and of deliveries within them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import WrongDelivery, WrongGroups
from moe_conformance.reference.groups.members import groups as reference_groups
from moe_conformance.workloads.records import tags


@judge(WrongDelivery, "dispatch")
def judge_source_groups(reading: Reading) -> Comparisons:
    """Decide whether every row that a rank receives is a token of a rank of its exchange group (ep x etp).

    The tag of a row names its token; padding and rows of no token are ignored.

    Raises:
        WrongDelivery: a row comes from a rank of another group.
    """
    group_of = {rank: group for group in reading.outcome.workload.layout.groups()["ep_etp"] for rank in group}
    for entry in reading.entries:
        if entry.kind != tags.TAG:
            continue
        group = group_of[entry.rank]
        if group_of.get(entry.source) == group:
            yield Comparison(entry.rank, pairs=1)
            continue
        sentence = f"{entry.place} is {entry.token_name}, which is outside of that rank's exchange group"
        yield Finding("another group", f"{sentence} ({some(group)})", (entry.rank, entry.source))


@judge(WrongGroups, "groups")
def judge_groups(built: Mapping[str, RankLists], layout: Layout) -> Comparisons:
    """Decide whether the groups that a backend would build equal those of the layout, name by name.

    The order of groups and of ranks within a group is free. A name that the backend does not return is not judged;
    if it returns none, nothing is compared. Counts one element per rank and name.

    Raises:
        WrongGroups: a name is not of the layout, or a rank is in no group, in two groups or in a wrong group.
    """
    expected = _expected(layout)
    for name, groups in built.items():
        if name in expected:
            yield from _compare(name, groups, expected[name], layout)
        else:
            yield Comparison(None, Finding("name", f"unknown axis {name!r}; known: {', '.join(expected)}", ()))
    yield Note(lambda: _other_axis(built, expected))


def _expected(layout: Layout) -> dict[str, RankLists]:
    sizes = layout.sizes()
    lists = dict(reference_groups(**{axis: sizes[axis] for axis in ("world", "tp", "cp", "pp", "ep", "etp")}))
    return lists | {"expert_pp": lists["pp"]}


def _compare(name: str, built: RankLists, expected: RankLists, layout: Layout) -> Comparisons:
    """Yield whether the groups of one name are right, rank by rank."""
    for rank in range(layout.world):
        got = [tuple(sorted(group)) for group in built if rank in group]
        (right,) = (tuple(sorted(group)) for group in expected if rank in group)
        what = "no group" if not got else " and ".join(str(list(group)) for group in got)
        sentence = f"the {name} group of rank {rank} would be {what} instead of {list(right)} in {layout.name}"
        wrong = Finding(f"{name} of {len(got)}", sentence, (rank,))  # in no group, one, or several
        yield Comparison(rank, "" if got == [right] else wrong, elements=1)
    strangers = sorted({rank for group in built for rank in group} - set(range(layout.world)))
    if strangers:
        sentence = f"the {name} groups contain ranks {strangers}; the world has {layout.world}"
        yield Comparison(None, Finding(f"strangers in {name}", sentence, ()))


def _other_axis(built: Mapping[str, RankLists], expected: Mapping[str, RankLists]) -> str:
    """Return a note with the axes whose groups are returned under another axis' name."""
    said = []
    for name, groups in built.items():
        if name not in expected or _same(groups, expected[name]):
            continue
        alike = [other for other in expected if _same(groups, expected[other])]
        if alike:
            said.append(f"the {' or '.join(alike)} groups were returned as {name}")
    return f"; likely cause: {' and '.join(said)}" if said else ""


def _same(built: RankLists, expected: RankLists) -> bool:
    return sorted(tuple(sorted(group)) for group in built) == sorted(tuple(sorted(group)) for group in expected)
