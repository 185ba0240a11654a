"""Holds the ledgers of all ranks of a job against each other.

On every group all ranks must make the same collectives in the same order, and of each it must be true that what one
rank gives another is what that one takes. Transports do not see to it: a rank that expects more than it is sent may be
left with whatever its memory held.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from .disagreement import Disagreement, blamed_of_classes, counted
from .entry import Entry, group_words
from .send_recv import check_send_recv
from .sizes import check_sizes

_Group = tuple[str, tuple[int, ...]]  # its name and its ranks


def cross_check(ledgers: Mapping[int, Sequence[Entry]], cut: Collection[int] = ()) -> tuple[Disagreement, ...]:
    """Returns where the ranks disagree, the earliest first; those after it are often its consequences.

    Args:
        ledgers: Every rank's calls in order. Ranks that are not among the keys are not judged.
        cut: Ranks that did not come to the end of their work: that they lack a call says nothing.
    """
    groups: dict[_Group, dict[int, list[Entry]]] = defaultdict(dict)
    messages: list[tuple[int, Entry]] = []
    for rank, entries in ledgers.items():
        for entry in entries:
            if entry.sequence is None:
                messages.append((rank, entry))
            else:
                groups[entry.group, entry.ranks].setdefault(rank, []).append(entry)
    found: list[Disagreement] = []
    for (_, ranks), calls in groups.items():
        members = {rank: calls.get(rank, []) for rank in ranks if rank in ledgers}
        found += _check_group(ranks, members, cut)
    found += check_send_recv(messages, cut)
    return tuple(sorted(found, key=lambda one: _when(one, found)))


def _when(one: Disagreement, found: Sequence[Disagreement]) -> tuple[int, int, int]:
    """Orders by how many came before, then by how early the ranks came to it, then by how sure the blame is."""
    before = sum(_precedes(other, one) and not _precedes(one, other) for other in found)
    return before, min(one.orders.values()), len(one.blamed)


def _precedes(one: Disagreement, other: Disagreement) -> bool:
    """Tells whether a rank came to one before the other; it has come to its end where it lacks a call."""
    later = {**other.orders, **dict.fromkeys(other.absent, math.inf)}
    return any(order < later[rank] for rank, order in one.orders.items() if rank in later)


def _check_group(
    ranks: tuple[int, ...], members: Mapping[int, Sequence[Entry]], cut: Collection[int]
) -> Iterable[Disagreement]:
    for index in range(max(map(len, members.values()))):
        made = {rank: entries[index] for rank, entries in members.items() if index < len(entries)}
        absent = [rank for rank in members if rank not in made and rank not in cut]
        if absent or len({entry.op for entry in made.values()}) > 1:
            yield _other_calls(ranks, index + 1, made, absent)
            return  # whatever follows on this group is shifted
        yield from check_sizes(ranks, index + 1, made)


def _other_calls(
    ranks: tuple[int, ...], sequence: int, made: Mapping[int, Entry], absent: Sequence[int]
) -> Disagreement:
    """Describes a call for which some ranks make another one, or none."""
    ops = {rank: entry.op for rank, entry in made.items()} | dict.fromkeys(absent, "")
    classes = Counter(ops.values())
    said = "; ".join(_said(op, [rank for rank in sorted(ops) if ops[rank] == op]) for op, _ in classes.most_common())
    return Disagreement(
        ranks=ranks,
        op=next(iter(classes.most_common(1)))[0] or next(iter(made.values())).op,
        sequence=sequence,
        blamed=blamed_of_classes(ops),
        orders={rank: entry.order for rank, entry in made.items()},
        words=f"on {group_words(ranks)} call {sequence}: {said}",
        absent=tuple(absent),
    )


def _said(op: str, ranks: Sequence[int]) -> str:
    who, one = counted(ranks)
    if not op:
        return f"{who} {'makes' if one else 'make'} no such call"
    return f"{who} {'calls' if one else 'call'} {op}"
