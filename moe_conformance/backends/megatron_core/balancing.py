"""The routers of a model with a balance bias (expert bias), which the end of a step updates. E experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.backends.megatron_core.surfaces import Router
from moe_conformance.contract import Balance, Claims, Config, Named, Read, Routed, Unsupported


def with_balance(config: Config, pp: int) -> Config:
    """Return the config of every layer, with the fields of TransformerConfig that enable updates.

    Raises:
        Unsupported: they cannot be asked for.
    """
    if not config.routing.balance_bias:
        raise Unsupported("routers without routing.balance_bias have none to update")
    quantiles = config.balance.rule == "quantile"
    if quantiles and not differences.has_field("moe_router_quantile_balancing_ema"):
        raise Unsupported("this version of Megatron-Core moves its bias by the sign of the load alone")
    if quantiles and config.routing.score != "softmax_topk":
        raise Unsupported(f"Megatron-Core takes quantiles of logits, whatever the scores are: {config.routing.score}")
    if pp > 1:
        raise Unsupported("with pp > 1 finalize_model_grads needs the embeddings of a whole model")
    layers = config.balance.layers + config.balance.dense_layers
    extra: list[tuple[str, Any]] = [("moe_router_bias_update_rate", config.balance.rate), ("num_layers", layers)]
    if quantiles:
        extra += [("moe_router_load_balancing_type", "quantile_balancing"), ("moe_router_enable_expert_bias", False)]
    return replace(config, extra=(*config.extra, *extra), balance=Balance())


class BalancingRouters:
    """One TopKRouter for each layer, each wrapped for the reduction of its gradients."""

    def __init__(self, layers: Sequence[Any], *, recomputed: bool) -> None:
        """Take the layers, whose numbers begin after the dense ones."""
        self._routers = [Router(layer, recomputed=recomputed) for layer in layers]
        self._modules: Any = nn.ModuleList([layer.router for layer in layers])
        self._quantiles = getattr(layers[0].router, "qb_beta", None) is not None
        self.takes_mask = not self._quantiles  # "Quantile balancing routing does not support padding masks yet."

    @property
    def resolved(self) -> Mapping[str, str]:
        """The routers."""
        return self._routers[0].resolved

    @property
    def claims(self) -> Claims:
        """The loads are those after drops, also of random logits; quantiles are of microbatches and groups."""
        return Claims(
            balance_loads="kept", forced_loads="counted", balance_quantiles="parts" if self._quantiles else "step"
        )

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight and the expert bias of every router."""
        for number, router in enumerate(self._routers):
            for window in router.named(read):
                yield Named(window.name, number, window.view)

    def train(self, mode: bool = True) -> None:
        """Switch the modules."""
        for router in self._routers:
            router.chunk.train(mode)

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Route; the routers count the tokens themselves."""
        return tuple(router(x_SBD, padding_mask_T) for router, x_SBD in zip(self._routers, x, strict=True))

    def update(self) -> None:
        """Finalize the gradients, in which biases are updated and counters set to zero."""
        library.finalize_model_grads([router.chunk for router in self._routers])

    def loads(self) -> Sequence[Tensor] | None:
        """Return the counters, which the rule by quantiles does without."""
        return None if self._quantiles else [module.local_tokens_per_expert for module in self._modules]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of all routers."""
        state: Mapping[str, Any] = self._modules.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of all routers."""
        self._modules.load_state_dict(state)

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters of all routers."""
        parameters: Iterable[Tensor] = self._modules.parameters()
        return parameters
