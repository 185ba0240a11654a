"""A training step of Megatron-Core: its model, schedule, finishing of gradients and optimiser. T tokens, D hidden.

The loop is that of Megatron-LM's `train_step`, of which Megatron-Core has all parts: buffers are zeroed, the schedule
runs the microbatches and `finalize_model_grads`, the optimiser clips and steps. The loss of a microbatch, and what is
reported of it, are the caller's there as here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.backends.megatron_core.layer import Layer
from moe_conformance.backends.megatron_core.overlap import PLAIN
from moe_conformance.backends.megatron_core.sharded_state import STATE, gathered
from moe_conformance.backends.megatron_core.surfaces import wrapped
from moe_conformance.contract import Claims, Config, Named, Read, Topology, Training, TrainingBatch, TrainingReport


def with_training(config: Config) -> Config:
    """Return the config of every layer, with the fields of TransformerConfig of a model that is trained.

    `calculate_per_token_loss` has gradients divided by the number of tokens of the step, and not by those of each
    microbatch and rank, as the library does without it.
    """
    training = config.training
    extra: list[tuple[str, Any]] = [
        ("num_layers", training.dense_layers + training.layers),
        ("moe_layer_freq", [0] * training.dense_layers + [1] * training.layers),
        ("perform_initialization", True),  # 0.16 marks parts of tp ranks, for the norm, only where it initialises them
        *PLAIN,
    ]
    return replace(config, extra=(*config.extra, *extra), training=Training())


def optimizer_config(training: Training, dtype: torch.dtype) -> Any:
    """Return the OptimizerConfig; without a largest norm nothing is clipped, and no norm is computed."""
    return library.OptimizerConfig(
        optimizer="adam" if training.optimiser == "adamw" else "sgd",
        lr=training.rate,
        weight_decay=training.decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_eps=training.epsilon,
        sgd_momentum=training.momentum,
        clip_grad=training.largest_norm or 0.0,
        use_distributed_optimizer=training.sharded_state,
        params_dtype=dtype,
    )


def model(built: Any, dense_layers: int) -> Any:
    """Build a GPT model of one stage without embedding and output layer, whose attention returns what it is given."""
    logging.getLogger(library.GPTModel.__module__).setLevel(logging.ERROR)  # since 0.19 it advises another class
    backend = library.LocalSpecProvider()

    def layer(mlp: Any) -> Any:
        parts = library.TransformerLayerSubmodules(mlp=mlp, mlp_bda=library.get_bias_dropout_add)
        return library.ModuleSpec(module=library.TransformerLayer, submodules=parts)

    dense = layer(library.get_mlp_module_spec_for_backend(backend=backend))
    moe = layer(
        library.get_moe_module_spec_for_backend(
            backend=backend, num_experts=built.num_moe_experts, moe_grouped_gemm=False
        )
    )
    specs = [dense] * dense_layers + [moe] * (built.num_layers - dense_layers)
    # It chooses an attention of Transformer Engine by variables of the process, which stay set (MC-153).
    with patch.dict(os.environ):
        return library.GPTModel(
            built,
            library.TransformerBlockSubmodules(layer_specs=specs),
            vocab_size=1,
            max_sequence_length=1,
            pre_process=False,
            post_process=False,
            position_embedding_type="none",
        )


class Trainer:
    """The wrapped model, its optimiser, and the loop around them."""

    def __init__(self, built: Any, config: Config, topology: Topology, device: torch.device) -> None:
        """Build the model, wrap it, and get its optimiser; collective."""
        self._topology, self._built, self._sharded = topology, built, config.training.sharded_state
        self._gpt = model(built, config.training.dense_layers).to(device)
        # Since 0.19 it advises to lay the buffers out before, as only some of its optimisers need.
        logging.getLogger(library.DistributedDataParallel.__module__).setLevel(logging.ERROR)
        self._chunk = wrapped(self._gpt, built, use_distributed_optimizer=config.training.sharded_state)
        self._optimizer = library.get_megatron_optimizer(
            optimizer_config(config.training, config.dtype), [self._chunk], use_gloo_process_groups=False
        )
        built.finalize_model_grads_func = library.finalize_model_grads
        built.grad_scale_func = self._optimizer.scale_loss
        built.no_sync_func = self._chunk.no_sync
        self._moe = {
            number: Layer(layer.mlp, config, topology, self._chunk)
            for number, layer in enumerate(self._gpt.decoder.layers)
            if number >= config.training.dense_layers
        }

    @property
    def resolved(self) -> Mapping[str, str]:
        """What an MoE layer reports, the schedule, and the optimisers, which are chained."""
        chained = ", ".join(
            f"{type(each).__qualname__} of {type(each.optimizer).__qualname__}"
            for each in self._optimizer.chained_optimizers
        )
        layer = next(iter(self._moe.values()))
        return {**layer.resolved, "optimizer": chained, "schedule": "forward_backward_no_pipelining"}

    @property
    def claims(self) -> Claims:
        """The optimiser of float32 looks for nothing that is not finite."""
        return Claims(steps_not_finite="taken")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of every layer under its number."""
        ranks = self._topology.ranks("tp")
        tp = ranks.index(self._topology.rank), len(ranks)
        for number, layer in enumerate(self._gpt.decoder.layers):
            if number in self._moe:
                for each in self._moe[number].named(read):
                    yield Named(f"layer{number}/{each.name}", each.expert, each.view, each.shard)
                continue
            gate_FD, up_FD = read(layer.mlp.linear_fc1.weight).chunk(2, 0)
            yield Named(f"layer{number}/gate", None, gate_FD, (0, *tp))
            yield Named(f"layer{number}/up", None, up_FD, (0, *tp))
            yield Named(f"layer{number}/down", None, read(layer.mlp.linear_fc2.weight), (1, *tp))

    def begin(self) -> None:
        """Let the optimiser copy what was written."""
        self._optimizer.reload_model_params()

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step."""
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = library.schedules.get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=[self._chunk],
            num_microbatches=len(batches),
            seq_length=len(batches[0].x_TD),
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = self._optimizer.step()
        total_2 = torch.stack(reports).sum(0)
        dist.all_reduce(total_2, group=self._topology.group("dp_cp"))
        loss = total_2[0] / total_2[1].clamp_min(1)
        return TrainingReport(loss, None if norm is None else torch.tensor(float(norm)), bool(updated))

    def _forward(self, batches: Iterator[TrainingBatch], chunk: Any) -> tuple[Tensor, Any]:
        """Return the output of a microbatch, and its loss: what a trainer's forward_step does."""
        batch = next(batches)
        self._gpt.set_input_tensor(batch.x_TD.unsqueeze(1))
        y_TBD = chunk(input_ids=None, position_ids=None, attention_mask=None)
        return y_TBD, partial(self._loss, batch)

    def _loss(self, batch: TrainingBatch, y_TBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum over this rank's tokens, the number of those of all tp ranks, and what is reported of them."""
        off_TD = torch.where(batch.counted_T[:, None], y_TBD.squeeze(1) - batch.target_TD, 0.0)
        summed = off_TD.square().sum() / 2
        reported_2 = torch.stack([summed.detach().double(), batch.counted_T.sum().double()])
        dist.all_reduce(reported_2, group=self._topology.group("tp"))
        return summed, reported_2[1].int(), reported_2

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the moments that the optimiser of a parameter has; those that are sharded are gathered."""
        if self._sharded:
            return gathered(self._optimizer.chained_optimizers, parameter)
        for each in self._optimizer.chained_optimizers:
            state = each.optimizer.state.get(parameter)
            if state is not None:
                return {STATE[name]: value for name, value in state.items() if name in STATE and value is not None}
        return {}
