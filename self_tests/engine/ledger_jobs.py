"""Functions that the tests of the ledger run on ranks: all kinds of calls, and right and wrong uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_early
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moe_conformance.engine import RankContext


def _x(*shape: int) -> torch.Tensor:
    """Data that differs between ranks and elements."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(1.0, count + 1).reshape(shape) + 100 * dist.get_rank()


# ---- one call of each kind, on ranks 0 and 1 ----


def _reduce_in_backward() -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            dy = dy.clone()
            dist.all_reduce(dy)
            return dy * 2

    Reduced.apply(_x(3).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def _exchange_with_gradient() -> None:
    x = _x(4, 2).requires_grad_()
    y = functional.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD)
    (y * _x(4, 2)).sum().backward()
    assert x.grad is not None


def _on_a_thread() -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(_x(3)))
    thread.start()
    thread.join()


def _batch_of_messages() -> None:
    other = 1 - dist.get_rank()
    sent, received = dist.P2POp(dist.isend, _x(3), other), dist.P2POp(dist.irecv, torch.empty(3), other)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


def _message() -> None:
    if dist.get_rank() == 0:
        dist.send(_x(3), 1, tag=7)
    else:
        received = torch.empty(3)
        assert dist.recv(received, tag=7) == 0
        assert [1.0, 2.0, 3.0] == received.tolist()


def _coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(_x(3))
        dist.all_reduce(_x(2))


def _redistribute() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(_x(2, 3), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    assert (4, 3) == tuple(whole.to_local().shape)


def _scatter_dtensor() -> None:
    distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def _fsdp() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    layer(_x(2, 4)).sum().backward()


def _ddp() -> None:
    torch.manual_seed(0)
    layer = DistributedDataParallel(torch.nn.Linear(4, 4))
    layer(_x(2, 4)).sum().backward()


def _split_lists(count: int) -> list[torch.Tensor]:
    return [_x(2) + place for place in range(count)]


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(_x(3), op=dist.ReduceOp.MAX),
    "imported early": lambda: imported_early(_x(3)),
    "asynchronous": lambda: dist.all_reduce(_x(3), async_op=True).wait(),
    "polled": lambda: _poll(dist.all_reduce(_x(3), async_op=True)),
    "future": lambda: dist.all_reduce(_x(3), async_op=True).get_future().wait(),
    "method of the group": lambda: dist.group.WORLD.allreduce([_x(3)]).wait(),
    "broadcast": lambda: dist.broadcast(_x(3), 1),
    "reduce": lambda: dist.reduce(_x(3), 1),
    "all_gather": lambda: dist.all_gather([torch.empty(3), torch.empty(3)], _x(3)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(6), _x(3)),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(2), _split_lists(2)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), _x(4)),
    "gather": lambda: dist.gather(_x(2), _split_lists(2) if dist.get_rank() == 1 else None, 1),
    "scatter": lambda: dist.scatter(torch.empty(2), _split_lists(2) if dist.get_rank() == 1 else None, 1),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4, 2), _x(4, 2)),
    "uneven": lambda: dist.all_to_all_single(
        torch.empty(3 + dist.get_rank(), 2), _x(3 + dist.get_rank(), 2), *_uneven()
    ),
    "all_gather_object": lambda: dist.all_gather_object([None, None], "text" * (1 + dist.get_rank())),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["text"], 0),
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "message": _message,
    "batch of messages": _batch_of_messages,
    "coalesced": _coalesced,
    "functional": lambda: functional.all_reduce(_x(3), "sum", dist.group.WORLD) + 1,
    "raw functional": lambda: functional.wait_tensor(torch.ops._c10d_functional.all_reduce(_x(3), "sum", "0")),
    "functional with gradient": _exchange_with_gradient,
    "in a backward pass": _reduce_in_backward,
    "on a thread": _on_a_thread,
    "DTensor": _redistribute,
    "scattered DTensor": _scatter_dtensor,
    "FSDP": _fsdp,
    "DDP": _ddp,
}


def _poll(work: Any) -> None:
    while not work.is_completed():
        pass


def _uneven() -> tuple[list[int], list[int]]:
    """Splits of what goes out of this rank and comes in: [[1, 2], [2, 2]]."""
    splits = [[1, 2], [2, 2]][dist.get_rank()]
    return splits, splits


def call(context: RankContext, name: str) -> None:
    """Makes one of the calls."""
    CALLS[name]()


def call_on_a_group(context: RankContext, payload: Any) -> None:
    """Calls on a group and on the world, in turn."""
    group = context.groups["pair"]
    dist.all_reduce(_x(3), group=group)
    dist.all_reduce(_x(3))
    dist.broadcast(_x(2), dist.get_global_rank(group, 1), group=group)


# ---- wrong uses of asynchronous collectives, and right ones ----


def never_wait(context: RankContext, payload: Any) -> None:
    """Rank 1 does not wait for a handle."""
    work = dist.all_reduce(_x(3), async_op=True)
    if context.rank == 0:
        work.wait()


def drop_a_functional_result(context: RankContext, payload: Any) -> None:
    """Drops the result of a functional collective, so that nothing waits for it."""
    functional.all_reduce(_x(3), "sum", dist.group.WORLD)


