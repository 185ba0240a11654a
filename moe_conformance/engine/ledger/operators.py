"""The dispatcher operators of torch.distributed, one of which every collective calls, and their arguments.

All methods of a process group call one of these operators of the dispatcher, also for functional collectives and their
gradients. Arguments are found by name in the schemas, which differ between versions of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

# The operator's name in the schema, the public name, the names of the input and output arguments.
_OPERATORS = (
    ("allreduce_", "all_reduce", "tensors", "tensors"),
    ("allreduce_coalesced_", "all_reduce_coalesced", "tensors", "tensors"),
    ("broadcast_", "broadcast", "tensors", "tensors"),
    ("reduce_", "reduce", "tensors", "tensors"),
    ("allgather_", "all_gather", "input_tensors", "output_tensors"),
    ("_allgather_base_", "all_gather_into_tensor", "input_tensor", "output_tensor"),
    ("allgather_coalesced_", "all_gather_coalesced", "input_list", "output_lists"),
    ("allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced", "inputs", "outputs"),
    ("reduce_scatter_", "reduce_scatter", "input_tensors", "output_tensors"),
    ("_reduce_scatter_base_", "reduce_scatter_tensor", "input_tensor", "output_tensor"),
    ("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced", "inputs", "outputs"),
    ("gather_", "gather", "input_tensors", "output_tensors"),
    ("scatter_", "scatter", "input_tensors", "output_tensors"),
    ("alltoall_base_", "all_to_all_single", "input", "output"),
    ("alltoall_", "all_to_all", "input_tensors", "output_tensors"),
    ("send", "send", "tensors", None),
    ("recv_", "recv", None, "tensors"),
    ("recv_any_source_", "recv", None, "tensors"),
    ("barrier", "barrier", None, None),
    ("monitored_barrier_", "monitored_barrier", None, None),
)


class Group(NamedTuple):
    """The properties of a process group that the ledger needs."""

    name: str
    ranks: tuple[int, ...]  # global ranks, by group rank
    rank: int  # global rank of this process
    coalesces: bool = False  # calls are being coalesced: only all of them together have a handle


class Call(NamedTuple):
    """The arguments of one call of an operator; see Entry."""

    op: str
    group: Group
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    in_splits: Sequence[int] | None
    out_splits: Sequence[int] | None
    reduce: str | None
    root: int | None
    peer: int | None
    tag: int | None
    asynchronous: bool


class Groups:
    """Caches the properties of process groups, which torch computes slowly."""

    def __init__(self) -> None:
        self._known: dict[str, Group] = {}
        self._coalescing = dist.distributed_c10d._world.pg_coalesce_state

    def find(self, boxed: Any) -> Group:
        """Returns the group that is in an operator's argument."""
        group = ProcessGroup.unbox(boxed)
        name = group.group_name
        known = self._known.get(name)
        if known is None:
            ranks = ranks_of(group)
            known = self._known[name] = Group(name, ranks, ranks[group.rank()])
        return known._replace(coalesces=True) if self._coalescing and group in self._coalescing else known


class Operator:
    """One operator: its overload, its public name, and the positions of its arguments."""

    def __init__(self, schema_name: str, op: str, given: str | None, got: str | None) -> None:
        self.schema_name = schema_name
        self.overload: Any = getattr(torch.ops.c10d, schema_name).default
        self.op = op
        at = {argument.name: position for position, argument in enumerate(self.overload._schema.arguments)}
        self.given_at = at[given] if given else None
        self.got_at = at[got] if got else None
        self._returns_output = len(self.overload._schema.returns) == 2
        self._group_at = at["process_group"]
        self._async_at = at.get("async_op")
        self._reduce_at = at.get("reduce_op")
        self._splits_at = (
            (at["input_split_sizes"], at["output_split_sizes"]) if schema_name == "alltoall_base_" else None
        )
        self._root_at = at.get("root_rank")
        self._peer_at = at.get("dst", at.get("src"))
        self._tag_at = at.get("tag")

    def read(self, args: tuple[Any, ...], groups: Groups) -> Call:
        """Returns the arguments of one call; trailing arguments with defaults may be missing."""
        group = groups.find(args[self._group_at])
        inputs = () if self.given_at is None else _flat(args[self.given_at])
        outputs = () if self.got_at is None else _flat(args[self.got_at])
        in_splits = out_splits = reduce = root = peer = tag = None
        if self._splits_at is not None:
            in_splits, out_splits = args[self._splits_at[0]] or None, args[self._splits_at[1]] or None
        if self._reduce_at is not None:
            reduce = _reduce_name(args[self._reduce_at].op())
        if self._root_at is not None:
            root = group.ranks[args[self._root_at]]
            inputs, outputs = self._with_root(inputs, outputs, at_root=group.rank == root)
        if self._tag_at is not None:
            tag = args[self._tag_at]
            peer = None if self._peer_at is None else group.ranks[args[self._peer_at]]
        asynchronous = not group.coalesces and self._gives_handle(args)
        return Call(self.op, group, inputs, outputs, in_splits, out_splits, reduce, root, peer, tag, asynchronous)

    def work(self, result: Any) -> Work | None:
        """Returns the Work in the operator's result; None if the call was blocking."""
        boxed = result[1] if self._returns_output else result
        return None if boxed is None else Work.unbox(boxed)

    def result(self, args: tuple[Any, ...], work: Work) -> Any:
        """Returns the operator's result for the given arguments and Work."""
        if not self._returns_output:
            return work.boxed()
        assert self.got_at is not None, self.schema_name
        return args[self.got_at], work.boxed()

    def _with_root(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, at_root: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Drops the tensors that the operator ignores: on the root, or on all other ranks."""
        if self.op == "broadcast":
            return (inputs, ()) if at_root else ((), outputs)
        if self.op in ("reduce", "gather"):
            return inputs, (outputs if at_root else ())
        return (inputs if at_root else ()), outputs  # scatter

    def _gives_handle(self, args: tuple[Any, ...]) -> bool:
        if self.op == "monitored_barrier":
            return False
        at = self._async_at
        return at is None or at >= len(args) or bool(args[at])  # the default is True


def operators() -> list[Operator]:
    """Returns the operators that this version of torch has."""
    return [Operator(*operator) for operator in _OPERATORS if hasattr(torch.ops.c10d, operator[0])]


def functional_overloads() -> list[Any]:
    """Returns the functional operators that issue a collective; their callers get no Work."""
    names = (
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("_c10d_functional::")
    )
    return [getattr(torch.ops._c10d_functional, name).default for name in sorted(names) if name != "wait_tensor"]


def _flat(tensors: Any) -> Sequence[torch.Tensor]:
    """Returns a tensor, a list of tensors, or a list of such lists as one sequence."""
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    if tensors and isinstance(tensors[0], torch.Tensor):
        return tensors  # type: ignore[no-any-return]
    return [tensor for inner in tensors for tensor in inner]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the global ranks of a process group, by group rank."""
    # None if the group was not made by torch.distributed.
    known = dist.distributed_c10d._world.pg_group_ranks.get(group)
    return tuple(range(group.size()) if known is None else known)


@cache
def _reduce_name(number: int) -> str:
    return dist.ReduceOp.RedOpType(number).name
