"""A training step: a model of dense and MoE layers, its loss, one norm, one factor of clipping, torch's optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.contract import Claims, Config, Named, Read, Topology, Training, TrainingBatch, TrainingReport

STATE = {"exp_avg": "first", "exp_avg_sq": "second", "momentum_buffer": "momentum"}  # in torch's optimisers


class GradientNorm:
    """The norm of finished gradients, and clipping by it."""

    def __init__(self, topology: Topology) -> None:
        """Keep the topology, whose groups tell how often an element is there."""
        self.topology = topology

    def __call__(self, parts: Sequence[Replicated]) -> Tensor:
        """Return the norm over all ranks, on which the sum is one and the same.

        Implements: GRAD-12.
        """
        total = torch.stack([self.squares(part) / self.copies(part) for part in parts]).sum()
        return self.over_ranks(total).sqrt()

    def over_ranks(self, total: Tensor) -> Tensor:
        """Add up what the ranks have."""
        if self.topology.group("world").size() > 1:
            dist.all_reduce(total, group=self.topology.group("world"))
        return total

    def squares(self, part: Replicated) -> Tensor:
        """Return the sum of squares of this rank's gradients of a part, in float64."""
        return torch.stack([p.grad.double().square().sum() for p in part.parameters() if p.grad is not None]).sum()

    def copies(self, part: Replicated) -> int:
        """Return on how many ranks each element of a part is."""
        copies = 1
        for name in part.replicas:
            copies *= self.topology.group(name).size()
        return copies

    def clip(self, parts: Sequence[Replicated], norm: Tensor, largest: float) -> None:
        """Multiply all gradients by one factor where their norm is larger than it may be.

        Implements: GRAD-13.
        """
        factor = (largest / (norm + 1e-6)).clamp_max(1.0)
        for part in parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor_of(part, factor).to(parameter.grad.dtype))

    def factor_of(self, part: Replicated, factor: Tensor) -> Tensor:
        """Return the factor of a part: that of all."""
        return factor


class Trainer(nn.Module):
    """The model, and the loop around it."""

    def __init__(
        self, config: Config, topology: Topology, layers: Sequence[SharedExperts | Layer], norm: GradientNorm,
        finisher: GradientFinisher,
    ) -> None:  # fmt: skip
        """Take the layers, dense ones first."""
        super().__init__()
        self.config, self.options, self.topology = config, config.training, topology
        self.layers = nn.ModuleList(layers)
        self.norm, self.finisher = norm, finisher
        self.masters = dict[Tensor, Tensor]()  # in float32, of parameters of half precision
        self.optimiser = self.optimiser_of(self.options)

    @property
    def parts(self) -> list[Replicated]:
        """What has parameters, layer by layer."""
        found: list[Replicated] = []
        for layer in self.layers:
            assert isinstance(layer, Layer | SharedExperts)
            found += layer.parts if isinstance(layer, Layer) else [layer]
        return found

    @property
    def optimised(self) -> Sequence[Replicated]:
        """What has the optimiser's parameters: what has the model's."""
        return self.parts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The optimiser and the layers."""
        layers = ", ".join(type(layer).__name__ for layer in self.layers)
        return {"optimiser": type(self.optimiser).__qualname__, "layers": layers, "norm": type(self.norm).__name__}

    @property
    def claims(self) -> Claims:
        """Steps that are not finite are skipped."""
        return Claims()

    def optimiser_of(self, options: Training) -> torch.optim.Optimizer:
        """Return torch's optimiser of all parameters."""
        groups = [self.group_of(part) for part in self.optimised]
        if options.optimiser == "sgd":
            return torch.optim.SGD(groups, options.rate, options.momentum, weight_decay=options.decay)
        return torch.optim.AdamW(groups, options.rate, options.betas, options.epsilon, options.decay)

    def group_of(self, part: Replicated) -> dict[str, object]:
        """Return the optimiser's parameter group of a part, whose options are those of all."""
        return {"params": [self.updated(parameter) for parameter in part.parameters()]}

    def updated(self, parameter: Tensor) -> Tensor:
        """Return what the optimiser updates: a parameter, or its master copy."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.dtype == wide:
            return parameter
        if parameter not in self.masters:
            self.masters[parameter] = parameter.detach().to(wide)
        return self.masters[parameter]

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of all layers under the names of their layers."""
        for number, layer in enumerate(self.layers):
            dense = isinstance(layer, SharedExperts)
            for each in layer.named(read):  # type: ignore[operator]
                name, expert = each.name.removeprefix("shared_"), None if dense else each.expert
                yield Named(f"layer{number}/{name}", expert, each.view, each.shard)

    def begin(self) -> None:
        """Copy what was written."""
        for parameter, master in self.masters.items():
            master.copy_(parameter.detach())

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        return x_TD

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step."""
        self.zero_grad()
        share = self.backward(batches)
        norm = self.finished_norm()
        updated = self.is_finite(norm)
        if updated:
            if self.options.largest_norm is not None:
                self.norm.clip(self.optimised, norm, self.options.largest_norm)
            self.update()
        return TrainingReport(self.reported(share), norm, updated)

    def finished_norm(self) -> Tensor:
        """Finish gradients, and return their norm."""
        self.finish()
        return self.norm(self.optimised)

    def finish(self) -> None:
        """Sum gradients over the ranks that hold the same parameter."""
        self.finisher.finish(self.parts)

    def is_finite(self, norm: Tensor) -> bool:
        """Whether to take the step: the norm, the same on all ranks, has every gradient of all ranks in it.

        Implements: TRAIN-05.
        """
        return bool(norm.isfinite())

    def update(self) -> None:
        """Let the optimiser step, with gradients of zeros for experts without tokens.

        Implements: TRAIN-01, TRAIN-02.
        """
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.optimiser.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)

    def backward(self, batches: Sequence[TrainingBatch]) -> Tensor:
        """Run all microbatches, each divided by the counted tokens of the step; return this rank's share of the loss.

        Implements: GRAD-14, TRAIN-03.
        """
        divisors = self.divisors(batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch, divisor in zip(batches, divisors, strict=True):
            off_TD = self(batch.x_TD) - batch.target_TD
            summed = torch.where(batch.counted_T[:, None], off_TD, 0.0).square().sum() / 2
            (summed / divisor).backward()
            total += summed.detach().double() / divisor
        return total

    def reported(self, share: Tensor) -> Tensor:
        """Return the loss of the step, of which every rank has a share.

        Implements: TRAIN-04.
        """
        return self.norm.over_ranks(share)

    def divisors(self, batches: Sequence[TrainingBatch]) -> list[Tensor]:
        """Return what the loss of every microbatch is divided by: the counted tokens of all of them on all ranks."""
        counted = torch.stack([batch.counted_T.sum() for batch in batches]).sum()
        if self.topology.group("world").size() > 1:
            dist.all_reduce(counted, group=self.topology.group("world"))
        return [counted.clamp_min(1)] * len(batches)

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the moments that torch's optimiser has of a parameter, and its master copy."""
        state = self.optimiser.state.get(self.updated(parameter), {})
        found = {STATE[name]: value for name, value in state.items() if name in STATE and value is not None}
        return found | ({"master": self.masters[parameter]} if parameter in self.masters else {})
