"""A training step of DeepSpeed: its engine's forward, backward and step around a model. T tokens, D hidden.

The loop is that of the library's documents, in which the caller computes the loss of a microbatch. The engine averages
gradients over data parallel ranks. So the sum over counted tokens is divided by those of the whole step and multiplied
by the number of ranks; with `scale_wrt_gas=False` the engine does not divide it by the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.deepspeed.autoep_model import grouped_windows
from moe_conformance.backends.deepspeed.experts import Expert, windows
from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.contract import Claims, Config, Named, Read, Training, TrainingBatch, TrainingReport

_NAMES = {"first": "exp_avg", "second": "exp_avg_sq", "momentum": "momentum_buffer"}  # in torch's optimisers


class Model(nn.Module):
    """Dense layers, MoE layers, and the residuals around them."""

    def __init__(self, config: Config, layers: Sequence[nn.Module]) -> None:
        """Take the MoE layers."""
        super().__init__()
        dense = [Expert(config) for _ in range(config.training.dense_layers)]
        self.layers = nn.ModuleList([*dense, *layers])

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer; a layer of GShard's kind returns a loss and counts besides."""
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


def settings(config: Config) -> dict[str, Any]:
    """Return the DeepSpeed JSON: ZeRO 1 for sharded state and, as its documents pair them, in bfloat16; else ZeRO 0.

    `torch_adam` has it use torch's AdamW: its own are compiled for GPUs, or for offloading.
    """
    training, narrow = config.training, config.dtype == torch.bfloat16
    stage = 2 if config.sharding == "gradients" else int(narrow or training.sharded_state)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.largest_norm or 0.0,
        "optimizer": optimizer(training),
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": narrow},
    }


def optimizer(training: Training) -> dict[str, Any]:
    """Return the optimizer's part of the JSON."""
    shared = {"lr": training.rate, "weight_decay": training.decay}
    if training.optimiser == "sgd":
        return {"type": "SGD", "params": {**shared, "momentum": training.momentum}}
    adam = {"betas": training.betas, "eps": training.epsilon, "torch_adam": True}
    return {"type": "AdamW", "params": {**shared, **adam}}


class Trainer:
    """The engine of a model, and the loop around it."""

    def __init__(self, config: Config, layers: Sequence[nn.Module], placement: Placement, device: torch.device) -> None:
        """Let the library initialise the engine of dense and these MoE layers; collective."""
        self._placement, self._config = placement, config
        self._held = placement.held(config.experts)
        model = Model(config, layers).to(device, config.dtype)
        self._engine, *_ = library.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=settings(config),
            mpu=placement.unit,
            dist_init_required=False,
        )

    @property
    def resolved(self) -> Mapping[str, str]:
        """The optimizers, the stage of ZeRO and the layers."""
        optimizer = self._engine.optimizer
        return {
            "optimizer": f"{type(optimizer).__qualname__} of {type(self._engine.basic_optimizer).__qualname__}",
            "ZeRO": str(self._engine.zero_optimization_stage()),
            "layers": ", ".join(type(layer).__qualname__ for layer in self._engine.module.layers),
            "groups": ", ".join(str(group.get("name")) for group in optimizer.param_groups),
            "shims": library.SHIMS,
        }

    @property
    def claims(self) -> Claims:
        """In bfloat16 it looks for what is not finite by default (`check_grad_overflow`), and in float32 never."""
        return Claims(steps_not_finite="taken" if self._config.dtype == torch.float32 else "skipped")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of every layer under its number."""
        for number, layer in enumerate(self._engine.module.layers):
            for name, expert, view in self._windows(layer, read):
                yield Named(f"layer{number}/{name}", expert, view)

    def begin(self) -> None:
        """Let an optimizer with copies in float32 copy what was written, as after loading a checkpoint."""
        if hasattr(self._engine.optimizer, "refresh_fp32_params"):
            self._engine.optimizer.refresh_fp32_params()

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step."""
        engine, group = self._engine, self._placement.topology.group("dp_cp")
        engine.set_train_batch_size(len(batches) * engine.dp_world_size)
        tokens = torch.stack([batch.counted_T.sum() for batch in batches]).sum()
        dist.all_reduce(tokens, group=group)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            off_TD = engine(batch.x_TD[None])[0].float() - batch.target_TD.float()
            summed = torch.where(batch.counted_T[:, None], off_TD, 0.0).square().sum() / 2
            engine.backward(summed / tokens * group.size(), scale_wrt_gas=False)
            engine.step()
            total += summed.detach().double() / tokens
        dist.all_reduce(total, group=group)
        norm = engine.get_global_grad_norm()
        return TrainingReport(total, None if norm is None else torch.tensor(float(norm)), engine.was_step_applied())

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the moments, those of ZeRO gathered from the ranks that share them."""
        if self._engine.zero_optimization_stage() == 0:
            state = self._engine.basic_optimizer.state.get(parameter, {})
            return {name: state[own] for name, own in _NAMES.items() if state.get(own) is not None}
        names = ("momentum",) if self._config.training.optimiser == "sgd" else ("first", "second")
        return {name: self._gathered(parameter, _NAMES[name]) for name in names}

    def _gathered(self, parameter: Any, name: str) -> Tensor:
        """Put together the fragments of a state, which the library's own function does not find for experts (DS-42)."""
        whole, zero, mapping = torch.zeros(parameter.numel()), self._engine.optimizer, parameter._hp_mapping
        if mapping is not None:
            state = zero.optimizer.state[zero.single_partition_of_fp32_groups[mapping.param_group_index]]
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            whole[here.start :][: here.numel] = state[name].detach()[there.start :][: there.numel]
        dist.all_reduce(whole, group=parameter._dp_group)
        return whole.reshape(parameter.shape)

    def _windows(self, layer: Any, read: Read) -> Iterator[tuple[str, int | None, Tensor]]:
        if isinstance(layer, Expert):
            for name in ("gate", "up", "down"):
                yield name, None, read(getattr(layer, name).weight)
            return
        if isinstance(layer, library.MoE):
            yield "router", None, read(layer.deepspeed_moe.gate.wg.weight)
            for each in windows(layer, self._held, read):
                yield each.name, each.expert, each.view
            return
        yield "router", None, read(layer.router.gate.weight)
        for each in grouped_windows(layer.experts, self._held, read):
            yield each.name, each.expert, each.view
