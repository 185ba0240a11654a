"""Performs collectives on the tensors of all ranks of a group, and reports calls that do not match.

All data is copied in the thread of the rank that called last. A reduction adds in the order of ranks, in float32 at
least: virtual ranks test index arithmetic, not the rounding of a transport.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .mismatch import MismatchError, Pair, different, disagree, elements, short


@dataclass(frozen=True)
class Call:
    """One rank's arguments of a collective.

    Attributes:
        kind: The public name of the collective.
        reduction: One of REDUCTIONS; "" if nothing is reduced.
        send: Input tensors; a rank that is not the root may have none.
        receive: Output tensors.
        send_rows: Rows of the one tensor in `send` for every rank.
        receive_rows: Rows of the one tensor in `receive` from every rank.
        root: The group rank of the root, if there is one.
    """

    kind: str
    reduction: str = ""
    send: Sequence[Tensor] = ()
    receive: Sequence[Tensor] = ()
    send_rows: Sequence[int] = ()
    receive_rows: Sequence[int] = ()
    root: int | None = None

    def title(self, ranks: Sequence[int]) -> str:
        """Returns what all ranks must call alike, for example `reduce (sum, root 3)`; `ranks` are the group's."""
        root = "" if self.root is None else f"root {ranks[self.root]}"
        details = ", ".join(part for part in (self.reduction, root) if part)
        return f"{self.kind} ({details})" if details else self.kind


