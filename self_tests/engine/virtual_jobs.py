"""Functions that the tests run on virtual ranks, and on real ranks for comparison."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_conformance.engine import RankContext

# Torch has renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _rows(context: RankContext, *shape: int) -> Tensor:
    """Numbers that no other rank has, small enough that sums are exact."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size, dtype=torch.float64) + 100 * context.rank).reshape(shape)


# ---- collectives: the same on real ranks and on virtual ones -----------------------------------------------------


def uneven_all_to_all(context: RankContext, payload: Any) -> Tensor:
    """Rank r sends (r + 2 s) % 4 rows to rank s; with 0 rows in some places."""
    W, r = context.world, context.rank
    sent = [(r + 2 * s) % 4 for s in range(W)]
    received = [(s + 2 * r) % 4 for s in range(W)]
    result = torch.empty(sum(received), 3, dtype=torch.float64)
    dist.all_to_all_single(result, _rows(context, sum(sent), 3), received, sent)
    return result


def even_all_to_all(context: RankContext, payload: Any) -> Tensor:
    """Without splits, and to the partners of a group only."""
    group = context.groups["pairs"]
    result = torch.empty(4, dtype=torch.int64)
    dist.all_to_all_single(result, _rows(context, 4).long(), group=group)
    return result


def nothing_to_all(context: RankContext, payload: Any) -> Tensor:
    """All splits are 0."""
    W = context.world
    result = torch.empty(0, 3)
    dist.all_to_all_single(result, torch.empty(0, 3), [0] * W, [0] * W)
    return result


def gathers(context: RankContext, payload: Any) -> list[Tensor]:
    """All of gather and scatter."""
    W, r = context.world, context.rank
    own = _rows(context, 2)
    listed = [torch.empty(2, dtype=torch.float64) for _ in range(W)]
    dist.all_gather(listed, own)
    together = torch.empty(2 * W, dtype=torch.float64)
    _all_gather(together, own)
    at_root = [torch.empty(2, dtype=torch.float64) for _ in range(W)] if r == 1 else None
    dist.gather(own, at_root, dst=1)
    share = torch.empty(3, dtype=torch.float64)
    dist.scatter(share, list(_rows(context, W, 3)) if r == 1 else None, src=1)
    return [*listed, together, *(at_root or []), share]


def reductions(context: RankContext, payload: Any) -> list[Tensor]:
    """All of reduce, with several operations and dtypes."""
    W = context.world
    found = []
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = _rows(context, 3) + 1
        dist.all_reduce(tensor, operation)
        found.append(tensor)
    for tensor in (_rows(context, 3).long(), _rows(context, 3).to(torch.bfloat16)):
        dist.all_reduce(tensor, group=context.groups["pairs"])
        found.append(tensor)
    masks = torch.tensor([1 << context.rank % 8, 7])
    dist.all_reduce(masks, dist.ReduceOp.BOR)
    at_root = _rows(context, 3)
    dist.reduce(at_root, dst=W - 1)
    found += [masks, *([at_root] if context.rank == W - 1 else [])]
    share, alone = torch.empty(3, dtype=torch.float64), torch.empty(3, dtype=torch.float64)
    dist.reduce_scatter(share, list(_rows(context, W, 3)))
    _reduce_scatter(alone, _rows(context, W * 3))
    return [*found, share, alone]


def lists_and_objects(context: RankContext, payload: Any) -> list[Any]:
    """Lists of tensors, broadcasts and pickled objects."""
    W, r = context.world, context.rank
    outputs = [torch.empty(s + r + 1, dtype=torch.float64) for s in range(W)]
    inputs = [_rows(context, s + r + 1) for s in range(W)]
    if dist.get_backend() != "gloo":  # which has no all-to-all of lists
        dist.all_to_all(outputs, inputs)
    else:
        works = [dist.isend(inputs[s], s) for s in range(W) if s != r]
        works += [dist.irecv(outputs[s], s) for s in range(W) if s != r]
        for work in works:
            work.wait()
        outputs[r].copy_(inputs[r])
    told = _rows(context, 2)
    dist.broadcast(told, src=1)
    everybody: list[Any] = [None] * W
    dist.all_gather_object(everybody, {"rank": r, "words": "x" * r})
    objects = [r, r + 1]
    dist.broadcast_object_list(objects, src=1)
    dist.barrier()
    return [outputs, told, everybody, objects]


