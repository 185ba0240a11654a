"""The parts of one MoELayer, as surfaces. T tokens, E experts, N experts of this rank, D hidden, F expert hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Delivery, Named, Read, Routed, Routing

WEIGHTS = 0  # of what a router returns: weights, map
_SHIMS = {"shims": "; ".join(library.SHIMS) or "none"}


def wrapped(module: Any, config: Any, **options: Any) -> Any:
    """Return the module in Megatron's DistributedDataParallel, with its options: gradients go to `main_grad`."""
    # As Megatron-LM's trainer has it: gradients of half precision are accumulated and reduced in float32.
    half = config.params_dtype in (torch.bfloat16, torch.float16)
    ddp_config = library.DistributedDataParallelConfig(grad_reduce_in_fp32=half, **options)
    return library.DistributedDataParallel(config, ddp_config, module)


class Exchange:
    """A token dispatcher, driven as MoELayer drives it.

    All state of a dispatch is on the dispatcher (MC-05). A copy of one that has dispatched nothing is the handle: every
    microbatch in flight has a dispatcher of its own, in the same groups.
    """

    def __init__(self, layer: Any) -> None:
        self._dispatcher = layer.token_dispatcher
        self._local_experts = tuple(layer.local_expert_indices)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, as the layer placed them."""
        return self._local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher, its permutation and the sizes of its groups."""
        dispatcher = self._dispatcher
        return {
            "dispatcher": type(dispatcher).__qualname__,
            "permute": "fused" if dispatcher.config.moe_permute_fusion else "unfused",
            "ep ranks": str(dispatcher.ep_size),
            "etp ranks": str(dispatcher.tp_size),
            "capacity factor": str(dispatcher.config.moe_expert_capacity_factor),
            "in flight": "a dispatcher for each microbatch",
        } | _SHIMS

    @property
    def claims(self) -> Claims:
        """What the all-gather dispatcher sends: all tokens, with dense maps. Weights reach the experts in float32.

        Sums are scatter-adds in the dtype of the rows: torch rounds once on a CPU, and after each addition on a GPU.
        """
        gathers = isinstance(self._dispatcher, library.token_dispatcher.MoEAllGatherTokenDispatcher)
        found = Claims(combine_weights="float32")
        return replace(found, wire="all", routing="maps") if gathers else found

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Run the three steps before the experts; x is (T, D) or [sequence, batch, D]."""
        probs_TE, map_TE = routing.dense()
        dispatcher = self._of_a_microbatch()
        hidden, probs = dispatcher.dispatch_preprocess(x, map_TE, probs_TE)
        hidden, probs = dispatcher.token_dispatch(hidden, probs)
        rows_RD, counts_N, probs_R = dispatcher.dispatch_postprocess(hidden, probs)
        return Delivery.grouped(rows_RD, counts_N, probs_R), dispatcher

    def _of_a_microbatch(self) -> Any:
        """Return a dispatcher that no other microbatch has."""
        return copy(self._dispatcher)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Run the three steps after the experts, whose output is weighted already."""
        sent_back = handle.token_combine(handle.combine_preprocess(rows))
        y: Tensor = handle.combine_postprocess(sent_back)
        return y


class Experts:
    """The layer's experts of this rank, each an MLP with its gate and up projections stacked in `linear_fc1`."""

    def __init__(self, layer: Any, etp_rank: int, etp: int) -> None:
        self._module, self._ids = layer.experts, tuple(layer.local_expert_indices)
        self._etp = (etp_rank, etp)
        self.chunk = wrapped(layer.experts, layer.config)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the experts and of their layers, and the types of weights and gradients."""
        mlp = self._module.local_experts[0]
        return {
            "experts": type(self._module).__qualname__,
            "linear": type(mlp.linear_fc1).__qualname__,
            "activation": "fused" if mlp.config.bias_activation_fusion else "unfused",
            "activation function": getattr(mlp.activation_func, "__name__", str(mlp.activation_func)),
            "parameters": str(mlp.linear_fc1.weight.dtype),
            "gradients": str(mlp.linear_fc1.weight.main_grad.dtype),
        } | _SHIMS

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the weighted output, of every etp rank its part of the sum."""
        assert delivery.weights_RJ is not None  # the dispatchers return both
        assert delivery.counts_N is not None
        out_RD: Tensor = self.chunk(delivery.rows_RD, delivery.counts_N, delivery.weights_RJ[:, 0])[0]
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        """Yield up and down of every expert, gate and biases if there are any; etp splits F."""
        columns, rows = (None, None) if self._etp[1] == 1 else ((0, *self._etp), (1, *self._etp))
        names = ("gate", "up") if self._module.config.gated_linear_unit else ("up",)
        for expert, mlp in zip(self._ids, self._module.local_experts, strict=True):
            for name, matrix_FD in zip(names, read(mlp.linear_fc1.weight).chunk(len(names)), strict=True):
                yield Named(name, expert, matrix_FD, columns)
            yield Named("down", expert, read(mlp.linear_fc2.weight), rows)
            if self._module.config.add_bias_linear:  # which the library refuses where etp splits anything
                for name, bias_F in zip(names, read(mlp.linear_fc1.bias).chunk(len(names)), strict=True):
                    yield Named(f"bias_{name}", expert, bias_F)
                yield Named("bias", expert, read(mlp.linear_fc2.bias))


