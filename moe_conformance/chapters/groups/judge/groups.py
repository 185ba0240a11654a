"""Judge of the groups of ranks that a backend would build for a layout."""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.verdict import Tally, WrongGroups
from moe_conformance.reference.groups.members import groups as reference_groups


def judge_groups(built: Mapping[str, RankLists], layout: Layout, tally: Tally) -> None:
    """Decide whether the groups that a backend would build equal those of the layout, name by name.

    The order of groups and of ranks within a group is free. A name that the backend does not return is not judged;
    if it returns none, nothing is compared. Counts one element per rank and name.

    Raises:
        WrongGroups: a name is not of the layout, or a rank is in no group, in two groups or in a wrong group.
    """
    expected = _expected(layout)
    findings: list[Finding] = []
    for name, groups in built.items():
        if name not in expected:
            sentence = f"unknown axis {name!r}; known: {', '.join(expected)}"
            findings.append(Finding("name", sentence, ()))
            continue
        wrong = _wrong(name, groups, expected[name], layout)
        findings += wrong
        if not wrong:
            tally.add(elements=layout.world)
            tally.ranks.update(range(layout.world))
    if findings:
        fail(WrongGroups, "groups", findings, note=_other_axis(built, expected))


def _expected(layout: Layout) -> dict[str, RankLists]:
    sizes = layout.sizes()
    lists = dict(reference_groups(**{axis: sizes[axis] for axis in ("world", "tp", "cp", "pp", "ep", "etp")}))
    return lists | {"expert_pp": lists["pp"]}


def _wrong(name: str, built: RankLists, expected: RankLists, layout: Layout) -> list[Finding]:
    """Return a finding for every rank whose group of one name is wrong."""
    findings = []
    for rank in range(layout.world):
        got = [tuple(sorted(group)) for group in built if rank in group]
        (right,) = (tuple(sorted(group)) for group in expected if rank in group)
        if got == [right]:
            continue
        what = "no group" if not got else " and ".join(str(list(group)) for group in got)
        sentence = f"the {name} group of rank {rank} would be {what} instead of {list(right)} in {layout.name}"
        findings.append(Finding(f"{name} of {len(got)}", sentence, (rank,)))  # in no group, one, or several
    strangers = sorted({rank for group in built for rank in group} - set(range(layout.world)))
    if strangers:
        sentence = f"the {name} groups contain ranks {strangers}; the world has {layout.world}"
        findings.append(Finding(f"strangers in {name}", sentence, ()))
    return findings


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
