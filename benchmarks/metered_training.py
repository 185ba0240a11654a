"""Training of a small model with native's load meter, on every rank; `benchmarks.overload_picture` runs it.

The model is the proxy model: two blocks, each with a dense part and native's router, exchange and experts, over tp, pp,
cp, ep and etp. In every block a router for each phase shares one weight, so that what is learnt stays when the phase
changes. The loss is the squared distance from a fixed function of the tokens, over tokens.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.meter import Meter
from moe_conformance.chapters.groups.scenario import BLOCKS, Block, ProxyModel
from moe_conformance.chapters.groups.workloads.proxy_model import ProxyModelStep
from moe_conformance.contract import Config, MeteredPass, Session, whole
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import RankContext
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload

LAYOUT = Layout(8, tp=2, cp=2, pp=2, ep=2, etp=2)
Forced = tuple[tuple[Any, float | None], ...]

_POOL, _EACH_STEP = 8, 2  # microbatches that there are, and of a step
# Of a rank: pairs divide evenly over the experts, and over all but one of them, so that closed forms are exact.
_TOKENS = (56, 28, 84, 28)
_MIX, _RATE, _PAGE = 24, 0.2, resource.getpagesize()
CONFIG = Config(variant="alltoall", experts=8, top_k=2, hidden=16, ffn=16)


@dataclass(frozen=True)
class Plan:
    """What is forced in each step, by its place among the strategies, and the strategies; () forces nothing."""

    strategies: tuple[Forced, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What one rank reports of a step."""

    values: dict[str, float]  # of the meter
    loss: float  # of the rank's own tokens, on the last stage
    resident: int  # bytes of the process


def train(context: RankContext, plan: Plan) -> list[Step]:
    """Return every step on this rank."""
    return _Training(context, plan).steps()


class _Training(ProxyModel):
    """The model, with a meter."""

    def __init__(self, context: RankContext, plan: Plan) -> None:
        """Build it."""
        super().__init__(context, _workload())
        self.plan = plan
        self.phase, self.microbatch, self.loss = 0, 0, 0.0
        self.session = self.build("native")
        self.meter = Meter(self.topology, CONFIG, context.device)
        self.parts = [self._attach(block, self.session) for block in self.blocks]

    def steps(self) -> list[Step]:
        """Take all steps."""
        return [self._step(number, phase) for number, phase in enumerate(self.plan.steps)]

    def _step(self, number: int, phase: int) -> Step:
        self.phase, self.loss = phase, 0.0
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        chosen = [(number * _EACH_STEP + each) % _POOL for each in range(_EACH_STEP)]
        for m in chosen:
            self.microbatch = m
            ends[m] = self.forward(m)
        for m in chosen:
            self.backward(m, *ends[m])
        self._descend()
        return Step(self.meter.report(), self.loss, _resident())

    def upstream(self, m: int, y: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to y, on the last stage; on others it is received."""
        target = self.workload.batches[m][self.context.rank].upstream.to(y.device)
        away = y.detach() - target
        self.loss += float(away.square().mean())
        return away / (_EACH_STEP * sum(map(len, (batch.x_TD for batch in self.workload.batches[m]))))

    def _attach(self, block: Block, session: Session) -> list[Any]:
        """Put a router for each phase, and the meter, into a block; return what has parameters."""
        first, exchange, experts = block.parts
        routers = [session.router(CONFIG.changed({"routing.forced": each})) for each in self.plan.strategies]
        for router in routers:
            router.router_ED = first.router_ED  # type: ignore[attr-defined]
        through: Callable[..., Tensor] = whole(exchange)

        def moe(x: Tensor) -> Tensor:
            routing = routers[self.phase](x).routing
            padding_T = torch.zeros(len(x), dtype=torch.bool)
            forward = MeteredPass("forward", block.number, self.microbatch, routing.ids_TK, padding_T)
            return through(x, routing, self.meter.watch(experts, forward))

        block.moe = moe
        return [first, experts]

    def _descend(self) -> None:
        """Finish all gradients, go a step down, and set them to None."""
        self.session.finish_gradients(*(part for parts in self.parts for part in parts))
        own = [parameter for parts in self.parts for part in parts for parameter in part.parameters()]
        for block in self.blocks:
            for mix in block.mix.values():
                assert mix.grad is not None
                dist.all_reduce(mix.grad, group=self.topology.group("dp_cp"))
                own.append(mix)
        with torch.no_grad():
            for parameter in own:
                parameter -= _RATE * parameter.grad
                parameter.grad = None


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def _workload() -> Workload:
    """Draw tokens, and targets that are a function of them alone; ranks of one pipeline have those of its first."""
    generator = draw.generator("metered training")
    first = {rank: ranks[0] for ranks in LAYOUT.groups()["pp"] for rank in ranks}
    to_target_DD = torch.randn(CONFIG.hidden, CONFIG.hidden, generator=generator) * CONFIG.hidden**-0.5

    def batch(m: int, rank: int) -> Batch:
        of_rank = draw.generator("metered training", m, first[rank])
        T = _TOKENS[(first[rank] + m) % len(_TOKENS)]
        x_TD, none = torch.randn(T, CONFIG.hidden, generator=of_rank), torch.empty(T, 0)
        return Batch(x_TD, none.long(), none, x_TD + torch.tanh(x_TD @ to_target_DD))

    batches = tuple(tuple(batch(m, rank) for rank in range(LAYOUT.world)) for m in range(_POOL))
    return Workload("metered training", ProxyModelStep(), CONFIG, LAYOUT, batches, "", _parameters(generator))


def _parameters(generator: torch.Generator) -> dict[ParameterKey, Tensor]:
    D, found = CONFIG.hidden, dict[ParameterKey, Tensor]()
    for number in range(BLOCKS):
        own = draw.router_parameters(CONFIG, generator, bias=0.0, twins=False)
        own |= {key: value / 2 for key, value in draw.expert_parameters(CONFIG, generator).items()}
        own["mix_in", None] = torch.randn(_MIX, D, generator=generator) * D**-0.5
        own["mix_out", None] = torch.randn(D, _MIX, generator=generator) * _MIX**-0.5
        found |= {(f"block{number}/{name}", expert): value for (name, expert), value in own.items()}
    return found


def over_ranks(ranks: Sequence[Sequence[Step]], name: str, block: int) -> list[float]:
    """Return a metered value of a block in every step, which the ranks of its stage report alike.

    Raises:
        ValueError: ranks report different values, or none reports it.
    """
    series = []
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        key = f"moe/{name}_layer_{block}"
        told = {step.values[key] for step in of_ranks if key in step.values}
        if len(told) != 1:
            raise ValueError(f"step {number}: the ranks report {sorted(told)} for {key}; expected one value")
        series.append(told.pop())
    return series
