"""The library's gates as routers, and the gates of a model with a loss or a score correction.

T tokens, K slots, E experts, S positions of B sequences, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_conformance.backends.automodel.placement import Model, Placement, backend_config, moe_config
from moe_conformance.backends.fsdp_windows import local, whole_window
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Trained, Unsupported


def routing_of(config: Config) -> dict[str, Any]:
    """Return the options of the gate that has the requested routing.

    Raises:
        Unsupported: none has.
    """
    routing = config.routing
    if config.router_dtype not in (None, config.dtype, torch.float32):
        raise Unsupported(f"routing weights are returned in float32 or the dtype of tokens, not {config.router_dtype}")
    if routing.normalise and config.top_k == 1:
        raise Unsupported("with one slot a gate does not normalise")
    limited = routing.groups is not None
    if limited and routing.group_score not in ("top2_sum", "max"):
        raise Unsupported(f"groups are ranked by their best or two best experts, not by {routing.group_score}")
    two_best = routing.group_score == "top2_sum"
    if routing.score == "softmax" and not limited and not routing.balance_bias:
        return {"score_func": "softmax", "softmax_before_topk": True}
    if routing.score == "softmax_topk" and not limited and not routing.balance_bias:
        return {"score_func": "softmax", "softmax_before_topk": False}
    if routing.score == "softmax" and (two_best or not limited):
        return {"score_func": "softmax_with_bias"}
    if routing.score == "sigmoid" and (two_best or not limited):
        return {"score_func": "sigmoid" if routing.balance_bias else "sigmoid_with_bias"}
    if routing.score == "sigmoid" and not routing.balance_bias:
        return {"score_func": "sigmoid"}
    if routing.score == "sqrtsoftplus" and not limited:
        return {"score_func": "sqrtsoftplus"}
    raise Unsupported(
        f"no gate has score={routing.score!r} with groups={routing.groups!r}, group_score={routing.group_score!r}, "
        f"balance_bias={routing.balance_bias!r}"
    )


def require_routed(config: Config, placement: Placement) -> None:
    """Refuse a gate of which FSDP2 would not keep an equal part on every rank."""
    if config.experts % placement.batches:
        raise Unsupported(f"FSDP2 keeps no equal parts of {config.experts} rows on {placement.batches} ranks")


def gate_windows(gate: Any, read: Read) -> Iterator[Named]:
    """Yield this rank's part of the weight, and the biases that there are."""
    yield from whole_window("router", gate.weight, read)
    if gate.bias is not None:
        yield from whole_window("gate_bias", gate.bias, read)
    if gate.e_score_correction_bias is not None:
        yield Named("balance_bias", None, read(local(gate.e_score_correction_bias)))


