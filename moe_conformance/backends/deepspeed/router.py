"""The library's gates as routers. T tokens, K slots, E experts, S positions of B sequences, D hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Unsupported


def gate_options(config: Config) -> dict[str, Any]:
    """Return the arguments of the MoE layer that select a gate.

    Raises:
        Unsupported: it has none of that kind.
    """
    routing, capacity, K = config.routing, config.capacity, config.top_k
    plain = {"score": "softmax", "scale": 1.0, "groups": None, "balance_bias": False, "forced": (), "normalise": K > 1}
    if odd := [f"{name}={getattr(routing, name)!r}" for name in plain if getattr(routing, name) != plain[name]]:
        raise Unsupported(f"DeepSpeed's gate with top_k = {K} has no option {', '.join(odd)}")
    if config.gate_bias:
        raise Unsupported("DeepSpeed's gate has no bias")
    if config.jitter not in (0.0, 0.01):
        raise Unsupported(f"the jitter of DeepSpeed's gate is 0.01, and no option: not {config.jitter}")
    noise = {
        "noisy_gate_policy": "Jitter" if config.jitter else None,
        "top2_2nd_expert_sampling": False,
        "use_rts": False,
        "min_capacity": capacity.minimum,
    }
    if capacity.factor is None:
        return noise | {"drop_tokens": False}
    policy = {1: "neither", 2: "position"}.get(K, "weights")
    if capacity.drop_policy != policy:
        raise Unsupported(f"DeepSpeed's gate with top_k = {K} drops by {policy}, not by {capacity.drop_policy}")
    return noise | {
        "capacity_factor": capacity.factor,
        "eval_capacity_factor": capacity.factor,
    }


def claims_of_gate(K: int, *, jitter: bool) -> Claims:
    """Return the claims of a gate with K choices."""
    return Claims(
        dtype=torch.float32,
        noise="training" if jitter else "no",
        drop_order="choices",
        drop_by="scores",
        normalised_over="kept" if K > 1 else "selected",
    )


@contextmanager
def _kept_logits(K: int) -> Iterator[list[Tensor]]:
    """A tap: keep the logits that a gate with K choices hands to the library's function of that number of them."""
    name, kept = {1: "top1gating", 2: "top2gating"}.get(K, "topkgating"), list[Tensor]()
    gating = getattr(library.sharded_moe, name)

    def tap(logits_TE: Tensor, *how: Any, **named: Any) -> Any:
        kept.append(logits_TE.detach())
        return gating(logits_TE, *how, **named)

    with patch.object(library.sharded_moe, name, tap):
        yield kept


class Gate:
    """The TopKGate of one of the MoE layers in an engine, which reduces its gradient."""

    def __init__(self, engine: Any, number: int) -> None:
        """Take the engine of several layers, and the number of one of them."""
        self.engine = engine
        self._gate: Any = engine.module[number].deepspeed_moe.gate

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, what it drops by, and the type of its weight."""
        gate = self._gate
        return {
            "router": type(gate).__qualname__,
            "drops": str(gate.drop_tokens),
            "gate": str(gate.wg.weight.dtype),
            "shims": library.SHIMS,
        }

    @property
    def claims(self) -> Claims:
        """It computes in float32."""
        return claims_of_gate(self._gate.k, jitter=self._gate.noisy_gate_policy is not None)

    def train(self, mode: bool = True) -> None:
        """Switch the layer."""
        self.engine.train(mode)

    def __call__(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Return the routing; a dropped slot has no expert."""
        return self.route(x, padding_mask_T)[0]

    def route(self, x: Tensor, padding_mask_T: Tensor | None = None) -> tuple[Routed, Tensor]:
        """Return the routing and the loss; the library has one where tokens are used, and none of them is padding."""
        used_T = None if padding_mask_T is None else (~padding_mask_T).long()
        with _kept_logits(self._gate.k) as kept:
            loss, _, E, ids_KT, _, weights_KT, counts_E = self._gate(x.reshape(-1, x.shape[-1]), used_T, True)
        return Routed(Routing(ids_KT.T.long(), weights_KT.T, E), kept[0], counts_E), loss

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight."""
        yield Named("router", None, read(self._gate.wg.weight))


class ChoiceRouter:
    """The TokenChoiceTopKRouter that AutoEP puts into the blocks of models, in an engine where that takes the dtype."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build the router from a model's config, as AutoEP does.

        Raises:
            Unsupported: it has no such rule.
        """
        routing = config.routing
        if config.router_dtype not in (None, config.dtype):
            raise Unsupported(f"AutoEP's router has logits of the dtype of its tokens, not of {config.router_dtype}")
        if routing.forced:
            raise Unsupported(f"no router of DeepSpeed forces routes: not {routing.forced}")
        if routing.score not in ("softmax", "sigmoid"):
            raise Unsupported(f"AutoEP's router scores by softmax or sigmoid, not {routing.score}")
        if routing.groups is not None and routing.group_score == "topk_sum":
            raise Unsupported("AutoEP's router ranks groups by their best or two best experts, not by topk_sum")
        groups, chosen = routing.groups or (None, None)
        router = library.TokenChoiceTopKRouter(
            config.hidden, config.experts, groups, chosen, config.top_k, routing.score, routing.normalise,
            routing.scale, config.gate_bias, routing.group_score,
        )  # fmt: skip
        self.engine: Any = None
        self.module, self._router = nn.ModuleList([router.to(device, config.dtype)]), router
        self._bias_E = torch.zeros(config.experts, device=device) if routing.balance_bias else None
        self._logits: Tensor | None = None
        router.gate.register_forward_hook(self._keep_logits)
        self._seen = WeightsSeen(router, 0)

    def _keep_logits(self, _module: nn.Module, _inputs: object, logits_TE: Tensor) -> None:
        self._logits = logits_TE

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class and the type of its weight."""
        return {"router": type(self._router).__qualname__, "gate": str(self._router.gate.weight.dtype)}

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def __call__(self, x: Tensor) -> Routed:
        """Return the routing; the caller passes the bias, as AutoEP's layer does."""
        weights_TK, ids_TK, counts_E = self._router(x.reshape(-1, x.shape[-1]), self._bias_E)
        assert self._logits is not None  # the router has just called its gate
        return Routed(Routing(ids_TK, weights_TK, self._router.num_experts), self._logits, counts_E)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight, and the biases of the config."""
        yield Named("router", None, read(self._router.gate.weight))
        if self._router.gate.bias is not None:
            yield Named("gate_bias", None, read(self._router.gate.bias))
        if self._bias_E is not None:
            yield Named("balance_bias", None, read(self._bias_E))
