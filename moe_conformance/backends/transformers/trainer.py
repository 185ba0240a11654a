"""A training step of transformers: its Trainer's own parts around layers of Qwen3-MoE. T tokens, D hidden.

`Trainer.train` needs accelerate, which the library does not install, and a data set. Of the Trainer these are called
here, in its order: the number of items in the batch, `compute_loss`, the deferral of FSDP2's reduction to the last
microbatch, `_clip_grad_norm` and `create_optimizer`. What it asks of accelerate is torch's function of
the same name, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeSparseMoeBlock

from moe_conformance.backends.fsdp_windows import local, require_parts, whole_window
from moe_conformance.backends.transformers.experts import expert_windows
from moe_conformance.backends.transformers.model import plan_of, reduction_of, shard
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import model_config
from moe_conformance.contract import (
    Claims,
    Config,
    Named,
    Read,
    Training,
    TrainingBatch,
    TrainingReport,
    Unsupported,
    refusals,
)

_NAMES = {"exp_avg": "first", "exp_avg_sq": "second", "momentum_buffer": "momentum"}  # in torch's optimisers
_IGNORED = -100  # a label that does not count


def require_trained(config: Config, placement: Placement) -> None:
    """Refuse layouts and sizes that are not adapted."""
    sizes = placement.topology.sizes
    if sizes["tp"] * sizes["cp"] * sizes["pp"] > 1:
        raise Unsupported("training steps of transformers are adapted for dp and ep alone")
    for rows in (config.hidden, config.ffn, config.experts):
        require_parts((rows,), placement.batches)


class Layer(nn.Module):
    """A decoder layer without attention and norms: its MLP, and the residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return x + f(x)."""
        y: Tensor = x + self.mlp(x)
        return y


class Model(nn.Module):
    """The layers, under the names of a model of the library."""

    def __init__(self, config: Config, implementation: str) -> None:
        super().__init__()
        self.config = model_config("qwen3_moe", config)
        self.config._experts_implementation = implementation
        dense = [Layer(Qwen3MoeMLP(self.config, config.ffn)) for _ in range(config.training.dense_layers)]
        moe = [Layer(Qwen3MoeSparseMoeBlock(self.config)) for _ in range(config.training.layers)]
        self.layers = nn.ModuleList([*dense, *moe])

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            x = layer(x)
        return x


def placed(config: Config, placement: Placement, implementations: tuple[str, str]) -> Any:
    """Build the model, spread its experts over ep, and let FSDP2 shard it, as the library loads one; collective."""
    ep_implementation, experts_implementation = implementations
    model: Any = Model(config, experts_implementation).to(placement.device, config.dtype)
    sizes = placement.topology.sizes
    if sizes["ep"] > 1:
        ep_mesh = placement.expert_mesh["ep"]
        with refusals(ValueError, match="needs every rank of the expert group to hold the same batch"):
            apply_expert_parallelism(model, ep_mesh, placement.tp_mesh, plan_of(model, "ep"), ep_implementation)
    shard(model, placement)
    model._tp_size = sizes["tp"]
    model.config.distributed_config = placement.distributed_config
    return model.train()


def optimizer(training: Training) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return what the Trainer's argument `optimizer_cls_and_kwargs` has."""
    if training.optimiser == "sgd":
        return torch.optim.SGD, {"lr": training.rate, "momentum": training.momentum}
    return torch.optim.AdamW, {"lr": training.rate, "betas": training.betas, "eps": training.epsilon}


