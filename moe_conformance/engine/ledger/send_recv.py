"""Checks that every message that a rank sends is received, and every message it expects is sent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from .disagreement import Disagreement
from .entry import Entry, group_words

# Name and ranks of the group, source, destination, tag.
_Route = tuple[str, tuple[int, ...], int | None, int, int | None]


def check_send_recv(calls: Iterable[tuple[int, Entry]], cut: Collection[int]) -> Iterable[Disagreement]:
    """Yields the first disagreement of every route; `calls` are sends and receives with their ranks."""
    sent: dict[_Route, list[Entry]] = defaultdict(list)
    received: dict[_Route, list[Entry]] = defaultdict(list)
    from_any: set[_Route] = set()
    for rank, entry in calls:
        if entry.op == "send":
            sent[entry.group, entry.ranks, rank, entry.peer or 0, entry.tag].append(entry)
        else:
            received[entry.group, entry.ranks, entry.peer, rank, entry.tag].append(entry)
            if entry.peer is None:
                from_any.add((entry.group, entry.ranks, None, rank, entry.tag))
    sent, received = _unite(sent, from_any), _unite(received, from_any)
    for route in dict.fromkeys((*sent, *received)):
        found = _check_route(route, sent.get(route, []), received.get(route, []), cut)
        if found is not None:
            yield found


def _unite(routes: dict[_Route, list[Entry]], from_any: set[_Route]) -> dict[_Route, list[Entry]]:
    """Merges all routes to a rank that receives from any source: which message goes where is not recorded."""
    united: dict[_Route, list[Entry]] = defaultdict(list)
    for (name, ranks, _source, to, tag), entries in routes.items():
        anybody = (name, ranks, None, to, tag)
        united[anybody if anybody in from_any else (name, ranks, _source, to, tag)] += entries
    return united


def _check_route(
    route: _Route, sent: Sequence[Entry], received: Sequence[Entry], cut: Collection[int]
) -> Disagreement | None:
    _, ranks, source, to, _ = route
    who = "some rank" if source is None else f"rank {source}"
    if source is not None:
        for number, (send, receive) in enumerate(zip(sent, received, strict=False), 1):
            if _content(send) != _content(receive):
                said = f"{who} sends {_content(send)} to rank {to}, which expects {_content(receive)}"
                return _found(route, number, {source: send.order, to: receive.order}, said)
    number = min(len(sent), len(received)) + 1
    if len(sent) > len(received) and to not in cut:
        late = sent[number - 1]
        orders = {source: late.order} if source is not None else {to: received[-1].order if received else 0}
        return _found(route, number, orders, f"{who} sends {_content(late)} to rank {to}, which never receives it")
    if len(received) > len(sent) and not (set(cut) & ({source} if source is not None else {*ranks})):
        waiting = received[number - 1]
        said = f"rank {to} waits for {_content(waiting)} from {who}, which never sends it"
        return _found(route, number, {to: waiting.order}, said)
    return None


def _found(route: _Route, number: int, orders: dict[int, int], said: str) -> Disagreement:
    _, ranks, source, to, tag = route
    return Disagreement(
        ranks=ranks,
        op="send",
        sequence=None,
        blamed=(to,) if source is None else tuple(sorted((source, to))),
        orders=orders,
        words=f"on {group_words(ranks)} message {number} with tag {tag}: {said}",
    )


def _content(entry: Entry) -> str:
    elements = sum(math.prod(shape) for shape in (*entry.shapes_in, *entry.shapes_out))
    return f"{elements} {'element' if elements == 1 else 'elements'} of {entry.dtype}"
