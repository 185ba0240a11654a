# The methods have the arguments that torch.distributed passes; the stubs of ProcessGroup have further overloads.
# mypy: disable-error-code="override, assignment"
# ruff: noqa: D102
"""The process group of virtual ranks. Everything that depends on torch's internals is in this file.

Every thread has its own `ThreadLocalWorld` (of torch's threaded process group), so that `torch.distributed` works there
as in a separate process. The collectives are not torch's threaded ones, which copy data pair by pair and do not report
which ranks disagree.

All collectives, sends and receives of `torch.distributed` are supported; a send does not block. Not supported are
`split_group`, collectives of sparse tensors, `ReduceOp.PREMUL_SUM`, and calls that need a backend's name, such as
`monitored_barrier`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Work

from ..store import FOREVER
from .collectives import REDUCTIONS, Call
from .matching import GroupState, PendingOp, WorldState
from .recorder import MemoryRecorder

BACKEND = "virtual"


def install(world_state: WorldState) -> None:
    """Gives every thread of this process its own torch.distributed state, and registers the backend, permanently."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)  # waiting in a store would block all other ranks
    dist.distributed_c10d._world = ThreadLocalWorld()
    # Functional collectives find groups by name, and every thread has another group of the same name.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]

    def create(options: Any, _: object) -> VirtualGroup:
        members = tuple(options.global_ranks_in_group)
        rank = members[options.group_rank] if members else options.group_rank
        return VirtualGroup(options.group_rank, world_state.group_state(members, rank), str(options.group_id))

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def join(rank: int, world: int, store: HashStore) -> None:
    """Initialises the default process group of this thread."""
    torch.autograd.set_multithreading_enabled(False)  # runs a backward pass, on a GPU too, on the rank's thread
    hook = sys.excepthook
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world, timeout=FOREVER)
    sys.excepthook = hook  # init_process_group wraps it, and would for every rank


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Makes a process group; only its members call."""
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=FOREVER, use_local_synchronization=True)
    return made


class VirtualGroup(dist.ProcessGroup):
    """A process group, as one of its ranks holds it.

    No call blocks; the returned Work does. A rank that reads an output before `wait()` therefore reads the old
    contents, unless it was the last rank to call.
    """

    def __init__(self, group_rank: int, group_state: GroupState, name: str) -> None:
        super().__init__(group_rank, len(group_state.ranks))  # type: ignore[call-arg]
        self._group_rank, self._group_state, self._name = group_rank, group_state, name
        self._recorder = group_state.world_state.recorders[group_state.ranks[group_rank]]
        self._thread = threading.get_ident()
        self._coalesced: list[Work] | None = None  # between _start_coalescing and _end_coalescing

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group in its thread."""
        return self._name

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return BACKEND

    def __repr__(self) -> str:
        return f"<virtual group, rank {self._group_rank} of ranks {self._group_state.ranks}>"

    # ---- collectives, by the names that torch calls them ---------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        return self._collective(Call("barrier"), opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self._collective(Call("all_reduce", _reduction(opts), send=tensors, receive=tensors), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        call = Call("reduce", _reduction(opts), send=tensors, receive=tensors, root=opts.rootRank)
        return self._collective(call, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        return self._collective(Call("broadcast", send=tensors, receive=tensors, root=opts.rootRank), opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._collective(Call("all_gather", send=inputs, receive=outputs[0]), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._collective(Call("all_gather_into_tensor", send=[input], receive=[output]), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _CoalescedWork([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gathers tensor by tensor; `outputs[rank][number]` receives that rank's `inputs[number]`."""
        by_number = zip(*outputs, strict=True)
        return _CoalescedWork(
            [self.allgather([output], [input]) for output, input in zip(by_number, inputs, strict=True)]
        )

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Work:
        receive = outputs[0] if outputs else ()
        return self._collective(Call("gather", send=inputs, receive=receive, root=opts.rootRank), opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Work:
        send = inputs[0] if inputs else ()
        return self._collective(Call("scatter", send=send, receive=outputs, root=opts.rootRank), opts)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        return self._collective(Call("reduce_scatter", _reduction(opts), send=inputs[0], receive=outputs), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._collective(Call("reduce_scatter_tensor", _reduction(opts), send=[input], receive=[output]), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _CoalescedWork([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._collective(Call("all_to_all", send=inputs, receive=outputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        call = Call(
            "all_to_all_single",
            send=[input],
            receive=[output],
            send_rows=self._rows("input", input, input_split_sizes),
            receive_rows=self._rows("output", output, output_split_sizes),
        )
        return self._collective(call, opts)

    alltoall_base = all_to_all_single

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> Work:
        self._require_own_thread()
        number = self._recorder.message(
            "send", self._group_state.name, self._group_state.ranks, dstRank, tag, send=tensors
        )
        self._group_state.send(self._group_rank, dstRank, tag, tensors[0])
        return self._coalesce(_SendWork(self._recorder, number))

    def recv(self, tensors: Sequence[Tensor], srcRank: int | None, tag: int) -> Work:
        self._require_own_thread()
        number = self._recorder.message(
            "recv", self._group_state.name, self._group_state.ranks, srcRank, tag, receive=tensors
        )
        recv = self._group_state.receive(self._group_rank, srcRank, tag, tensors[0])
        return self._coalesce(_CollectiveWork(self._group_state, self._group_rank, recv, number, tensors))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        return self.recv(tensors, None, tag)

    # ---- coalescing ----------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        coalesced, self._coalesced = self._coalesced or [], None
        return _CoalescedWork(coalesced)

    def _coalesce(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # ---- common to all calls
    # ---------------------------------------------------------------------------------------------------

    def _collective(self, call: Call, opts: Any) -> Work:
        self._require_own_thread()
        for tensor in (*call.send, *call.receive):
            if tensor.layout is not torch.strided:
                raise NotImplementedError(f"virtual ranks have no {call.kind} of {tensor.layout} tensors")
        group_state, asynchronous = self._group_state, bool(getattr(opts, "asyncOp", False))
        number = self._recorder.collective(
            call, group_state.name, group_state.ranks, self._group_rank, asynchronous=asynchronous
        )
        return self._coalesce(
            _CollectiveWork(
                group_state, self._group_rank, group_state.collective(self._group_rank, call), number, call.receive
            )
        )

    def _rows(self, which: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Returns how many rows go to, or come from, each rank; without splits all have the same."""
        W, rows = len(self._group_state.ranks), tensor.shape[0]
        if not splits:
            if rows % W:
                raise ValueError(f"all_to_all_single: {rows} rows of {which} do not divide over {W} ranks")
            return [rows // W] * W
        if len(splits) != W or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: {which} splits of {len(splits)} entries that sum to {sum(splits)} "
                f"for {rows} rows and {W} ranks"
            )
        return list(splits)

    def _require_own_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a virtual rank communicates from its own thread only, not from one that it started")


class _CollectiveWork(Work):
    """The Work of a collective or of a receive."""

    def __init__(
        self, group_state: GroupState, group_rank: int, pending: PendingOp, number: int, results: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._group_state, self._group_rank, self._pending, self._number = group_state, group_rank, pending, number
        self._results = list(results)

    def wait(self, timeout: Any = None) -> bool:
        world_state = self._group_state.world_state
        world_state.wait(self._pending, self._group_rank)
        world_state.recorders[self._group_state.ranks[self._group_rank]].waited(self._number)
        return True

    def is_completed(self) -> bool:
        """Returns True if the call is complete; polling it never ends, since no other rank runs meanwhile."""
        return self._pending.done

    def is_success(self) -> bool:
        return self._pending.done and self._group_rank not in self._pending.errors

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits, and returns a completed future of what was received."""
        self.wait()
        return _done(self._results)

    def result(self) -> list[Tensor]:
        return self._results

    def source_rank(self) -> int:
        source: int = getattr(self._pending, "source", None) or 0
        return source

    _source_rank = source_rank


class _SendWork(Work):
    """The Work of a send, which never waits."""

    def __init__(self, recorders: MemoryRecorder, number: int) -> None:
        super().__init__()
        self._recorder, self._number = recorders, number

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.waited(self._number)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a completed future."""
        self.wait()
        return _done([])


class _CoalescedWork(Work):
    """The Work of several coalesced calls."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits, and returns a completed future of what was received."""
        self.wait()
        return _done(self.result())

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


def _done(results: list[Tensor]) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(results)
    return future


def _reduction(opts: Any) -> str:
    if opts is None:
        return "sum"
    operation = getattr(opts.reduceOp, "op", opts.reduceOp)
    name: str = operation.name.lower()
    if name not in REDUCTIONS:
        raise NotImplementedError(f"virtual ranks reduce by {', '.join(REDUCTIONS)}, not by {name}")
    return name
