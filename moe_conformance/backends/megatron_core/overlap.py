"""A step that overlaps microbatches: a GPT model of MoE layers alone under Megatron-Core's combined 1F1B schedule.

Its own schedule, schedule plan, callables and layers run, on streams and events that stand in for those of a device.
The model is one stage without embedding and output layer; its attention returns what it is given. T tokens, D hidden.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.backends.megatron_core.delayed import Provider, delaying
from moe_conformance.backends.megatron_core.layer import Layer
from moe_conformance.backends.megatron_core.surfaces import wrapped
from moe_conformance.contract import Claims, Config, Overlap, Topology, Unsupported
from moe_conformance.stand_ins import streams

PLAIN: tuple[tuple[str, Any], ...] = (
    ("hidden_dropout", 0.0),
    ("attention_dropout", 0.0),
    ("calculate_per_token_loss", True),  # the schedule then divides no loss: dL/dy is what it is given
)


def with_overlap(config: Config) -> Config:
    """Return the config of every layer, with the fields of TransformerConfig that enable the schedule.

    Raises:
        Unsupported: there is no such option.
    """
    overlap = config.overlap
    if overlap.chunks > 1:
        raise Unsupported("Megatron-Core overlaps whole microbatches, and no chunks of one")
    extra: list[tuple[str, Any]] = [
        ("num_layers", overlap.layers),
        ("overlap_moe_expert_parallel_comm", True),
        ("delay_wgrad_compute", overlap.deferred_weights),
        *PLAIN,
    ]
    if overlap.recompute_experts:
        extra += differences.recomputed_under_overlap()
    return replace(config, extra=(*config.extra, *extra), overlap=Overlap())


class _NoAttention(library.IdentityOp):  # type: ignore[misc]
    """In the place of an attention: returns its input, and has no weights to defer."""

    def backward_dw(self) -> None:
        pass


def model(built: Any, delays: bool) -> Any:
    """Build the model of a TransformerConfig."""
    logging.getLogger(library.GPTModel.__module__).setLevel(logging.ERROR)  # since 0.19 it advises another class
    provider = Provider() if delays else library.LocalSpecProvider()
    mlp = library.get_moe_module_spec_for_backend(
        backend=provider, num_experts=built.num_moe_experts, moe_grouped_gemm=False
    )
    parts = library.TransformerLayerSubmodules(
        self_attention=_NoAttention, mlp=mlp, mlp_bda=library.get_bias_dropout_add
    )
    # It chooses an attention of Transformer Engine by variables of the process, which stay set (MC-153).
    with patch.dict(os.environ):
        return library.GPTModel(
            built,
            library.ModuleSpec(module=library.TransformerLayer, submodules=parts),
            vocab_size=1,
            max_sequence_length=1,
            pre_process=False,
            post_process=False,
            position_embedding_type="none",
        )


class OverlappedLayer(Layer):
    """A layer of the model, which computes all weight gradients in its backward where it is called alone."""

    def __init__(self, transformer_layer: Any, config: Config, topology: Topology, chunk: Any) -> None:
        """Take a TransformerLayer, and the wrapped model that it is of."""
        super().__init__(transformer_layer.mlp, config, topology, chunk)
        self._transformer_layer = transformer_layer

    def __call__(self, x: Tensor) -> Tensor:
        """Return y of (T, D)."""
        y: Tensor = self._transformer_layer(x.unsqueeze(1), attention_mask=None)[0]
        return y.squeeze(1)


class OverlappedStep:
    """The layers of a model, and the schedule of their step."""

    loss_convention: Literal["sum", "mean_over_dp"] = "sum"  # as `calculate_per_token_loss` has it

    def __init__(self, built: Any, config: Config, topology: Topology, device: torch.device) -> None:
        """Build the model and wrap it; collective."""
        self._config, self._delays = built, config.overlap.deferred_weights
        gpt = model(built, self._delays).to(device)
        options = {"delay_wgrad_compute": True} if self._delays else {}
        self._chunk = wrapped(gpt, built, **options)
        self._layers = [OverlappedLayer(layer, config, topology, self._chunk) for layer in gpt.decoder.layers]
        self._on_cpu = device.type == "cpu"

    @property
    def layers(self) -> Sequence[OverlappedLayer]:
        """The layers."""
        return self._layers

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the first layer reports, the schedule, and what stands in for a GPU and Transformer Engine."""
        standing = ["attention that returns its input"]
        if self._on_cpu:
            standing.append("streams and events: operators run at once, all-to-alls of a side stream are in flight")
        if self._delays:
            standing.append("delayed weight gradients of Transformer Engine's linear layers")
        return {
            **self._layers[0].resolved,
            "schedule": "combined_1f1b_schedule_for_no_pipelining",
            "weight gradients": "delayed" if self._delays else "at once",
            "stand-ins": "; ".join(standing),
        }

    @property
    def claims(self) -> Claims:
        """Those of the layers, which are transformer layers."""
        return replace(self._layers[0].claims, residual="yes")

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Let the schedule run the microbatches; their loss is the product of y and the upstream gradient."""
        ys: list[Tensor] = []
        with self._prepared():
            library.combined_1f1b.combined_1f1b_schedule_for_no_pipelining(
                partial(self._planned, ys),
                iter(zip(xs, upstreams, strict=True)),
                self._chunk,
                len(xs),
                None,  # no input tensor, and no gradient of an output: one stage
                None,
                [],
                self._config,
                False,
                None,
                False,
                nullcontext,
                torch.zeros((), dtype=torch.int),
                partial(library.schedules.check_first_val_step, None, False),
            )
        return ys

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        with ExitStack() as prepared:
            if self._on_cpu:
                prepared.enter_context(streams.overlapping())
            if self._delays:
                prepared.enter_context(delaying(self._chunk))
            yield

    def _planned(
        self, ys: list[Tensor], batches: Iterator[tuple[Tensor, Tensor]], gpt: Any, return_schedule_plan: bool = True
    ) -> tuple[Any, Any]:
        """Return the plan of a microbatch, and its loss: what a trainer's forward_step does."""
        x_TD, upstream_TD = next(batches)
        gpt.set_input_tensor(x_TD.unsqueeze(1))

        def loss(y_TBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            ys.append(y_TBD.detach().squeeze(1))
            total = (y_TBD.squeeze(1).float() * upstream_TD.float()).sum()  # its gradient is the upstream, bit for bit
            return total, torch.ones((), dtype=torch.int), total.detach()

        return gpt.build_schedule_plan(input_ids=None, position_ids=None, attention_mask=None), loss