class Router:
    """The layer's TopKRouter, or a call of it that is recomputed in its backward, as that of a layer with it is."""

    def __init__(self, layer: Any, *, recomputed: bool = False) -> None:
        self._router, self._recomputed = layer.router, recomputed
        self._routing = layer.router.routing
        self._logits: Tensor | None = None
        layer.router.routing = self._keep_logits  # a tap: the library keeps to itself what it scores
        self._seen = WeightsSeen(layer.router, WEIGHTS)
        self.chunk = wrapped(layer.router, layer.config)

    def _keep_logits(self, logits: Tensor, **how: Any) -> Any:
        self._logits = logits
        return self._routing(logits, **how)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The router, where its scores are made, and the types of its weight, of the last logits, and of scores."""
        router = self._router
        when = "before" if router.config.moe_router_pre_softmax or router.score_function != "softmax" else "after"
        return {
            "router": type(router).__qualname__,
            "scores": f"{router.score_function} {when} selection",
            "fused": str(router.config.moe_router_fusion),
            "gate": str(router.weight.dtype),
            "logits": str(None if self._logits is None else self._logits.dtype),
            "forced": self._forced(),
            "recomputed": "by tensor_parallel.checkpoint" if self._recomputed else "no",
        } | _SHIMS

    def _forced(self) -> str:
        config = self._router.config
        random = ["random"] if config.moe_router_force_load_balancing else []
        deviation = getattr(config, "moe_router_force_biased", None)
        return ", ".join(random if deviation is None else [*random, f"biased by {deviation}"]) or "none"

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen, and noise if the config has jitter."""
        jitters = self._router.config.moe_input_jitter_eps is not None
        return Claims(dtype=self._seen.dtype, noise="training" if jitters else "no")

    def train(self, mode: bool = True) -> None:
        """Switch the module."""
        self.chunk.train(mode)

    def __call__(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Return the routing; the library makes a dense map and dense weights. Padding is where the mask is True."""
        load_E = self._router.local_tokens_per_expert  # grows with every call; there is one for the balance bias only
        before_E = None if load_E is None else load_E.clone()
        # It takes [sequence, batch, D]; rows without a batch are a batch of one.
        mask = None if padding_mask_T is None else padding_mask_T.reshape(x.shape[:-1] if x.dim() == 3 else (-1, 1))
        given = x if x.dim() == 3 else x.unsqueeze(1), mask
        again = self._recomputed and torch.is_grad_enabled()
        probs_TE, map_TE = library.random.checkpoint(self.chunk, False, *given) if again else self.chunk(*given)
        assert self._logits is not None  # the router has just made them
        logits_TE = self._logits.detach().reshape(probs_TE.shape)
        counts_E = None if load_E is None else load_E - before_E
        return Routed(Routing.from_dense(probs_TE, map_TE), logits_TE, counts_E)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate's weight, and its bias and the balance bias if there are such."""
        yield Named("router", None, read(self._router.weight))
        if self._router.bias is not None:
            yield Named("gate_bias", None, read(self._router.bias))
        if self._router.expert_bias is not None:
            yield Named("balance_bias", None, read(self._router.expert_bias))
        if getattr(self._router, "qb_beta", None) is not None:  # which is subtracted from the logits
            yield Named("balance_bias", None, torch._neg_view(read(self._router.qb_beta)))