@torch.no_grad()
def perform(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Performs a collective, from the calls of all ranks of a group; `ranks` are their world ranks.

    Raises:
        MismatchError: the calls differ, or a rank sends something else than another expects.
    """
    titles = [call.title(ranks) for call in calls]
    if len(set(titles)) > 1:
        raise different(titles, ranks)
    _PERFORM[calls[0].kind](calls, ranks)


def check_message(sent: Tensor, expected: Tensor, source: int, target: int) -> None:
    """Raises if a received message has another size or dtype than expected; group ranks 0 and 1 are blamed.

    Raises:
        MismatchError: the number of elements or the dtype differs.
    """
    if (sent.numel(), sent.dtype) != (expected.numel(), expected.dtype):
        pair = Pair(0, 1, elements(sent), elements(expected))
        raise disagree("send", [pair], {0: source, 1: target})


# ---- the collectives ---------------------------------------------------------------------------------------------


def _barrier(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Does nothing: a barrier has no data."""


def _all_to_all_single(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies blocks of rows from (source, target) order to (target, source) order, all at once."""
    sent_WW = torch.tensor([list(call.send_rows) for call in calls])  # [source, target]
    expected_WW = torch.tensor([list(call.receive_rows) for call in calls]).T
    if not torch.equal(sent_WW, expected_WW):
        raise disagree("all_to_all_single", _row_pairs(sent_WW, expected_WW), ranks)
    rows = [_as_rows(call.send[0], sum(call.send_rows)) for call in calls]
    _check_widths("all_to_all_single", rows, calls, ranks)
    total = int(sent_WW.sum())
    if not total:
        return
    all_rows = torch.cat([block for block in rows if block.numel()])
    first_WW = (sent_WW.reshape(-1).cumsum(0) - sent_WW.reshape(-1)).reshape(sent_WW.shape)  # first row of every block
    size_B, first_B = sent_WW.T.reshape(-1), first_WW.T.reshape(-1)  # blocks in the order of their targets
    shift_B = first_B - (size_B.cumsum(0) - size_B)
    order_R = (torch.arange(total) + shift_B.repeat_interleave(size_B)).to(all_rows.device)
    arriving = order_R.split(sent_WW.sum(0).tolist())
    for call, order in zip(calls, arriving, strict=True):
        if len(order):
            result = all_rows.index_select(0, order)
            call.receive[0].detach().copy_(result.reshape(call.receive[0].shape))


def _all_to_all(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies tensor `target` of every source to tensor `source` of that target."""
    _exchange(
        [
            (source, target, calls[source].send[target], calls[target].receive[source])
            for target in range(len(calls))
            for source in range(len(calls))
        ],
        calls,
        ranks,
    )


def _all_gather(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies every rank's tensor to all ranks; their shapes may differ."""
    _exchange(
        [
            (source, target, calls[source].send[0], calls[target].receive[source])
            for target in range(len(calls))
            for source in range(len(calls))
        ],
        calls,
        ranks,
    )


def _all_gather_single(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies all ranks' tensors, concatenated, to all ranks."""
    _require_alike(calls, [call.send[0] for call in calls], ranks)
    gathered = torch.cat([call.send[0].reshape(-1) for call in calls])
    _require_size("all_gather_into_tensor", calls, [call.receive[0] for call in calls], gathered.numel(), ranks)
    for call in calls:
        call.receive[0].detach().copy_(gathered.reshape(call.receive[0].shape))


def _all_reduce(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Reduces tensor by tensor, and copies the result to all ranks."""
    for reduced, targets in _reduced(calls, ranks):
        for target in targets:
            target.detach().copy_(reduced)


def _reduce(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Reduces tensor by tensor, and copies the result to the root."""
    for reduced, targets in _reduced(calls, ranks):
        targets[_root(calls)].detach().copy_(reduced)


def _reduce_scatter(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Reduces tensor `target` of all ranks, and copies the result to that target."""
    for target, call in enumerate(calls):
        parts = [other.send[target] for other in calls]
        _require_alike(calls, [*parts[:target], call.receive[0], *parts[target + 1 :]], ranks)
        _require_alike(calls, parts, ranks)
        call.receive[0].detach().copy_(_total(call.reduction, parts).reshape(call.receive[0].shape))


def _reduce_scatter_single(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Reduces the ranks' tensors, and copies an equal chunk of the result to each rank, in order."""
    W = len(calls)
    _require_alike(calls, [call.send[0] for call in calls], ranks)
    numel = calls[0].send[0].numel()
    if numel % W:
        sentence = f"reduce_scatter_tensor: {numel} elements do not divide over {W} ranks"
        raise MismatchError(sentence, frozenset(range(W)))
    _require_size("reduce_scatter_tensor", calls, [call.receive[0] for call in calls], numel // W, ranks)
    shares = _total(calls[0].reduction, [call.send[0] for call in calls]).reshape(-1).chunk(W) if numel else ()
    for call, share in zip(calls, shares):  # noqa: B905 - no chunks of an empty tensor
        call.receive[0].detach().copy_(share.reshape(call.receive[0].shape))


def _broadcast(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies the root's tensors to all ranks."""
    root = _root(calls)
    for number, source in enumerate(calls[root].send):
        _exchange(
            [(root, target, source, call.receive[number]) for target, call in enumerate(calls) if target != root],
            calls,
            ranks,
        )


def _scatter(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies one of the root's tensors to each rank."""
    root = _root(calls)
    _exchange(
        [(root, target, calls[root].send[target], call.receive[0]) for target, call in enumerate(calls)],
        calls,
        ranks,
    )


def _gather(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies every rank's tensor to the root."""
    root = _root(calls)
    _exchange(
        [(source, root, call.send[0], calls[root].receive[source]) for source, call in enumerate(calls)],
        calls,
        ranks,
    )


_PERFORM: Mapping[str, Callable[[Sequence[Call], Sequence[int]], None]] = {
    "barrier": _barrier,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_single,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_single,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
}

# ---- reductions --------------------------------------------------------------------------------------------------

_Reduction = Callable[[Tensor, Tensor], Tensor]

_REDUCTIONS: Mapping[str, _Reduction] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

REDUCTIONS = tuple(_REDUCTIONS)


def _reduced(calls: Sequence[Call], ranks: Sequence[int]) -> list[tuple[Tensor, list[Tensor]]]:
    """Returns, for each tensor of the call, its reduction over all ranks and the ranks' outputs for it."""
    counts = {len(call.send) for call in calls}
    if len(counts) > 1:
        raise different([f"{call.title(ranks)} of {len(call.send)} tensors" for call in calls], ranks)
    found = []
    for number in range(counts.pop()):
        parts = [call.send[number] for call in calls]
        _require_alike(calls, parts, ranks)
        found.append((_total(calls[0].reduction, parts), [call.receive[number] for call in calls]))
    return found


def _total(reduction: str, parts: Sequence[Tensor]) -> Tensor:
    combine = _REDUCTIONS[reduction]
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].detach().to(wide, copy=True)
    for part in parts[1:]:
        total = combine(total, part.detach().to(total.device).reshape(total.shape))
    if reduction == "avg":
        total = total / len(parts) if dtype.is_floating_point else total // len(parts)
    return total.to(dtype)


# ---- checks of sizes -----------------------------------------------------------------------------------------------


def _exchange(moves: Sequence[tuple[int, int, Tensor, Tensor]], calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Copies each (source, target, sent, received), if the sizes of all match."""
    wrong = [
        Pair(source, target, elements(sent), elements(received))
        for source, target, sent, received in moves
        if sent.numel() != received.numel() or sent.dtype != received.dtype
    ]
    if wrong:
        raise disagree(calls[0].kind, wrong, ranks)
    for _, _, sent, received in moves:
        received.detach().copy_(sent.detach().reshape(received.shape))


def _root(calls: Sequence[Call]) -> int:
    root = calls[0].root
    assert root is not None
    return root


def _as_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.detach().reshape(rows, -1) if rows else tensor.detach().reshape(0, 0)


def _check_widths(kind: str, rows: Sequence[Tensor], calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """Raises if rows, sent or expected, differ in width or dtype; a rank without rows cannot be wrong."""
    titles_by_rank: list[set[str]] = []
    for sent, call in zip(rows, calls, strict=True):
        received = _as_rows(call.receive[0], sum(call.receive_rows))
        titles_by_rank.append(
            {f"{kind} with rows of {t.shape[1]} elements of {short(t.dtype)}" for t in (sent, received) if t.shape[0]}
        )
    counts = Counter(itertools.chain.from_iterable(titles_by_rank))
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        raise different([" and ".join(sorted(titles)) or usual for titles in titles_by_rank], ranks)


def _require_alike(calls: Sequence[Call], tensors: Sequence[Tensor], ranks: Sequence[int]) -> None:
    if len({(tensor.numel(), tensor.dtype) for tensor in tensors}) > 1:
        titles = [f"{call.title(ranks)} of {elements(tensor)}" for call, tensor in zip(calls, tensors, strict=True)]
        raise different(titles, ranks)


def _require_size(
    kind: str, calls: Sequence[Call], tensors: Sequence[Tensor], numel: int, ranks: Sequence[int]
) -> None:
    wrong = [group_rank for group_rank, tensor in enumerate(tensors) if tensor.numel() != numel]
    if wrong:
        sentence = f"{kind}: rank {ranks[wrong[0]]} expects {tensors[wrong[0]].numel()} elements and gets {numel}"
        raise MismatchError(sentence, frozenset(wrong))


def _rows_in_words(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def _row_pairs(sent_WW: Tensor, expected_WW: Tensor) -> list[Pair]:
    return [
        Pair(source, target, _rows_in_words(int(sent_WW[source, target])), str(int(expected_WW[source, target])))
        for source, target in (sent_WW != expected_WW).nonzero().tolist()
    ]