def messages(context: RankContext, payload: Any) -> list[Tensor]:
    """Messages around a ring: blocking, not blocking, in a batch, and from anybody."""
    W, r = context.world, context.rank
    after, before = (r + 1) % W, (r - 1) % W
    found = [torch.empty(2, dtype=torch.float64) for _ in range(3)]
    sending = dist.isend(_rows(context, 2), after)
    dist.recv(found[0], before)
    sending.wait()
    receiving = dist.irecv(found[1], before, tag=3)
    dist.send(_rows(context, 2) + 1, after, tag=3)
    receiving.wait()
    batch = [dist.P2POp(dist.irecv, found[2], before), dist.P2POp(dist.isend, _rows(context, 2) + 2, after)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    anybody = torch.empty(2, dtype=torch.float64)
    if r == 0:
        found.append(torch.tensor(sorted(dist.recv(anybody) for _ in range(W - 1))))
    else:
        dist.send(_rows(context, 2), 0)
    return found


def asynchronous(context: RankContext, payload: Any) -> list[Tensor]:
    """Two groups in an order that differs between ranks, waited for late."""
    own, pair = _rows(context, 2), _rows(context, 2) + 7
    steps = [
        lambda: dist.all_reduce(own, async_op=True),
        lambda: dist.all_reduce(pair, group=context.groups["pairs"], async_op=True),
    ]
    works = [step() for step in (steps if context.rank % 4 < 2 else reversed(steps))]
    for work in works:
        work.wait()
    return [own, pair]


def backward_through_collectives(context: RankContext, payload: Any) -> list[Tensor]:
    """Gradients through functional collectives with uneven splits, and through `torch.distributed.nn`."""
    W, r = context.world, context.rank
    sent = [(r + s) % 3 for s in range(W)]
    received = [(s + r) % 3 for s in range(W)]
    x = _rows(context, sum(sent), 2).requires_grad_()
    moved = functional.wait_tensor(functional.all_to_all_single_autograd(x, received, sent, dist.group.WORLD))
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and still in use
        summed = differentiable.all_reduce(moved.sum(0))
    (moved * _rows(context, sum(received), 2)).sum().backward(retain_graph=True)
    summed.sum().backward()
    return [moved.detach(), x.grad, summed.detach()]


def mesh(context: RankContext, payload: Any) -> list[Any]:
    """A mesh of two dimensions, and a reduction along each."""
    made = init_device_mesh("cpu", (2, context.world // 2), mesh_dim_names=("outer", "inner"))
    found: list[Any] = [made.get_coordinate()]
    for name in ("outer", "inner"):
        tensor = _rows(context, 2)
        dist.all_reduce(tensor, group=made.get_group(name))
        found.append(tensor)
    context.kept["mesh"] = made  # so that its groups are not left behind
    return found


def groups_that_come_and_go(context: RankContext, payload: Any) -> list[Tensor]:
    """Groups of one's own, of all the same ranks, one after the other."""
    found = []
    for _ in range(2):
        group = dist.new_group(list(range(context.world)))
        tensor = _rows(context, 2)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        found.append(tensor)
    return found


def data_parallel(context: RankContext, payload: Any) -> Tensor:
    """A module whose gradients are averaged by C++, which waits for futures."""
    layer = torch.nn.Linear(4, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    module = torch.nn.parallel.DistributedDataParallel(layer)
    module(_rows(context, 2, 4)).sum().backward()
    return layer.weight.grad.clone()


def sharded_tensor(context: RankContext, payload: Any) -> list[Tensor]:
    """A DTensor made from a shard on every rank, gathered and multiplied."""
    made = init_device_mesh("cpu", (context.world,))
    context.kept["line"] = made  # so that its groups are not left behind
    tensor = DTensor.from_local(_rows(context, 2, 4), made, [Shard(0)])
    whole = tensor.redistribute(made, [Replicate()])
    return [whole.to_local(), (tensor @ whole.T).to_local()]  # type: ignore[attr-defined]


SAME = (
    uneven_all_to_all,
    even_all_to_all,
    nothing_to_all,
    gathers,
    reductions,
    lists_and_objects,
    messages,
    asynchronous,
    backward_through_collectives,
    mesh,
    groups_that_come_and_go,
    data_parallel,
    sharded_tensor,
)


# ---- what each rank has for itself ------------------------------------------------------------------------------


def random_numbers(context: RankContext, payload: Any) -> list[float]:
    """Seeds all generators, and draws before and after others had their turn."""
    torch.manual_seed(payload + context.rank)
    random.seed(payload + context.rank)
    np.random.seed(payload + context.rank)
    found = []
    for _ in range(2):
        found += [torch.rand(1).item(), random.random(), float(np.random.rand())]
        dist.barrier()
    return found


def kept_counter(context: RankContext, payload: Any) -> int:
    """Counts the jobs of this rank."""
    context.kept.setdefault("jobs", []).append(context.rank)
    return len(context.kept["jobs"])


def default_dtype(context: RankContext, payload: Any) -> str:
    """Sets another default dtype on odd ranks, and looks what it is after the others' turn."""
    if context.rank % 2:
        torch.set_default_dtype(torch.float64)
    dist.barrier()
    now = torch.empty(0).dtype
    torch.set_default_dtype(torch.float32)
    return str(now)


def leaves_dtype(context: RankContext, payload: Any) -> None:
    """Leaves another default dtype on rank 1."""
    if context.rank == 1:
        torch.set_default_dtype(torch.float64)


def sums(context: RankContext, payload: Any) -> float:
    """The sum of all ranks."""
    tensor = torch.tensor(float(context.rank))
    dist.all_reduce(tensor)
    return tensor.item()


def peak_mib(context: RankContext, payload: Any) -> float:
    """The most memory that this rank's process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- faults ---------------------------------------------------------------------------------------------------------


def fails(context: RankContext, payload: Any) -> None:
    """Rank 2 raises."""
    if context.rank == 2:
        raise LookupError("rank 2 is lost")
    dist.barrier()


def leaves_one_out(context: RankContext, payload: Any) -> None:
    """Rank 2 leaves out a collective of its pair."""
    if context.rank != 2:
        dist.all_reduce(torch.ones(1), group=context.groups["pairs"])


def loops(context: RankContext, payload: Any) -> None:
    """Rank 2 never comes to an end; Ranks 0 and 1 wait, the others have had no turn."""
    while context.rank == 2:
        time.sleep(0.01)
    dist.barrier()


def holds_the_interpreter(context: RankContext, payload: Any) -> None:
    """Rank 2 sleeps with the interpreter's lock held."""
    if context.rank == 2:
        ctypes.PyDLL(None).sleep(60)
    dist.barrier()


def ends_the_process(context: RankContext, payload: Any) -> None:
    """Rank 2 takes all with it."""
    if context.rank == 2:
        print("rank 2 has had enough", flush=True)
        os._exit(3)
    dist.barrier()


def unsendable(context: RankContext, payload: Any) -> Any:
    """Rank 2 returns what cannot be sent."""
    return (lambda: 0) if context.rank == 2 else 0


# ---- disagreements --------------------------------------------------------------------------------------------------


def disagreeing_splits(context: RankContext, payload: list[tuple[int, int, int]]) -> None:
    """Everybody sends one row to everybody; each (source, target, n) says that the source sends n instead."""
    W = context.world
    sent = [1] * W
    for source, target, rows in payload:
        if source == context.rank:
            sent[target] = rows
    dist.all_to_all_single(torch.empty(W, 2), torch.zeros(sum(sent), 2), [1] * W, sent)


def other_collective(context: RankContext, payload: Any) -> None:
    """Rank 3 reduces where the others wait for each other."""
    if context.rank == 3:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()


def other_width(context: RankContext, payload: Any) -> None:
    """Rank 3 has rows of another width."""
    W = context.world
    width = 3 if context.rank == 3 else 2
    dist.all_to_all_single(torch.empty(W, width), torch.zeros(W, width))


def other_size(context: RankContext, payload: Any) -> None:
    """Rank 3 reduces two elements, the others one."""
    dist.all_reduce(torch.ones(2 if context.rank == 3 else 1))


def long_message(context: RankContext, payload: Any) -> None:
    """Rank 0 sends more than rank 1 expects."""
    if context.rank == 0:
        dist.send(torch.ones(3), 1)
    elif context.rank == 1:
        dist.recv(torch.ones(2), 0)


def splits_that_do_not_sum(context: RankContext, payload: Any) -> None:
    """Rank 1 announces a row more than it has."""
    W = context.world
    sent = [2 if context.rank == 1 else 1, *[1] * (W - 1)]
    dist.all_to_all_single(torch.empty(W), torch.zeros(W), [1] * W, sent)


def own_thread_only(context: RankContext, payload: Any) -> str:
    """A thread that a rank started may not communicate for it."""
    import threading

    said: list[str] = []

    def call(group: dist.ProcessGroup) -> None:
        try:
            group.barrier().wait()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call, args=(dist.group.WORLD,))
    thread.start()
    thread.join()
    return said[0]