class _Tap(nn.Module):
    """Replaces the experts of a module, and keeps what they would receive."""

    handed: tuple[Tensor, Tensor]

    def forward(self, x_TD: Tensor, mask_T: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        self.handed = (weights_TK, ids_TK)
        return x_TD


def _route(moe: Any, x: Tensor, padding_mask_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    moe(x.reshape(-1, x.shape[-1]), padding_mask_T)
    return *moe.experts.handed, moe.logits_TE


class _Gates:
    """The modules of L layers of a model, whose experts are replaced by taps."""

    def __init__(self, config: Config, placement: Placement, layers: int = 1, **further: Any) -> None:
        """Build and place the modules."""
        from nemo_automodel.components.moe.layers import MoE
        from nemo_automodel.components.moe.load_balance_metrics import enable_load_balance_tracking

        require_routed(config, placement)
        self._config, self._placement = config, placement
        options = moe_config(config, **routing_of(config) | further)
        modules: list[Any] = [MoE(options, backend_config(config)) for _ in range(layers)]
        for moe in modules:
            moe.experts = _Tap()
            _keep_logits(moe)
        self._seen = WeightsSeen(modules[0].gate, 0)
        self.model = Model(placement, modules, experts=False)
        self.gates = [moe.gate for moe in modules]
        enable_load_balance_tracking(self.model)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, its rule, and the type of its weight."""
        gate = self.gates[0]
        return {"router": type(gate).__name__, "score_func": gate.score_func, "gate": str(gate.weight.dtype)}

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def train(self, mode: bool = True) -> None:
        """Switch the model."""
        self.model.train(mode)

    def route(self, x: Sequence[Tensor], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Return the routing of every layer."""
        made = self.model(_route, x, [padding_mask_T] * len(x))
        return tuple(
            Routed(Routing(ids_TK, weights_TK, self._config.experts), logits_TE, gate._last_expert_load)
            for (weights_TK, ids_TK, logits_TE), gate in zip(made, self.gates, strict=True)
        )

    def finish(self) -> None:
        """Do what the trainer does after the last backward."""
        self.model.finish()


def _keep_logits(moe: Any) -> None:
    route = moe.gate._route_scores

    def kept(logits_TE: Tensor) -> Any:
        moe.logits_TE = logits_TE
        return route(logits_TE)

    moe.gate._route_scores = kept


class Router(_Gates):
    """One gate, with or without a mask."""

    def __call__(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        """Return what the experts would receive, and the load that the gate keeps for display."""
        return self.route([x], padding_mask_T)[0]

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows on the gate."""
        return gate_windows(self.gates[0], read)


class _Layers(_Gates):
    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows on every gate, with the number of its layer."""
        for number, gate in enumerate(self.gates):
            for window in gate_windows(gate, read):
                yield replace(window, expert=number)


class TrainingRouters(_Layers):
    """The gates of a model with their auxiliary loss, which is attached to the weights."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the gates.

        Raises:
            Unsupported: the library has no such loss.
        """
        losses = config.losses
        if others := [name for name in ("sequence", "global_batch", "first_choice", "z") if getattr(losses, name)]:
            raise Unsupported(f"a gate has no loss {', '.join(others)}: its auxiliary loss is the only one")
        if losses.per_token or losses.recompute:
            raise Unsupported("the main loss is divided by tokens beforehand, and recomputation is one of whole layers")
        super().__init__(config, placement, losses.layers, aux_loss_coeff=losses.auxiliary)
        self._cp = placement.topology.sizes["cp"]
        mesh = placement.cp_mesh
        for moe in self.model.modules_of_layers:
            moe.cp_mesh = mesh

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Set the scale of the loss as the trainer does; it is one of the process."""
        from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale * self._cp / microbatches)

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route; a loss is attached."""
        return Trained(self.route(x, padding_mask_T))

    def finish(self, tokens: int = 0) -> None:
        """Do what the trainer does after the last backward."""
        del tokens
        super().finish()

    def report(self) -> Mapping[str, Tensor]:
        """Return what the library displays: the mean over layers of the last losses that the gates keep."""
        from nemo_automodel.components.moe.load_balance_metrics import collect_expert_loads

        kept = [each["aux_loss"] for each in collect_expert_loads(self.model).values()]
        found = [loss for loss in kept if loss is not None]
        return {"auxiliary": torch.stack(found).mean()} if found else {}


def _placed_as(tensor: Any, part: Tensor) -> Tensor:
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else part


class BalancingRouters(_Layers):
    """The gates of a model whose score correction is updated by the load."""

    takes_mask = True

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the gates.

        Raises:
            Unsupported: the library has no such update.
        """
        balance = config.balance
        if balance.rule != "sign" or not balance.rate:
            raise Unsupported(f"the bias is changed by the sign of the load, by a rate of more than 0: not {balance}")
        if balance.recompute:
            raise Unsupported("recomputation is one of whole layers")
        super().__init__(config, placement, balance.layers, gate_bias_update_factor=balance.rate)

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Route; the gates count where they train."""
        return self.route(x, padding_mask_T)

    def update(self) -> None:
        """Update every bias, as `update_moe_gate_bias` of a model does."""
        for gate in self.gates:
            gate.update_bias()

    def loads(self) -> Sequence[Tensor]:
        """Return the counters; a gate has none before its first forward."""
        none = torch.zeros(self._config.experts, device=self._placement.device)
        return [none if gate._cumulative_expert_load is None else gate._cumulative_expert_load for gate in self.gates]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the model, of what is sharded this rank's part."""
        return {name: local(value) for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the model, of what is sharded this rank's part."""
        now = self.model.state_dict()
        self.model.load_state_dict({name: _placed_as(now[name], value) for name, value in state.items()})

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters of the model."""
        return self.model.parameters()
