"""Compares the ledgers of all ranks of a job.

On every group all ranks must call the same collectives in the same order, and in every collective a rank must send
another rank as much as that rank expects. Transports do not check this: a rank that expects more than it is sent may
continue with uninitialised memory.
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
    """Returns the disagreements of the ranks, the earliest first; later ones are often its consequences.

    Args:
        ledgers: Every rank's calls in order. Ranks without a key are not compared.
        cut: Ranks that did not complete their job: a call that they lack is no disagreement.
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
    """Returns the sort key of a disagreement: how many precede it, its least order, how many ranks it blames."""
    before = sum(_precedes(other, one) and not _precedes(one, other) for other in found)
    return before, min(one.orders.values()), len(one.blamed)


def _precedes(one: Disagreement, other: Disagreement) -> bool:
    """Returns True if a rank called one before the other; an absent call comes after all others."""
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
            return  # all later calls on this group are shifted
        yield from check_sizes(ranks, index + 1, made)


def _other_calls(
    ranks: tuple[int, ...], sequence: int, made: Mapping[int, Entry], absent: Sequence[int]
) -> Disagreement:
    """Returns the disagreement about a call that some ranks omit or replace by another operator."""
    ops = {rank: entry.op for rank, entry in made.items()} | dict.fromkeys(absent, "")
    classes = Counter(ops.values())
    phrases = []
    for op, _ in classes.most_common():
        phrases.append(_phrase(op, [rank for rank in sorted(ops) if ops[rank] == op]))
    return Disagreement(
        ranks=ranks,
        op=next(iter(classes.most_common(1)))[0] or next(iter(made.values())).op,
        sequence=sequence,
        blamed=blamed_of_classes(ops),
        orders={rank: entry.order for rank, entry in made.items()},
        words=f"on {group_words(ranks)} call {sequence}: {'; '.join(phrases)}",
        absent=tuple(absent),
    )


def _phrase(op: str, ranks: Sequence[int]) -> str:
    who, one = counted(ranks)
    if not op:
        return f"{who} {'makes' if one else 'make'} no such call"
    return f"{who} {'calls' if one else 'call'} {op}"