def _gather_early(read: Callable[[torch.Tensor], Any]) -> Any:
    received = torch.zeros(2, 3)
    work = dist.all_gather_into_tensor(received, _x(1, 3), async_op=True)
    early = read(received.view(3, 2)[1:])  # a view touches nothing
    work.wait()
    return early, received


def read_early_through_a_view(context: RankContext, payload: Any) -> Any:
    """Sums a view of an output before the wait."""
    return _gather_early(lambda view: view.sum())


def write_early(context: RankContext, payload: Any) -> Any:
    """Writes into an output before the wait."""
    return _gather_early(lambda view: view.fill_(5.0).numel())


class _ReadsEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(dy)
        work = dist.all_to_all_single(received, dy.contiguous(), async_op=True)
        dx = received * 2
        work.wait()
        return dx


def read_early_in_backward(context: RankContext, payload: Any) -> Any:
    """A custom autograd function uses a gradient before the wait."""
    x = _x(4).requires_grad_()
    _ReadsEarly.apply(x).backward(_x(4))  # type: ignore[no-untyped-call]
    return x.grad


def read_raw_functional_early(context: RankContext, payload: Any) -> Any:
    """Uses the result of a functional operator without wait_tensor."""
    raw = torch.ops._c10d_functional.all_reduce(_x(3), "sum", "0")
    early = raw + 1
    torch.ops._c10d_functional.wait_tensor(raw)
    return early


def read_element_early(context: RankContext, payload: Any) -> Any:
    """Uses the inner tensor of an AsyncCollectiveTensor."""
    tensor = functional.all_reduce(_x(3), "sum", dist.group.WORLD)
    early = tensor.elem + 1
    return early, tensor + 0


def read_bools_early(context: RankContext, payload: Any) -> Any:
    """Reads a bool output before the wait."""
    flags = torch.zeros(2, 2, dtype=torch.bool)
    work = dist.all_gather_into_tensor(flags, torch.ones(1, 2, dtype=torch.bool), async_op=True)
    early = flags.sum()
    work.wait()
    return early


def read_counts_early(context: RankContext, payload: Any) -> Any:
    """Reads an integer output of a dtype, the payload, before the wait; returns that and the result."""
    counts = torch.zeros(2, dtype=payload)
    work = dist.all_to_all_single(counts, torch.ones(2, dtype=payload), async_op=True)
    early = counts.clone()
    work.wait()
    return early, counts


def change_what_is_sent(context: RankContext, payload: Any) -> Any:
    """Rank 0 overwrites a buffer that is being sent."""
    sent, received = _x(4), torch.empty(4)
    work = dist.all_to_all_single(received, sent, async_op=True)
    if context.rank == 0:
        sent.mul_(2)
    work.wait()
    return received


def pass_on_early(context: RankContext, payload: Any) -> Any:
    """Sends an output before the wait."""
    received, gathered = torch.zeros(4), torch.zeros(8)
    work = dist.all_to_all_single(received, _x(4), async_op=True)
    dist.all_gather_into_tensor(gathered, received)
    work.wait()
    return gathered


def use_correctly(context: RankContext, payload: Any) -> dict[str, Any]:
    """Correct uses: overlap, views, in-place buffers, roots, messages, polling, futures, functional calls."""
    results: dict[str, Any] = {}
    buffer = torch.zeros(2, 3)
    mine = buffer[context.rank : context.rank + 1]
    mine.copy_(_x(1, 3))
    work = dist.all_gather_into_tensor(buffer, mine, async_op=True)
    results["own part of a gather in place"] = mine.sum()
    work.wait()
    results["gather in place"] = buffer.clone()
    shared = _x(3)
    work = dist.broadcast(shared, 0, async_op=True)
    if context.rank == 0:
        results["at the root"] = shared.sum()
    work.wait()
    results["broadcast"] = shared
    summed, kept = _x(3), _x(3)
    work = dist.all_reduce(summed, async_op=True)
    results["meanwhile"] = kept * 2
    work.wait()
    results["all_reduce"] = summed
    summed = _x(3)
    _poll(dist.all_reduce(summed, async_op=True))
    results["polled"] = summed
    summed = _x(3)
    results["future"] = [t.clone() for t in dist.all_reduce(summed, async_op=True).get_future().wait()]
    other = 1 - context.rank
    received = torch.empty(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, _x(3), other), dist.P2POp(dist.irecv, received, other)])
    for work in works:
        work.wait()
    results["messages"] = received
    results["functional"] = functional.all_reduce(_x(3), "sum", dist.group.WORLD).view(3, 1) + 1
    at_root = _x(3)
    work = dist.reduce(at_root, 1, async_op=True)
    work.wait()
    results["reduce"] = at_root if context.rank == 1 else None
    flags = torch.zeros(2, dtype=torch.bool)
    dist.all_gather_into_tensor(flags, torch.tensor([context.rank == 1]), async_op=True).wait()
    results["flags"] = flags
    return results


def train_sharded(context: RankContext, payload: Any) -> Any:
    """A step of FSDP and one of DTensor; returns the gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(context.rank)
    model(torch.randn(3, 4)).square().sum().backward()
    weight = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Replicate()])
    (x @ weight.T).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in (*model.parameters(), weight)]  # type: ignore[attr-defined]