class Parts(transformers.Trainer):  # type: ignore[misc]  # its stub knows no classes
    """The library's Trainer, without what its constructor does for devices, data and reports."""

    def __init__(self, model: nn.Module, training: Training, ranks: int) -> None:
        """Keep what its methods read."""
        self.model, self.optimizer, self.optimizer_cls_and_kwargs = model, None, optimizer(training)
        self.label_smoother, self.compute_loss_func = None, summed_loss
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = False
        self._mixed_mesh_grads = None
        self.args: Any = SimpleNamespace(
            weight_decay=training.decay, max_grad_norm=training.largest_norm or torch.inf, n_gpu=1, world_size=ranks,
            average_tokens_across_devices=True,
        )  # fmt: skip
        self.accelerator: Any = SimpleNamespace(
            clip_grad_norm_=torch.nn.utils.clip_grad_norm_, distributed_type=None, num_processes=ranks
        )

    def microbatch(self, batch: TrainingBatch, items: Tensor) -> Tensor:
        """Run a forward and backward, and return what it adds to the loss that this rank logs."""
        inputs: dict[str, Any] = {"x": batch.x_TD[None], "labels": batch}
        loss: Tensor = self.compute_loss(self.model, inputs, num_items_in_batch=items)
        loss.backward()
        return loss.detach()

    def clipped(self) -> Tensor:
        """Clip gradients, to infinity where they are not to be, and return their norm before."""
        norm: Tensor = self._clip_grad_norm(self.model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def summed_loss(y: Tensor, batch: TrainingBatch, num_items_in_batch: Tensor) -> Tensor:
    """Return the loss of the counted tokens over the number of those of all ranks and microbatches."""
    off_TD = y[0].float() - batch.target_TD.float()
    return torch.where(batch.counted_T[:, None], off_TD, 0.0).square().sum() / 2 / num_items_in_batch


class Trainer:
    """The model, the Trainer's parts, and the loop around them."""

    def __init__(self, config: Config, placement: Placement, implementations: tuple[str, str]) -> None:
        """Build the model and its optimizer; collective."""
        self._placement = placement
        self._model = placed(config, placement, implementations)
        self._parts = Parts(self._model, config.training, placement.batches)
        self._optimizer: Any = self._parts.create_optimizer()

    @property
    def resolved(self) -> Mapping[str, str]:
        """The optimizer with its groups, the layers, and how parameters are placed."""
        moe = self._model.layers[-1].mlp
        names = {"experts": moe.experts.gate_up_proj, "router": moe.gate.weight}
        return {
            "optimizer": f"{type(self._optimizer).__qualname__}, {len(self._optimizer.param_groups)} groups",
            "layer": type(moe).__name__,
            "experts implementation": moe.experts.config._experts_implementation,
            "reduction": reduction_of(self._model),
            **{name: _place(parameter) for name, parameter in names.items()},
        }

    @property
    def claims(self) -> Claims:
        """A step that is not finite is taken."""
        return Claims(steps_not_finite="taken")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the rows of every parameter, and the experts, that FSDP2 keeps on this rank."""
        for number, layer in enumerate(self._model.layers):
            for each in self._windows(layer.mlp, read):
                yield Named(f"layer{number}/{each.name}", each.expert, each.view, each.shard)

    def _windows(self, mlp: Any, read: Read) -> Iterator[Named]:
        if isinstance(mlp, Qwen3MoeSparseMoeBlock):
            yield from whole_window("router", mlp.gate.weight, read)
            yield from expert_windows(mlp.experts, self._placement, read)
            return
        for name in ("gate", "up", "down"):
            yield from whole_window(name, getattr(mlp, f"{name}_proj").weight, read)

    def begin(self) -> None:
        """Nothing to do: the optimizer keeps no copies of parameters."""

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step, in the order of `Trainer._run_epoch`."""
        group = self._placement.topology.group("dp_cp")
        items = torch.stack([batch.counted_T.sum() for batch in batches]).sum()
        dist.all_reduce(items, group=group)
        loss = torch.zeros(())
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1 or self._placement.batches == 1
            with nullcontext() if last else self._parts._defer_fsdp_gradient_reduction():
                loss += self._parts.microbatch(batch, items)
        norm = self._parts.clipped()
        self._optimizer.step()
        self._model.zero_grad()
        dist.all_reduce(loss, group=group)  # its logs have the mean of all processes
        return TrainingReport(loss / group.size(), norm)

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return this rank's shards of the moments."""
        of = next(each for each in self._model.parameters() if local(each).data_ptr() == parameter.data_ptr())
        state = self._optimizer.state.get(of, {})
        return {_NAMES[name]: local(value) for name, value in state.items() if name in _NAMES and value is not None}


def _place(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "not sharded"
    return f"{parameter.placements} of {parameter.device_mesh.mesh_dim_names}"
