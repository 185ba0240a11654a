"""OVLP and EXCH-12: bugs in how ranks agree on their collectives and wait for them; most values come out right."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.collectives import PendingAllToAll
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Departed
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

WATCHED = "watched-in-flight-uneven"
POISONED = "poisoned-in-flight-uneven"

# ---- what does not agree -------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-12", "even", "run", "on group (0, 1)", "all_to_all_single", "rank 0 sends", "rank 1"),
    real="pytorch/torchtitan issue #3336",
)
class OneRowTooMany(AllToAllExchange):
    """The last rank makes room for a row more than is sent to it, and cuts off what nobody ever wrote."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        group = self.topology.group("ep")
        given = x.detach().new_zeros(group.size(), 1)
        taken = [1 + (group.rank() == group.size() - 1)] + [1] * (group.size() - 1)
        got = given.new_empty(sum(taken), 1)
        dist.all_to_all_single(got, given, taken, [1] * group.size(), group=group)
        return delivery, handle


@planted(
    Expectation("EXCH-12", "even", "run", "on group (0, 1)", "rank 0 calls all_reduce; rank 1"),
    Expectation("EXCH-09", "even", "run", "rank"),
    real="vllm-project/vllm PRs #51984, #53578",
)
class LastRankSkips(AllToAllExchange):
    """The last rank of ep leaves a sum out after the experts, as one without work does."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        group = self.topology.group("ep")
        if group.rank() < group.size() - 1:
            dist.all_reduce(torch.zeros(1), group=group)
        return y


# ---- what is not waited for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountsTaken(PendingAllToAll):
    """Takes what is there already, and waits afterwards."""

    def wait(self) -> Tensor:
        taken = self._received.clone()
        super().wait()
        return taken


@planted(
    Expectation(
        "OVLP-01", WATCHED, "run", "the output of all_to_all_single on group (0, 1)", "was read or written before"
    ),
    Expectation("EXCH-09", POISONED, "run", "rank"),
    real="EfficientMoE/MoE-Infinity PR #197",
)
class CountsNotAwaited(AllToAllExchange):
    """The counts that other ranks send are read when the call returns, and not when they have come."""

    def _start(self, counts_CN: Tensor) -> PendingAllToAll:
        return CountsTaken(**vars(super()._start(counts_CN)))


@dataclass(frozen=True)
class CountsPeekedAt(PendingAllToAll):
    """Looks whether something has come, in no way that changes the result."""

    def wait(self) -> Tensor:
        come = self._received[:1].view(-1).any()
        del come
        return super().wait()


@planted(Expectation("OVLP-01", WATCHED, "run", "was read or written before wait()", "overlap.py", "any"))
class CountsLookedAt(AllToAllExchange):
    """The counts that other ranks send are looked at through a view before they have come; no value is wrong."""

    def _start(self, counts_CN: Tensor) -> PendingAllToAll:
        return CountsPeekedAt(**vars(super()._start(counts_CN)))


@dataclass(frozen=True)
class CountsOverwritten(PendingAllToAll):
    """Uses the buffer that is being sent for something else."""

    def wait(self) -> Tensor:
        self.sent.zero_()
        return super().wait()


@planted(Expectation("OVLP-02", WATCHED, "run", "sends was changed before wait()"))
class SentBufferReused(AllToAllExchange):
    """The buffer of the counts is used again while they are being sent."""

    def _start(self, counts_CN: Tensor) -> PendingAllToAll:
        return CountsOverwritten(**vars(super()._start(counts_CN.clone())))


@dataclass(frozen=True)
class CountsInChunks(PendingAllToAll):
    """The counts of each local expert, sent one after the other; the work is that of the last."""

    chunks: tuple[Tensor, ...] = ()

    def wait(self) -> Tensor:
        super().wait()
        time.sleep(0.05)  # by when the others have nearly always come, too
        return torch.cat(self.chunks, 1)


@planted(
    Expectation("OVLP-03", WATCHED, "run", "all_to_all_single on group (0, 1)", "was never waited for"),
    Expectation("EXCH-09", POISONED, "run", "rank"),
    real="PrimeIntellect-ai/prime-rl PR #3411, review",
)
class LastChunkAwaited(AllToAllExchange):
    """What is sent in chunks is waited for by the event of the last, which each chunk has written over."""

    def _start(self, counts_CN: Tensor) -> PendingAllToAll:
        start = super()._start
        chunks = [start(each) for each in counts_CN.split(1, 1)]
        return CountsInChunks(**vars(chunks[-1]), chunks=tuple(each._received for each in chunks))


@planted(
    Expectation("SHARE-01", "shared-beside-poisoned-uneven", "combine", "likely cause: the output of an asynchronous")
)
class RowsNotAwaited(AllToAllExchange):
    """The rows are copied while they are on their way, and waited for behind that."""

    def arrive(self, departed: Departed) -> tuple[Delivery, Any]:
        early = departed.exchange.result.clone()
        rows = collectives.arrive(departed.rows, departed.exchange)
        return self.delivered(early + (rows - rows.detach()), departed.plan, departed.permuted)


@planted(
    Expectation("OVLP-03", "own-even", "run", "all_reduce on group", "was never waited for"),
    Expectation("OVLP-03", "own-watched-uneven", "run", "all_reduce on group", "was never waited for"),
    Expectation("GRAD-05", "own-poisoned-in-flight-uneven", "finish", "nan", "was never waited for"),
    layout=EP2_EDP2,
)
class GradientsNotAwaited(GradientFinisher):
    """The sum over the replicas is started, and the step goes on with whatever has come."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        for name in replicas:
            if self.topology.group(name).size() > 1:
                dist.all_reduce(total, group=self.topology.group(name), async_op=True)
        return total
