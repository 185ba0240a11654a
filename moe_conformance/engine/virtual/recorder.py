"""Records the ledger of a virtual rank: the same entries as a real rank's, kept in memory.

It is lost if a rank ends the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..ledger.entry import MOST_CALLS, Entry
from ..ledger.recorder import caller
from .collectives import Call


class MemoryRecorder:
    """Records the first MOST_CALLS calls of one virtual rank in the job that runs."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Discards the entries; called before a job."""
        self._calls = 0
        self._entries: list[Entry] = []
        self._waited: set[int] = set()
        self._sequences: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def collective(self, call: Call, group: str, ranks: tuple[int, ...], group_rank: int, *, asynchronous: bool) -> int:
        """Records a collective of the rank with that group rank, and returns its order."""
        self._sequences[group, ranks] += 1
        send, receive = call.send, call.receive
        if call.kind == "broadcast" and group_rank == call.root:
            receive = ()
        elif call.kind == "broadcast":
            send = ()
        elif call.kind == "reduce" and group_rank != call.root:
            receive = ()
        return self._note(
            call.kind,
            group,
            ranks,
            self._sequences[group, ranks],
            send,
            receive,
            in_splits=tuple(call.send_rows) or None,
            out_splits=tuple(call.receive_rows) or None,
            reduce=call.reduction.upper() or None,
            root=None if call.root is None else ranks[call.root],
            asynchronous=asynchronous,
        )

    def message(
        self,
        op: str,
        group: str,
        ranks: tuple[int, ...],
        peer: int | None,
        tag: int,
        *,
        send: Sequence[Tensor] = (),
        receive: Sequence[Tensor] = (),
    ) -> int:
        """Records a send or receive and returns its order."""
        to = None if peer is None else ranks[peer]
        return self._note(op, group, ranks, None, send, receive, peer=to, tag=tag, asynchronous=True)

    def waited(self, number: int) -> None:
        """Records that a call was waited for."""
        self._waited.add(number)

    def calls(self) -> int:
        """Returns how many calls were made."""
        return self._calls

    def entries(self) -> tuple[Entry, ...]:
        """Returns all entries."""
        return tuple(
            replace(entry, state="waited") if entry.order in self._waited else entry for entry in self._entries
        )

    def _note(
        self,
        op: str,
        group: str,
        ranks: tuple[int, ...],
        sequence: int | None,
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        *,
        in_splits: tuple[int, ...] | None = None,
        out_splits: tuple[int, ...] | None = None,
        reduce: str | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int | None = None,
        asynchronous: bool,
    ) -> int:
        order = self._calls
        self._calls += 1
        if order >= MOST_CALLS:
            return order
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in (*send, *receive))
        self._entries.append(
            Entry(
                order=order,
                op=op,
                group=group,
                ranks=ranks,
                sequence=sequence,
                in_splits=in_splits,
                out_splits=out_splits,
                shapes_in=tuple(tuple(tensor.shape) for tensor in send),
                shapes_out=tuple(tuple(tensor.shape) for tensor in receive),
                dtype=" to ".join(dtypes),
                bytes_in=sum(tensor.nbytes for tensor in send),
                bytes_out=sum(tensor.nbytes for tensor in receive),
                reduce=reduce,
                root=root,
                peer=peer,
                tag=tag,
                asynchronous=asynchronous,
                where=caller(),
            )
        )
        return order
