"""The gate that the library puts into models of DeepSeek, its loss, and the average of gradients.

T tokens, K slots, S positions of B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_conformance.backends.colossalai.placement import Placement
from moe_conformance.contract import Config, Named, Read, Routed, Routing, Topology, Trained, Unsupported


def shims() -> str:
    """Return what the library was given instead of a GPU."""
    from moe_conformance.backends.colossalai import library

    return library.SHIMS


def deepseek_gate(config: Config, placement: Placement) -> Any:
    """Build the gate that the library puts into DeepSeek's models, for tensor parallel groups of one rank.

    Raises:
        Unsupported: it has no such rule.
    """
    from moe_conformance.backends.colossalai import library

    if config.routing.score != "softmax":
        raise Unsupported(f"the gate takes the softmax of all logits, not {config.routing.score}")
    if config.routing.normalise and config.top_k == 1:
        raise Unsupported("with one slot the gate does not normalise")
    native: Any = nn.Linear(config.hidden, config.experts, bias=False, dtype=config.dtype)
    of_model = {
        "scoring_func": config.routing.score,
        "top_k": config.top_k,
        "norm_topk_prob": config.routing.normalise,
        "alpha": config.losses.auxiliary or config.losses.sequence,
        "seq_aux": config.losses.sequence > 0,
        "n_routed_experts": config.experts,
    }
    for name, value in of_model.items():
        setattr(native, name, value)
    group = placement.topology.group("tp")  # of one rank
    return library.DeepseekGate.from_native_module(
        native.to(placement.device), group, config=None, gather_output=True, fp8_communication=False
    )


class Averaged:
    """The library's ZeRO optimizer, of stage 1: averages gradients of experts over replicas, others over dp and cp."""

    def __init__(self, module: nn.Module, topology: Topology) -> None:
        """Build it, which draws random numbers."""
        from colossalai.tensor.moe_tensor.api import is_moe_tensor

        from moe_conformance.backends.colossalai import library

        parameters = list(module.parameters())
        groups = {topology.group("dp_cp"): [p for p in parameters if not is_moe_tensor(p)]}
        groups.setdefault(topology.group("edp"), []).extend(filter(is_moe_tensor, parameters))
        self._groups = {group: those for group, those in groups.items() if those}
        self._optimizer = library.zero.LowLevelZeroOptimizer(
            torch.optim.SGD(parameters, lr=0.0), pg_to_param_list=self._groups
        )

    def __call__(self) -> None:
        """Reduce what the backwards of a step have left, and gather the parts of ranks for the suite to read."""
        self._optimizer._sync_grad()
        for group, those in self._groups.items():
            store = self._optimizer.pg_to_grad_store[group]
            for parameter in those:
                if parts := store.get_partitioned_gradients_by_param_id(0, id(parameter)):
                    parameter.grad = torch.cat(parts)[: parameter.numel()].view_as(parameter)
        self._optimizer.zero_grad_stores()


def _keep_logits(gate: Any) -> None:
    linear = gate.parallel_linear

    def kept(x_TD: Tensor) -> Tensor:
        gate.logits = linear(x_TD)
        return gate.logits  # type: ignore[no-any-return]

    gate.parallel_linear = kept


class _Gates:
    """The gates of DeepSeek of a model."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build them.

        Raises:
            Unsupported: the library has no such loss.
        """
        losses = config.losses
        if losses.auxiliary and losses.sequence:
            raise Unsupported("a gate has one loss, of batches or of sequences")
        gates = [deepseek_gate(config, placement) for _ in range(losses.layers)]
        for gate in gates:
            _keep_logits(gate)
        self.module: Any = nn.ModuleList(gates)
        self._config = config
        self._averaged = Averaged(self.module, placement.topology)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class and the type of its weight."""
        gate = self.module[0]
        return {"router": type(gate).__qualname__, "gate": str(gate.weight.dtype), "shims": shims()}

    def train(self, mode: bool = True) -> None:
        """Switch the gates."""
        self.module.train(mode)

    def finish(self, tokens: int = 0) -> None:
        """Average gradients."""
        del tokens
        self._averaged()


class TrainingRouters(_Gates):
    """The gates with their loss, coefficient included."""

    takes_mask = False

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Nothing is kept of a step: the caller scales what is returned."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route; a gate returns its loss, which a block attaches to its output."""
        assert padding_mask_T is None  # takes_mask
        made = [self._route(gate, x_SBD) for gate, x_SBD in zip(self.module, x, strict=True)]
        losses = [loss for _, loss in made if loss is not None and torch.is_grad_enabled()]
        return Trained(tuple(routed for routed, _ in made), torch.stack(losses).sum() if losses else None)

    def _route(self, gate: Any, x_SBD: Tensor) -> tuple[Routed, Tensor | None]:
        """Route sequences, which the library has batches first."""
        S, B = x_SBD.shape[:2]
        ids, weights, loss = gate(x_SBD.transpose(0, 1).contiguous())
        ids_TK, weights_TK, logits_TE = (
            made.reshape(B, S, -1).transpose(0, 1).reshape(S * B, -1) for made in (ids, weights, gate.logits)
        )
        return Routed(Routing(ids_TK, weights_TK, self._config.experts), logits_TE), loss

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight of every gate."""
        for number, gate in enumerate(self.module):
            yield Named("router", number, read(gate.weight))

    def report(self) -> None:
        """Return nothing: the library displays no loss."""
        return None


class Router(_Gates):
    """One gate of DeepSeek."""

    def __call__(self, x: Tensor) -> Routed:
        """Return the routing."""
        ids_TK, weights_TK, _ = self.module[0](x.reshape(1, -1, x.shape[-1]))
        return Routed(Routing(ids_TK, weights_TK, self._config.experts), self.module[0].logits)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight."""
        yield Named("router", None, read(self.module[0].weight))
