"""Functions that the tests of GPU nodes run on ranks; some run on the CPU too."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

from moe_conformance.engine import RankContext

left_behind: list[torch.Tensor] = []


def say_and_die(context: RankContext, culprit_and_sentence: tuple[int, str]) -> None:
    """The faulty rank prints a sentence and exits; the others wait for it in a collective."""
    faulty, sentence = culprit_and_sentence
    if context.rank == faulty:
        print(sentence, flush=True)
        os._exit(1)
    dist.all_reduce(torch.ones(3, device=context.device))


def raise_sentences(context: RankContext, sentences: dict[int, str]) -> None:
    """Ranks that have a sentence raise it; the others wait for them in a collective."""
    if context.rank in sentences:
        raise RuntimeError(sentences[context.rank])
    dist.all_reduce(torch.ones(3, device=context.device))


def exchange(context: RankContext, payload: Any) -> tuple[str, str, list[float], list[float]]:
    """Returns device, transport, what arrives if rank r sends w + 1 numbers r to each rank w, and the sum of all r."""
    group = dist.distributed_c10d._get_default_group()
    transport = type(group._get_backend(context.device)).__name__
    sent = [w + 1 for w in range(context.world)]
    received = [context.rank + 1] * context.world
    rows = torch.full((sum(sent),), float(context.rank), device=context.device)
    came = rows.new_full((sum(received),), -1.0)
    dist.all_to_all_single(came, rows, received, sent)
    total = torch.tensor([float(context.rank)], device=context.device)
    dist.all_reduce(total)
    return str(context.device), transport, came.tolist(), total.tolist()


def hold(context: RankContext, where: str) -> None:
    """Makes a tensor of 1000 numbers that stays in a module, in `kept`, in a reference cycle, or nowhere."""
    made = torch.zeros(1000, device=context.device)
    if where == "module":
        left_behind.append(made)
    elif where == "kept":
        context.kept["tensor"] = made
    elif where == "cycle":
        cycle: list[Any] = [made]
        cycle.append(cycle)


def multiply(context: RankContext, payload: Any) -> float:
    """Multiplies matrices, for which libraries allocate workspaces."""
    a = torch.eye(64, device=context.device)
    return float((a @ a).sum())


def read_on_the_host(context: RankContext, times: int) -> float:
    """Waits for the GPU that many times, from one line."""
    x = torch.ones(1, device=context.device)
    return sum(x.item() for _ in range(times))


def fail_late(context: RankContext, swallow: bool) -> str:
    """Makes the GPU read outside of a tensor and returns; optionally after catching the error."""
    x = torch.zeros(3, device=context.device)
    x[torch.tensor([7], device=context.device)]
    if swallow:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(context.device)
    return "returned"


def gather_early(context: RankContext, wait: bool) -> list[float]:
    """All-gathers a 5 in a world of one; reads the output before `wait()`, or after it."""
    x = torch.full((4,), 5.0, device=context.device)
    out = torch.full((4,), -1.0, device=context.device)
    _connect(context)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    assert work is not None
    if wait:
        work.wait()
    seen = out.clone()
    work.wait()
    return seen.tolist()


def gather_aside(context: RankContext, wait: bool) -> list[float]:
    """All-gathers, on another stream, what was just set to 5; that stream waits for it, or does not."""
    x = torch.full((4,), -1.0, device=context.device)
    out = torch.zeros(4, device=context.device)
    aside = torch.cuda.Stream()
    _connect(context)
    dist.all_reduce(torch.zeros(1, device=context.device))  # after this the computation is late
    x.fill_(5.0)
    if wait:
        aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        dist.all_gather_into_tensor(out, x)
    torch.cuda.synchronize()
    return out.tolist()


def _connect(context: RankContext) -> None:
    """Calls a first collective, in which NCCL connects, which takes longer than any delay."""
    dist.all_reduce(torch.zeros(1, device=context.device))
    torch.cuda.synchronize()
